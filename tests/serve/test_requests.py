"""Fields of requests: what is refused, with which words, and what is ignored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.settings import Settings
from tests.runtime.fake_backend import FakeBackend
from tests.serve.running import NAME
from tests.serve.running import Running
from tests.serve.running import fake_model
from tests.serve.running import opening
from tests.serve.running import running

COMPLETION: dict[str, Any] = {"prompt": "hello", "max_tokens": 2}
USER = {"role": "user", "content": "hello"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 2}
RESPONSE: dict[str, Any] = {"input": "hello", "max_output_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def refused(server: Running, path: str, body: object, param: str | None, status: int = 400) -> str:
    """The message of a refusal that names a field."""
    answer = server.ask(path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    return str(error["message"])


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [420]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": "x" * 500}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "prompt"),
        ({"max_tokens": "2"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1 << 40}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 1 << 70}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"420": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop_token_ids": [1000]}, "stop_token_ids"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"allowed_token_ids": [1]}, "allowed_token_ids"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"stream_options": {"include": True}}, "stream_options.include"),
        ({"messages": [USER]}, "messages"),
    ],
    ids=str,
)
def test_fields_of_completions(fake: Running, change: dict[str, Any], param: str) -> None:
    refused(fake, "/v1/completions", COMPLETION | change, param)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [USER, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [{**USER, "extra": 1}]}, "messages[0].extra"),
        ({"messages": [USER, {"role": "user", "content": None}]}, "messages[1]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"audio": {}}, "audio"),
        ({"functions": []}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities[1]"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),  # of a template without levels
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"chat_template_kwargs": {"enable_thinkng": False}}, "enable_thinkng"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
    ],
    ids=str,
)
def test_fields_of_chats(fake: Running, change: dict[str, Any], param: str) -> None:
    message = refused(fake, "/v1/chat/completions", CHAT | change, param)
    assert "expected" in message


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "content": ["x"]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "reasoning", "content": {"a": 1}}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].call_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": 3}}}},
            "text.format.schema",
        ),
    ],
    ids=str,
)
def test_fields_of_responses(fake: Running, change: dict[str, Any], param: str) -> None:
    refused(fake, "/v1/responses", RESPONSE | change, param)


def test_a_prompt_that_is_too_long_names_both_lengths(fake: Running) -> None:
    message = refused(fake, "/v1/completions", {"prompt": [1] * 200}, "prompt")
    assert "200 tokens" in message
    assert "128 positions" in message


def test_more_prompts_than_one_request_may_have(fake: Running) -> None:
    """They are not even divided into tokens."""
    refused(fake, "/v1/completions", {"prompt": ["x"] * 1025}, "prompt[0]")


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"3", b"null", b"{", b'{"prompt": NaN}', b"\xff", b'{"a":' * 5000, b'"\\ud800"'],
    ids=repr,
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/detokenize"])
def test_bodies_that_are_no_objects(fake: Running, path: str, body: bytes) -> None:
    answer = httpx.post(
        fake.url + path, content=body, headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "E381"


def test_an_unknown_model_and_an_unknown_path(fake: Running) -> None:
    message = refused(fake, "/v1/completions", COMPLETION | {"model": "gpt"}, "model", 404)
    assert NAME in message
    assert fake.ask("/v1/models/gpt").json()["error"]["code"] == "model_not_found"
    assert fake.ask("/v2/other").json()["error"]["type"] == "not_found_error"
    for name in (NAME, "other-name"):
        answer = fake.ask("/v1/completions", COMPLETION | {"model": name})
        assert answer.json()["model"] == NAME


def test_what_changes_nothing_is_accepted(fake: Running) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "temprature": None,  # nothing was said
        "stream_options": {"include": None, "include_obfuscation": False},
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "use_beam_search": False,
        "return_token_ids": False,
    }
    plain = fake.ask("/v1/completions", COMPLETION).json()["choices"]
    assert fake.ask("/v1/completions", COMPLETION | harmless).json()["choices"] == plain


def test_chats_and_responses_accept_what_says_how_they_are(fake: Running) -> None:
    chat = {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "echo": False,
        "include_reasoning": True,
        "modalities": ["text"],
        "reasoning_effort": None,
    }
    plain = fake.ask("/v1/chat/completions", CHAT).json()["choices"]
    assert fake.ask("/v1/chat/completions", CHAT | chat).json()["choices"] == plain
    response = {
        "background": False,
        "include": [],
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}, "verbosity": None},
    }
    texts = [
        fake.ask("/v1/responses", body).json()["output"][-1]["content"]
        for body in (RESPONSE, RESPONSE | response)
    ]
    assert texts[0] == texts[1]


def test_a_lenient_server_says_what_it_ignores(checkpoint: Path) -> None:
    model = fake_model(checkpoint, FakeBackend(context=128))
    with running(opening(model), Settings(lenient=True)) as server:
        answer = server.ask("/v1/completions", COMPLETION | {"suffix": "x", "best": 1, "é": 1})
        assert answer.status_code == 200
        assert answer.headers["x-mkc-ignored-fields"] == "best, suffix, \\xe9"
        assert server.ask("/v1/completions", COMPLETION | {"n": 0}).status_code == 400
        stream = server.ask("/v1/completions", COMPLETION | {"suffix": "x", "stream": True})
        assert stream.headers["x-mkc-ignored-fields"] == "suffix"


def test_more_sequences_than_will_ever_have_room(checkpoint: Path) -> None:
    model = fake_model(checkpoint, FakeBackend(context=128, batch=2))
    with running(opening(model), queue_size=2) as server:
        message = refused(server, "/v1/completions", COMPLETION | {"n": 5}, "n")
        assert "at most 4" in message
        assert len(server.ask("/v1/completions", COMPLETION | {"n": 4}).json()["choices"]) == 4


@pytest.fixture
def loading(checkpoint: Path) -> Iterator[Running]:
    from threading import Event

    go = Event()

    def open_model(say: Any) -> Any:
        say("reading weights")
        assert go.wait(60)
        return fake_model(checkpoint, FakeBackend())

    with running(open_model, wait=False) as server:
        yield server
        go.set()


def test_while_the_model_is_loaded(loading: Running) -> None:
    for path in ("/health", "/ping"):
        answer = loading.ask(path)
        assert answer.status_code == 503
        assert answer.json()["status"] == "loading"
        assert answer.json()["stage"] == "reading weights"
    answer = loading.ask("/v1/completions", COMPLETION)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert loading.ask("/v1/models").status_code == 503
    assert loading.ask("/version").json()["state"] == "loading"


def test_a_template_that_refuses_shows_no_place_on_the_server(tiny: Running) -> None:
    """The small model's template wants the system message first."""
    body = {"messages": [USER, {"role": "system", "content": "x"}]}
    message = refused(tiny, "/v1/chat/completions", body, "messages")
    assert message.startswith("chat template: a system message has to be the first one")
    assert "/" not in message
