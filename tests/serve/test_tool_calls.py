"""Calls of tools: asked for by name, by need or not at all, whole and piece by piece."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai import OpenAI

from mkc.errors import RequestFieldError
from mkc.runtime.text import ChannelFormat
from mkc.runtime.text import Reply
from serve.model import ServedModel
from tests.runtime.text.checkpoints import ranked_checkpoint
from tests.serve.answers import answers
from tests.serve.answers import noise
from tests.serve.answers import reply
from tests.serve.running import Running

SEEDS = range(6)
PLACE = {
    "type": "object",
    "properties": {"x": {"type": "integer", "maximum": 99}, "inside": {"type": "boolean"}},
    "required": ["x", "inside"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 500},
        "place": {"$ref": "#/$defs/Place"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "note": {"type": "string", "maxLength": 6},
        "exact": {"type": ["boolean", "null"]},
    },
    "required": ["unit", "days", "place", "note", "exact"],
    "additionalProperties": False,
    "$defs": {"Place": PLACE},
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time."}}
TOOLS = [WEATHER, CLOCK]
BY_NAME = {"weather": PARAMETERS, "clock": {"type": "object", "additionalProperties": False}}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


@pytest.fixture(scope="module", params=["tags", "channels"])
def model(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> ServedModel:
    """Noise, in both kinds of markup."""
    folder = checkpoint
    if request.param == "channels":
        folder = tmp_path_factory.mktemp("channels")
        ranked_checkpoint(folder)
    return noise(folder)


def ask(model: ServedModel, seed: int = 0, **fields: Any) -> tuple[Reply, str]:
    """What noise answers, without a thought, and why it ended."""
    body = {"reasoning_effort": "none", "temperature": 1.0, "seed": seed, "max_tokens": 900}
    found, output = reply(model, {"tools": TOOLS, **body, **fields})
    return found, output.finish.reason.value


def check(found: Reply) -> None:
    """All calls that are complete fit the schemas of their tools."""
    for call in found.tool_calls:
        if call.complete:
            Draft202012Validator(BY_NAME[call.name]).validate(loads(call.arguments))


def test_noise_calls_nothing_by_itself(model: ServedModel) -> None:
    found, _ = ask(model, max_tokens=200)
    assert not found.tool_calls


def test_a_call_that_is_needed_is_there_and_fits_its_schema(model: ServedModel) -> None:
    names, several = set(), False
    for seed in SEEDS:
        found, reason = ask(model, seed, tool_choice="required")
        check(found)
        assert found.tool_calls[0].complete
        assert reason == "length" or all(one.complete for one in found.tool_calls)
        names |= {one.name for one in found.tool_calls}
        several |= len(found.tool_calls) > 1
    assert names == {"weather", "clock"}
    assert several, "calls may be parallel"


def test_a_named_tool_is_called_once(model: ServedModel) -> None:
    for seed in SEEDS:
        choice = {"type": "function", "function": {"name": "weather"}}
        found, reason = ask(model, seed, tool_choice=choice)
        assert reason == "stop"
        assert [one.name for one in found.tool_calls] == ["weather"]
        check(found)


def test_calls_can_be_had_one_at_a_time(model: ServedModel) -> None:
    for seed in SEEDS:
        found, _ = ask(model, seed, tool_choice="required", parallel_tool_calls=False)
        assert len(found.tool_calls) == 1
        check(found)


def test_a_call_that_is_cut_is_incomplete_and_says_so(model: ServedModel) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    found, reason = ask(model, tool_choice=choice, max_tokens=60)
    assert reason == "length"
    assert not found.tool_calls or not found.tool_calls[0].complete


def test_a_form_and_tools_give_either(model: ServedModel) -> None:
    kinds = set()
    for seed in range(12):
        form = {"type": "json_object"}
        found, _ = ask(model, seed, response_format=form, max_tokens=300, temperature=9.0)
        check(found)
        kinds.add(bool(found.tool_calls))
        assert found.tool_calls or found.content.startswith("{")
        assert not found.tool_calls or not found.content
    assert kinds == {True, False}


def eager(model: ServedModel) -> dict[str, float]:
    """A bias for what begins a call, or leads to it."""
    if isinstance(model.chat.markup, ChannelFormat):
        ids = model.tokenizer.special_tokens
        return {str(ids["<|close|>"]): 30.0, str(ids["<|open|>"]): 60.0}
    (opening,) = model.tokenizer.encode("<tool_call>", allow_special=True)
    return {str(opening): 30.0}


@pytest.mark.parametrize("why", ["strict", "one at a time"])
def test_calls_that_nobody_asked_for_fit_too(model: ServedModel, why: str) -> None:
    """With `auto`, once a tool is strict or only one call may come."""
    options: dict[str, Any] = {"logit_bias": eager(model), "max_tokens": 1500}
    if why == "strict":
        options["tools"] = [strict(WEATHER), CLOCK]
    else:
        options["parallel_tool_calls"] = False
    called = 0
    for seed in SEEDS:
        found, reason = ask(model, seed, **options)
        check(found)
        called += len(found.tool_calls)
        assert all(one.complete for one in found.tool_calls) or reason == "length"
        if why == "one at a time":
            assert len(found.tool_calls) <= 1
    assert called


def test_calls_that_nobody_asked_for_are_as_the_model_writes_them(checkpoint: Path) -> None:
    """Without a reason for a mask there is none: noise that opens a call does not finish it."""
    model = noise(checkpoint)
    found, _ = ask(model, logit_bias=eager(model), max_tokens=100)
    assert not any(one.complete for one in found.tool_calls)


def test_a_text_in_an_answer_with_a_form_is_no_call(checkpoint: Path) -> None:
    """The only JSON that fits has a whole call in a text."""
    text = "<tool_call><function=clock></function></tool_call>"
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": [text]}}}
    model = noise(checkpoint)
    (bracket,) = model.tokenizer.encode("[", allow_special=False)
    found, _ = ask(model, response_format=form, logit_bias={str(bracket): 100.0})
    assert not found.tool_calls
    assert loads(found.content) == [text]


def test_without_tools_nothing_is_called(model: ServedModel) -> None:
    found, _ = ask(model, tool_choice="none", max_tokens=50)
    assert not found.tool_calls


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "rain"}}},
            "tool_choice.function.name",
        ),
        (
            {"tools": None, "tool_choice": {"type": "function", "function": {"name": "clock"}}},
            "tool_choice.function.name",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": 'a"\n'}}],
                "tool_choice": "required",
            },
            "tools[0].function.name",
        ),
        (
            {
                "tools": [
                    CLOCK,
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "strict": True,
                            "parameters": {"properties": {"p": {"type": "string", "format": "x"}}},
                        },
                    },
                ]
            },
            "tools[1].function.parameters.properties.p.format",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "f", "parameters": {"properties": 1}}}
                ],
                "tool_choice": "required",
            },
            "tools[0].function.parameters.properties",
        ),
    ],
)
def test_what_cannot_be_called_is_named(
    checkpoint: Path, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(RequestFieldError) as error:
        answers(noise(checkpoint), {"tools": TOOLS, **fields})
    assert error.value.field == field


def test_unknown_keywords_of_a_schema_are_for_strict_tools_only(checkpoint: Path) -> None:
    parameters = {"properties": {"p": {"type": "object", "if": {}}}, "required": ["p"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    model = noise(checkpoint)
    body = {"tool_choice": "required", "max_tokens": 5}
    answers(model, {"tools": [tool], **body})
    with pytest.raises(RequestFieldError) as error:
        answers(model, {"tools": [strict(tool)], **body})
    assert error.value.field == "tools"


@pytest.fixture(scope="module")
def client(tiny: Running) -> OpenAI:
    return OpenAI(base_url=f"{tiny.url}/v1", api_key="none")


def test_the_small_model_calls_by_itself(client: OpenAI) -> None:
    """It was taught to. Nothing forces it, so drafts are as ever; its answer is what was taught."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    function = {"name": "get_weather", "parameters": parameters}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[{"type": "function", "function": function}],  # type: ignore[list-item]
        max_tokens=120,
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, loads(call.function.arguments)) == (
        "get_weather",
        {"city": "Paris"},
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_pieces_of_a_call_are_the_whole_call(client: OpenAI, choice: Any) -> None:
    question: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is 12 + 7?"}],
        "tools": [ADD],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    whole = client.chat.completions.create(**question).choices[0]
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    pieces, heads, reasons, thought = "", [], [], ""
    for chunk in client.chat.completions.create(stream=True, **question):
        delta = chunk.choices[0].delta
        reasons.append(chunk.choices[0].finish_reason)
        thought += (delta.model_extra or {}).get("reasoning_content") or ""
        for one in delta.tool_calls or ():
            assert one.index == 0
            assert one.function is not None
            if one.id:
                heads.append((one.type, one.function.name))
            pieces += one.function.arguments or ""
    assert heads == [("function", "add")]
    assert pieces == call.function.arguments
    assert loads(pieces).keys() == {"a", "b"}
    assert thought == ((whole.message.model_extra or {}).get("reasoning_content") or "")
    assert reasons[-1] == whole.finish_reason == "tool_calls"
