"""Thoughts and tool calls in a stream of text with tags."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from json import loads
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkc.runtime.text import Event
from mkc.runtime.text import Reply
from mkc.runtime.text import TagFormat
from mkc.runtime.text import ToolArgumentsDelta
from mkc.runtime.text import ToolCall
from mkc.runtime.text import ToolCallBegin
from mkc.runtime.text import ToolCallEnd
from mkc.runtime.text import joined
from mkc.runtime.text.tag_output import TagParser
from tests.runtime.text.splits import CUTS
from tests.runtime.text.splits import divided
from tests.runtime.text.splits import singles


def tool(name: str, **types: object) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    function = {"name": name, "parameters": {"type": "object", "properties": properties}}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", city="string", days="integer"), tool("plot", points="array")]
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
WEATHER = ToolCall(name="weather", arguments='{"city": "Köln", "days": 3}', complete=True)


def events(
    pieces: Sequence[str],
    *,
    thinking: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = TOOLS,
) -> list[Event]:
    parser = TagParser(TagFormat(), in_reasoning=thinking, tools=tools)
    return [one for piece in pieces for one in parser.feed(piece)] + parser.end()


def reply(
    text: str, *, thinking: bool = False, tools: Sequence[Mapping[str, Any]] | None = TOOLS
) -> Reply:
    """The reply, and a check that it does not depend on how the text is divided."""
    whole = joined(events([text], thinking=thinking, tools=tools))
    assert joined(events(singles(text), thinking=thinking, tools=tools)) == whole
    return whole


def only(*, reasoning: str = "", content: str = "", calls: Sequence[ToolCall] = ()) -> Reply:
    return Reply(reasoning=reasoning, content=content, tool_calls=tuple(calls))


def test_content() -> None:
    assert reply("Hi < there\n") == only(content="Hi < there\n")


def test_a_thought_that_the_prompt_has_opened() -> None:
    assert reply("So.\n</think>\n\nYes.", thinking=True) == only(reasoning="So.", content="Yes.")


def test_a_thought_that_the_model_opens() -> None:
    assert reply("<think>\nSo.\n</think>\n\nYes.") == only(reasoning="So.", content="Yes.")


def test_a_thought_that_is_cut_off_is_no_content() -> None:
    assert reply("So, let me", thinking=True) == only(reasoning="So, let me")
    assert reply("So</thi", thinking=True) == only(reasoning="So</thi")
    assert reply("<think>So") == only(reasoning="So")


def test_a_thought_comes_first_or_it_is_content() -> None:
    assert reply("The tag <think> is") == only(content="The tag <think> is")


def test_calls() -> None:
    assert reply(f"Let me see.\n\n{CALL}\n{CALL}") == only(
        content="Let me see.", calls=[WEATHER, WEATHER]
    )


def test_a_call_behind_a_thought() -> None:
    assert reply(f"So.\n</think>\n\n{CALL}", thinking=True) == only(
        reasoning="So.", calls=[WEATHER]
    )


def test_content_behind_a_call() -> None:
    assert reply(f"{CALL}\n\nDone.") == only(content="Done.", calls=[WEATHER])


def test_two_functions_in_one_call() -> None:
    text = "<tool_call><function=a></function>\n<function=b></function></tool_call>"
    assert [one.name for one in reply(text).tool_calls] == ["a", "b"]
    assert [one.arguments for one in reply(text).tool_calls] == ["{}", "{}"]


def test_the_end_tag_of_a_function_may_be_missing() -> None:
    text = "<tool_call><function=a><parameter=k>1</parameter></tool_call>x"
    assert reply(text) == only(
        content="x", calls=[ToolCall(name="a", arguments='{"k": "1"}', complete=True)]
    )


@pytest.mark.parametrize("cut", range(len("<tool_call>"), len(CALL) - len("</tool_call>") - 12))
def test_a_call_that_is_cut_off_is_incomplete(cut: int) -> None:
    found = reply("Hm. " + CALL[:cut])
    assert found.content == "Hm."[: len(found.content)]
    assert all(not one.complete for one in found.tool_calls)
    assert "<" not in found.content


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call> is a tag",
        "<tool_call>\n</tool_call>",
        "see <tool_call>x<function=f>",
        "a < b <tool",
        "<tool_call>a<",
        "<tool_call>a</tool_",
        "</tool_call>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert reply(text) == only(content=text)


def test_what_is_no_call_may_be_followed_by_one() -> None:
    assert reply(f"<tool_call>x{CALL}") == only(content="<tool_call>x", calls=[WEATHER])


def test_what_follows_a_function_without_an_end_of_the_call_is_content() -> None:
    found = reply("<tool_call><function=a></function>x</tool")
    assert (found.content, len(found.tool_calls)) == ("x</tool", 1)


def test_without_tools_the_tags_are_content() -> None:
    assert reply(CALL, tools=None) == only(content=CALL)


def test_tags_inside_a_value_are_text() -> None:
    value = "<parameter=x> </function></tool_call> <think>"
    text = f"<tool_call><function=weather><parameter=city>{value}</parameter></function>"
    (found,) = reply(text).tool_calls
    assert loads(found.arguments) == {"city": value}


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("\nx\n", "x"),
        ("x", "x"),
        ("\n\nx\n\n", "\nx\n"),
        ("\n\n", ""),
        ("\n", ""),
        ("  x ", "  x "),
    ],
)
def test_one_line_end_on_either_side_belongs_to_the_tags(raw: str, value: str) -> None:
    text = f"<tool_call><function=weather><parameter=city>{raw}</parameter></function>"
    (found,) = reply(text).tool_calls
    assert loads(found.arguments) == {"city": value}


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        ("integer", "3", 3),
        ("integer", "3.5", "3.5"),
        ("number", "-2.5e3", -2500.0),
        ("number", "1e999", "1e999"),
        ("number", "NaN", "NaN"),
        ("boolean", "True", True),
        ("boolean", "false", False),
        ("boolean", "1", "1"),
        ("null", "None", None),
        ("array", "[1, [2]]", [1, [2]]),
        ("array", "[1, ", "[1, "),
        ("array", '"text"', '"text"'),
        ("object", '{"a": "ü"}', {"a": "ü"}),
        ("string", "3", "3"),
        (["integer", "string"], "3", 3),
        (["integer", "string"], "three", "three"),
        (["string", "null"], "null", None),
    ],
)
def test_values_have_the_type_of_the_schema_if_they_can(
    kind: object, raw: str, value: object
) -> None:
    text = f"<tool_call><function=f><parameter=k>\n{raw}\n</parameter></function>"
    (found,) = reply(text, tools=[tool("f", k=kind)]).tool_calls
    assert loads(found.arguments) == {"k": value}


def test_a_choice_of_schemas_gives_types_too() -> None:
    definition = tool("f")
    choice = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    definition["function"]["parameters"]["properties"] = {"k": choice}
    text = "<tool_call><function=f><parameter=k>5</parameter></function>"
    (found,) = reply(text, tools=[definition]).tool_calls
    assert loads(found.arguments) == {"k": 5}


def test_strings_are_streamed_and_the_name_comes_first() -> None:
    parser = TagParser(TagFormat(), in_reasoning=False, tools=TOOLS)
    assert parser.feed("<tool_call><function=weather>") == [ToolCallBegin(index=0, name="weather")]
    assert parser.feed("<parameter=city>K") == [
        ToolArgumentsDelta(index=0, text='{"city": "'),
        ToolArgumentsDelta(index=0, text="K"),
    ]
    assert parser.feed('"ö') == [ToolArgumentsDelta(index=0, text='\\"ö')]
    assert parser.feed("ln</parameter></function>") == [
        ToolArgumentsDelta(index=0, text="ln"),
        ToolArgumentsDelta(index=0, text='"'),
        ToolArgumentsDelta(index=0, text="}"),
        ToolCallEnd(index=0, complete=True),
    ]


PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "\n", " "]
    + ["<parameter=k>", "</parameter>", "a", "<", "</", ">", "\n\n", "早"]
)


@given(pieces=st.lists(PIECES, max_size=14), cuts=CUTS, thinking=st.booleans())
def test_no_division_of_any_output_changes_it(
    pieces: list[str], cuts: list[int], thinking: bool
) -> None:
    text = "".join(pieces)
    whole = joined(events([text], thinking=thinking))
    assert joined(events(divided(text, cuts), thinking=thinking)) == whole


@given(
    calls=st.lists(
        st.dictionaries(
            st.text("abc", min_size=1, max_size=3),
            st.text(max_size=8).filter(lambda text: "</" not in text),
            max_size=3,
        ),
        min_size=1,
        max_size=3,
    ),
    cuts=CUTS,
)
def test_calls_are_read_as_they_were_written(calls: list[dict[str, str]], cuts: list[int]) -> None:
    def parameter(key: str, value: str) -> str:
        return f"<parameter={key}>\n{value}\n</parameter>\n"

    def written(arguments: dict[str, str]) -> str:
        inside = "".join(parameter(key, value) for key, value in arguments.items())
        return f"<tool_call>\n<function=f>\n{inside}</function>\n</tool_call>"

    text = "\n".join(written(one) for one in calls)
    found = joined(events(divided(text, cuts), tools=[]))
    assert [loads(one.arguments) for one in found.tool_calls] == calls
    assert found.content == ""
