"""Outputs with a form: from a model of noise, and from one that would write something else."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from json import JSONDecodeError
from json import loads
from pathlib import Path
from re import fullmatch
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from mkc.errors import NoTokenAllowedError
from mkc.errors import RequestFieldError
from serve.model import ServedModel
from tests.runtime.text.checkpoints import ranked_checkpoint
from tests.serve.answers import answers
from tests.serve.answers import noise
from tests.serve.answers import reply
from tests.serve.running import Running

QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": {"type": "integer", "minimum": -5, "maximum": 1000},
    "number": {"type": "number"},
    "short text": {"type": "string", "maxLength": 8},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "date": {"type": "string", "format": "date"},
    "enum": {"enum": ["red", "green", 3, None]},
    "const": {"const": {"kind": "fixed"}},
    "list": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "pair": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["a"]}],
        "items": False,
    },
    "object": POINT,
    "optional": {**POINT, "required": ["y"]},
    "nested": {
        "type": "object",
        "properties": {"from": POINT, "to": {"type": "array", "items": POINT, "maxItems": 2}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
    "any of": {"anyOf": [POINT, {"type": "boolean"}]},
    "references": {
        "type": "object",
        "properties": {"place": {"$ref": "#/$defs/Point"}},
        "required": ["place"],
        "additionalProperties": False,
        "$defs": {"Point": POINT},
    },
    "recursive": {
        "type": "object",
        "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
        "required": ["next"],
        "additionalProperties": False,
    },
}
SEEDS = range(4)


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    }


def is_json(text: str) -> bool:
    try:
        loads(text)
    except JSONDecodeError:
        return False
    return True


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> ServedModel:
    return noise(checkpoint)


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A model of the other kind of markup."""
    folder = tmp_path_factory.mktemp("channels")
    ranked_checkpoint(folder)
    return noise(folder)


def test_noise_is_no_json(model: ServedModel) -> None:
    found, _ = reply(model, {"max_tokens": 60, **QUIET})
    assert not is_json(found.content)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("kind", ["model", "channels"])
def test_noise_keeps_to_a_schema(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    model: ServedModel = request.getfixturevalue(kind)
    ended = 0
    for seed in SEEDS:
        # Even digits come to an end by chance only: a temperature, and room.
        body = {**form(SCHEMAS[name]), "seed": seed, "temperature": 1.0, "max_tokens": 600}
        body |= QUIET if kind == "model" else {"reasoning_effort": "none"}
        found, output = reply(model, body)
        if output.finish.reason == "length":
            continue
        ended += 1
        Draft202012Validator(SCHEMAS[name]).validate(loads(found.content))
        assert output.finish.reason == "stop"
    assert ended >= 2, "nothing was tested"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_output_that_is_cut_says_so(model: ServedModel, temperature: float) -> None:
    lengths = {}
    for most in (1, 3, 12, 200):
        body = {**form(SCHEMAS["nested"]), "seed": 1, "temperature": temperature, **QUIET}
        found, output = reply(model, body | {"max_tokens": most})
        lengths[most] = output.finish.reason
        assert is_json(found.content) == (output.finish.reason == "stop")
    assert lengths[1] == lengths[3] == "length"


def test_a_thought_is_free_and_the_answer_behind_it_is_not(model: ServedModel) -> None:
    ended = 0
    for seed in range(12):
        body = {**form(SCHEMAS["boolean"]), "seed": seed, "temperature": 1.0, "max_tokens": 400}
        found, output = reply(model, body)
        assert found.reasoning
        if output.finish.reason == "stop":
            ended += 1
            assert isinstance(loads(found.content), bool)
        else:
            assert not found.content or "true".startswith(found.content)
    assert ended, "no thought came to an end"


def test_a_thought_in_a_channel_is_free(channels: ServedModel) -> None:
    for seed in SEEDS:
        body = {**form(SCHEMAS["enum"]), "seed": seed, "temperature": 1.0, "max_tokens": 3000}
        found, output = reply(channels, body)
        assert found.reasoning
        assert output.finish.reason == "length" or loads(found.content) in SCHEMAS["enum"]["enum"]


def test_any_object(model: ServedModel) -> None:
    body = {"response_format": {"type": "json_object"}, "max_tokens": 3000, "temperature": 1.0}
    found, output = reply(model, {**body, "seed": 3, "top_k": 20, **QUIET})
    assert found.content.startswith("{")
    assert output.finish.reason == "length" or isinstance(loads(found.content), dict)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"structured_outputs": {"regex": r"[a-c]{3}-[0-9]+x"}}, r"[a-c]{3}-[0-9]+x"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "(" start ")" | /[xy]/'}}, r"\(*[xy]\)*"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"json_object": True}, "max_tokens": 2}, r"\{.*"),
        ({"guided_regex": "ab?c"}, "ab?c"),
        ({"guided_choice": ["maybe"]}, "maybe"),
        ({"guided_json": {"enum": [12]}}, "12"),
        ({"guided_grammar": 'root ::= "a" rest\nrest ::= [xy] | [z] rest'}, "az*[xy]"),
    ],
)
def test_expressions_choices_and_grammars(
    model: ServedModel, fields: dict[str, Any], wanted: str
) -> None:
    body = {"max_tokens": 100, "temperature": 1.0, "n": 3, "seed": 5, **QUIET, **fields}
    for output in answers(model, body):
        assert fullmatch(wanted, output.text), output.text


def test_spaces_do_not_go_on_forever(checkpoint: Path) -> None:
    """A model that likes nothing better than a space writes the object all the same."""
    model = noise(checkpoint)
    (space,) = model.tokenizer.encode(" ", allow_special=False)
    body = {**form(POINT), **QUIET, "logit_bias": {str(space): 100}, "max_tokens": 300}
    found, output = reply(model, body | {"temperature": 1.0, "seed": 1})
    assert output.finish.reason == "stop"
    assert loads(found.content).keys() == {"x", "y"}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            "response_format.json_schema.schema",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {}, "other": 1},
                }
            },
            "response_format.json_schema.other",
        ),
        (form({"type": "object", "if": {}}), "response_format.json_schema.schema"),
        (
            form({"not": {"x-guidance": {"lenient": True}}, "x-guidance": {"lenient": True}}),
            "response_format.json_schema.schema",
        ),
        (form({"type": "nothing"}), "response_format.json_schema.schema"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": []}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: start", **QUIET}, "response_format"),
        (form({"$ref": "#"}) | QUIET, "response_format"),
        (form({"enum": []}), "response_format.json_schema.schema"),
        ({**form(POINT), "guided_regex": "a"}, "guided_regex"),
        ({**form(POINT), "min_tokens": 5}, "min_tokens"),
        ({**form(POINT), "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_a_form_that_cannot_be_kept_to_is_named(
    model: ServedModel, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestFieldError) as error:
        answers(model, fields)
    assert error.value.field == field


def test_a_grammar_that_grows_too_large_ends_the_request(model: ServedModel) -> None:
    with pytest.raises(NoTokenAllowedError):
        answers(model, {"guided_regex": "(a{1000}){1000}", "max_tokens": 20, **QUIET})


def test_a_model_without_an_end_has_no_forms(model: ServedModel) -> None:
    tokenizer = copy(model.tokenizer)
    tokenizer.stop_ids = frozenset()
    with pytest.raises(RequestFieldError, match="no token that ends"):
        answers(replace(model, tokenizer=tokenizer), form(POINT))


@pytest.mark.parametrize("forbidden", ["0-9", "1e", "t", " "])
def test_drafts_stay_on_and_change_nothing(tiny: Running, forbidden: str) -> None:
    """Drafts are made without the grammar; what it does not allow is not accepted."""
    body = {
        "messages": [{"role": "user", "content": "What is 12 + 7?"}],
        "max_tokens": 60,
        "structured_outputs": {"regex": f"[^{forbidden}]{{0,200}}"},
        "chat_template_kwargs": {"enable_thinking": False},
    }
    with_drafts, without = (
        tiny.ask("/v1/chat/completions", body | {"draft": draft}).json() for draft in (True, False)
    )
    assert with_drafts["choices"][0]["message"] == without["choices"][0]["message"]
    assert without["usage"]["draft"]["drafted"] == 0
    assert with_drafts["usage"]["draft"]["drafted"] > 0


def test_a_form_that_the_model_would_write_anyway_costs_no_rounds(tiny: Running) -> None:
    body = {"messages": [{"role": "user", "content": "What is 12 + 7?"}], "max_tokens": 200}
    anything = {"structured_outputs": {"regex": r"(.|\n)*"}}
    free, kept = (tiny.ask("/v1/chat/completions", body | one).json() for one in ({}, anything))
    assert kept["choices"] == free["choices"]
    drafts = kept["usage"]["draft"]
    assert drafts["accepted"] > 0
    assert drafts == free["usage"]["draft"]


def test_drafts_stay_on_for_requests_that_sample(tiny: Running) -> None:
    """With the order of filters of any other request; every output parses."""
    accepted = 0
    for seed in range(6):
        body = {
            "messages": [{"role": "user", "content": "What is 12 + 7?"}],
            **form(SCHEMAS["object"]),
            "seed": seed,
            "temperature": 0.8,
            "top_p": 0.95,
            "top_k": 20,
            "max_tokens": 200,
        }
        found = tiny.ask("/v1/chat/completions", body).json()
        (choice,) = found["choices"]
        drafts = found["usage"]["draft"]
        assert drafts["drafted"] > 0
        accepted += drafts["accepted"]
        if choice["finish_reason"] == "stop":
            Draft202012Validator(POINT).validate(loads(choice["message"]["content"]))
    assert accepted > 0


def test_all_interfaces_keep_to_a_form(tiny: Running) -> None:
    """The small model would rather do sums."""
    schema = SCHEMAS["pair"]
    question = {"role": "user", "content": "What is 12 + 7?"}
    chat = tiny.ask(
        "/v1/chat/completions", {"messages": [question], "max_tokens": 100, **form(schema)}
    ).json()
    assert loads(chat["choices"][0]["message"]["content"])[1] == "a"
    assert chat["choices"][0]["finish_reason"] == "stop"
    text = tiny.ask(
        "/v1/completions", {"prompt": "What is", "guided_json": schema, "max_tokens": 60}
    ).json()
    assert loads(text["choices"][0]["text"])[1] == "a"
    answer = tiny.ask(
        "/v1/responses",
        {
            "input": "What is 12 + 7?",
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}},
            "max_output_tokens": 100,
        },
    ).json()
    assert loads(answer["output"][-1]["content"][0]["text"])[1] == "a"
    assert answer["status"] == "completed"


def test_where_no_thought_is_wanted_a_form_begins_at_once(tiny: Running) -> None:
    """The small model's template leaves it to the model, which is pushed to think."""
    think = tiny.engine.ready_model().tokenizer.special_tokens["<think>"]
    body = {
        "messages": [{"role": "user", "content": "What is 12 + 7?"}],
        "structured_outputs": {"choice": ["12", "19"]},
        "logit_bias": {str(think): 100},
        "max_tokens": 40,
    }
    answer = tiny.ask("/v1/chat/completions", body | {"reasoning_effort": "none"}).json()
    message = answer["choices"][0]["message"]
    assert message["content"] in ("12", "19")
    assert "reasoning_content" not in message


def test_a_wrong_form_is_a_400_with_its_field(fake: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "guided_regex": "("}
    answer = fake.ask("/v1/chat/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "guided_regex"
