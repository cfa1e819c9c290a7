"""Messages and output in channels."""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from json import loads
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkc.runtime.text import Chat
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import ContentDelta
from mkc.runtime.text import Prompt
from mkc.runtime.text import Reply
from mkc.runtime.text import StopConditions
from mkc.runtime.text import ToolCall
from mkc.runtime.text import joined
from mkc.runtime.text.channel_output import unescaped
from mkc.runtime.text.channels import escaped
from tests.runtime.text.checkpoints import MARKERS
from tests.runtime.text.splits import CUTS
from tests.runtime.text.splits import divided
from tests.runtime.text.splits import singles

START = '<|open|>message role="assistant"<|sep|>'
EFFORT = (
    '<|open|>message role="system" type="effort"<|sep|>Think this much: max.'
    "<|close|>message<|sep|><|done|>"
)


def message(attributes: str, content: str) -> str:
    return f"<|open|>message {attributes}<|sep|>{content}<|close|>message<|sep|><|done|>"


def user(content: str, **more: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": content}], **more)


def call(name: str, arguments: str, key: str = "a") -> dict[str, Any]:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_thinking_prompt(channel_chat: Chat) -> None:
    prompt = channel_chat.encode(user("Hi"))
    assert prompt.text == (EFFORT + message('role="user"', "Hi") + START + "<|open|>think<|sep|>")
    assert prompt.opens_reasoning
    assert channel_chat.tokenizer.decode(prompt.ids) == prompt.text


@pytest.mark.parametrize(
    "off",
    [
        {"thinking": False},
        {"effort": "none"},
        {"options": {"enable_thinking": False}},
        {"options": {"thinking": False}},
        {"options": {"reasoning_effort": "none"}},
    ],
)
def test_a_prompt_without_thinking(channel_chat: Chat, off: dict[str, Any]) -> None:
    prompt = channel_chat.encode(user("Hi", **off))
    assert prompt.text == message('role="user"', "Hi") + START + "<|open|>response<|sep|>"
    assert not prompt.opens_reasoning


@pytest.mark.parametrize("how", [{"effort": "low"}, {"options": {"thinking_effort": "low"}}])
def test_effort(channel_chat: Chat, how: dict[str, Any]) -> None:
    assert channel_chat.encode(user("Hi", **how)).text.startswith(EFFORT.replace("max", "low"))


def test_tools_and_their_results_in_the_order_of_the_calls(channel_chat: Chat) -> None:
    request = ChatRequest(
        messages=[
            {
                "role": "assistant",
                "content": "Looking.",
                "reasoning_content": "Two calls.",
                "tool_calls": [
                    call("weather", '{"city": "a & \\"b\\"", "days": [1, {"x": null}]}', "one"),
                    call("clock", "{broken", "two"),
                ],
            },
            {"role": "tool", "tool_call_id": "two", "content": "noon"},
            {"role": "tool", "tool_call_id": "one", "content": "rain"},
        ],
        tools=[{"type": "function", "function": {"name": "weather"}}],
        tool_choice="required",
        add_generation_prompt=False,
    )
    calls = (
        '<|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>a & "b"<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="array"<|sep|>[1,{"x":null}]<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
        '<|open|>call tool="clock" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{broken<|close|>json<|sep|>'
        "<|close|>call<|sep|>"
    )
    assert channel_chat.encode(request).text == (
        message(
            'role="system" type="tool-list"',
            'Tools: [{"function":{"name":"weather"},"type":"function"}]',
        )
        + EFFORT
        + message(
            'role="assistant"',
            "<|open|>think<|sep|>Two calls.<|close|>think<|sep|>"
            "<|open|>response<|sep|>Looking.<|close|>response<|sep|>"
            f"<|open|>tools<|sep|>{calls}<|close|>tools<|sep|>",
        )
        + message('role="tool" tool="weather" index="1"', "rain")
        + message('role="tool" tool="clock" index="2"', "noon")
        + message('role="system" type="tool-choice"', "Call a tool.")
    )


def test_a_schema_for_the_answer(channel_chat: Chat) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    prompt = channel_chat.encode(user("Hi", thinking=False, response_format=wanted))
    assert 'Answer in JSON of this schema: {"type":"object"}<|close|>' in prompt.text


def test_a_thinking_conversation_has_a_thought_even_where_it_is_empty(channel_chat: Chat) -> None:
    messages = [{"role": "assistant", "content": "Yes.", "reasoning_content": " \n"}]
    on = channel_chat.encode(ChatRequest(messages=messages))
    off = channel_chat.encode(ChatRequest(messages=messages, thinking=False))
    assert "<|open|>think<|sep|><|close|>think<|sep|><|open|>response" in on.text
    assert "think" not in off.text


HOSTILE = st.lists(
    st.sampled_from([*MARKERS, "message", "<|", "|>", '"', "&", "&quot;"]) | st.text(max_size=3),
    max_size=6,
).map("".join)


@given(text=HOSTILE)
def test_nothing_in_a_message_is_a_delimiter(channel_chat: Chat, text: str) -> None:
    def prompt(text: str) -> Prompt:
        arguments = dumps({"k" + text: text})
        turns = [
            {"role": "user", "content": text, "name": "n" + text},
            {
                "role": "assistant",
                "content": text,
                "reasoning_content": "t" + text,
                "tool_calls": [call("f" + text, arguments)],
            },
            {"role": "tool", "tool_call_id": "a", "content": text},
        ]
        return channel_chat.encode(ChatRequest(messages=turns))

    special = channel_chat.tokenizer.special_ids
    found, harmless = prompt(text), prompt("x")
    assert [one for one in found.ids if one in special] == [
        one for one in harmless.ids if one in special
    ]
    assert channel_chat.tokenizer.decode(found.ids) == found.text


@given(value=HOSTILE)
def test_attribute_values_survive(value: str) -> None:
    assert unescaped(escaped(value)) == value
    assert '"' not in escaped(value)


# Output.


def ids_of(chat: Chat, text: str) -> list[int]:
    return chat.tokenizer.encode(text, allow_special=True)


def reply(
    chat: Chat, text: str, *, thinking: bool = True, stops: StopConditions | None = None
) -> Reply:
    """The reply, and a check that it does not depend on how the ids are divided."""
    found = [
        joined(follow(chat, pieces, thinking=thinking, stops=stops))
        for ids in [ids_of(chat, text)]
        for pieces in ([ids], singles(ids))
    ]
    assert found[0] == found[1]
    return found[0]


def follow(
    chat: Chat,
    pieces: Sequence[Sequence[int]],
    *,
    thinking: bool = True,
    stops: StopConditions | None = None,
) -> list[Any]:
    prompt = chat.encode(user("Hi", thinking=thinking))
    stream = chat.output(prompt, tools=[], stops=stops)
    events = [one for piece in pieces for one in stream.feed(piece).events]
    return [*events, *stream.finish()]


def test_thought_answer_and_calls(channel_chat: Chat) -> None:
    text = (
        "So.<|close|>think<|sep|><|open|>response<|sep|>Yes, 早.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="a &amp; b" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>"Köln"\n<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
        '<|open|>call tool="g" index="2"<|sep|>'
        '<|open|>json type="object"<|sep|>{"x": 1}<|close|>json<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|done|>ignored"
    )
    found = reply(channel_chat, text)
    assert (found.reasoning, found.content) == ("So.", "Yes, 早.")
    first, second = found.tool_calls
    assert first.name == "a & b"
    assert loads(first.arguments) == {"city": '"Köln"\n', "days": 3}
    assert second == ToolCall(name="g", arguments='{"x": 1}', complete=True)
    assert first.complete


def test_an_answer_without_a_thought(channel_chat: Chat) -> None:
    found = reply(channel_chat, "Yes.<|close|>response<|sep|><|done|>", thinking=False)
    assert found == Reply(reasoning="", content="Yes.", tool_calls=())


@pytest.mark.parametrize("cut", ["", "<|close|>", "<|close|>th", "<|close|>think"])
def test_a_thought_that_is_cut_off_is_no_content(channel_chat: Chat, cut: str) -> None:
    """Nor is the marker shown that was about to end it."""
    found = reply(channel_chat, "So, let me" + cut)
    assert found == Reply(reasoning="So, let me", content="", tool_calls=())


@pytest.mark.parametrize(
    "quoted",
    [
        "<|close|>response<|sep|>",  # not the channel that is open
        "<|open|>message<|sep|>",
        "<|close|>thinking<|sep|>",
        "<|open|> and <|close|> alone",
        "<|open|><|close|>",
    ],
)
def test_delimiters_that_are_no_marker_here_are_text(channel_chat: Chat, quoted: str) -> None:
    found = reply(channel_chat, f"a{quoted}b<|close|>think<|sep|>")
    assert found.reasoning == f"a{quoted}b".replace("<|sep|>", "")


def test_a_channel_is_closed_by_the_next_one(channel_chat: Chat) -> None:
    found = reply(channel_chat, "So.<|open|>response<|sep|>Yes.<|open|>tools<|sep|>")
    assert found == Reply(reasoning="So.", content="Yes.", tool_calls=())


def test_an_argument_ends_at_its_own_marker_only(channel_chat: Chat) -> None:
    inside = '<|open|>call tool="x"<|close|>call<|close|>message'
    text = (
        '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        f'<|open|>argument key="k" type="string"<|sep|>{inside}<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
    )
    (found,) = reply(channel_chat, text).tool_calls
    assert loads(found.arguments) == {"k": inside}


def test_a_call_that_is_cut_off_is_incomplete(channel_chat: Chat) -> None:
    text = (
        '<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
        '<|open|>argument key="k" type="string"<|sep|>val'
    )
    for end in ("", "<|done|>", "<|close|>message<|sep|>"):
        (found,) = reply(channel_chat, text + end).tool_calls
        expected = '{"k": "val' + ("<|close|>message" if "message" in end else "")
        assert found == ToolCall(name="f", arguments=expected, complete=False)


def test_a_header_without_end_is_not_held_back_forever(channel_chat: Chat) -> None:
    header = "<|close|>think<|sep|><|open|>tools<|sep|><|close|>tools<|sep|><|open|>response "
    found = reply(channel_chat, header + "x" * 5000)
    assert found.content.endswith("x" * 5000)


def test_stop_strings_are_found_in_the_answer(channel_chat: Chat) -> None:
    text = "So.<|close|>think<|sep|><|open|>response<|sep|>one END two"
    found = reply(channel_chat, text, stops=StopConditions(strings=("END",)))
    assert found == Reply(reasoning="So.", content="one ", tool_calls=())


def test_a_stop_string_does_not_reach_across_channels(channel_chat: Chat) -> None:
    text = "E<|close|>think<|sep|><|open|>response<|sep|>ND"
    found = reply(channel_chat, text, stops=StopConditions(strings=("END",)))
    assert found == Reply(reasoning="E", content="ND", tool_calls=())


def test_text_that_could_have_been_a_stop_string_comes_before_the_call(channel_chat: Chat) -> None:
    text = 'one E<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="f"<|sep|>'
    stops = StopConditions(strings=("END",))
    pieces = singles(ids_of(channel_chat, text))
    events = follow(channel_chat, pieces, thinking=False, stops=stops)
    kinds = [type(one).__name__ for one in events]
    assert joined(events).content == "one E"
    assert kinds[-2:] == ["ToolCallBegin", "ToolCallEnd"]


def test_a_marker_ends_a_text_inside_a_character(channel_chat: Chat) -> None:
    prompt = channel_chat.encode(user("Hi"))
    cut_off = list("早".encode()[:2])
    rest = ids_of(channel_chat, "<|close|>think<|sep|><|open|>response<|sep|>Yes.")
    found = joined(channel_chat.output(prompt).feed([*cut_off, *rest]).events)
    assert found == Reply(reasoning="\ufffd", content="Yes.", tool_calls=())


def test_text_outside_of_channels_is_content(channel_chat: Chat) -> None:
    found = reply(channel_chat, "So.<|close|>think<|sep|>\n stray text ")
    assert found == Reply(reasoning="So.", content="stray text", tool_calls=())


PIECES = st.sampled_from(
    [*MARKERS, "think", "response", "tools", "call", 'call tool="f"', "argument", "message", " "]
    + ['argument key="k" type="number"', "json", "1", "早", "the "]
    + ["<|close|>think<|sep|><|open|>tools<|sep|>", '<|open|>call tool="f"<|sep|>']
)


@given(pieces=st.lists(PIECES, max_size=16), cuts=CUTS, thinking=st.booleans())
def test_no_division_of_any_output_changes_it(
    channel_chat: Chat, pieces: list[str], cuts: list[int], thinking: bool
) -> None:
    ids = ids_of(channel_chat, "".join(pieces))
    whole = joined(follow(channel_chat, [ids], thinking=thinking))
    assert joined(follow(channel_chat, divided(ids, cuts), thinking=thinking)) == whole


@given(content=st.text(max_size=12), thought=st.text(max_size=12))
def test_what_is_written_is_read_back(channel_chat: Chat, content: str, thought: str) -> None:
    answer = {"role": "assistant", "content": content, "reasoning_content": thought}
    prompt = channel_chat.encode(ChatRequest(messages=[]))
    whole = channel_chat.encode(ChatRequest(messages=[answer], add_generation_prompt=False))
    output = whole.ids[len(prompt.ids) :]
    assert whole.ids[: len(prompt.ids)] == prompt.ids
    found = joined(channel_chat.output(prompt).feed(output).events)
    assert found.content == content
    assert found.reasoning == (thought if thought.strip() else "")


def test_neighbouring_deltas_of_a_round_are_one(channel_chat: Chat) -> None:
    prompt = channel_chat.encode(user("Hi", thinking=False))
    update = channel_chat.output(prompt).feed(ids_of(channel_chat, "one two three"))
    assert update.events == (ContentDelta(text="one two three"),)
