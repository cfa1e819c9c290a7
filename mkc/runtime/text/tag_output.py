"""Output with tags: thoughts and tool calls in a stream of text."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from enum import Enum
from enum import auto
from typing import Any

from mkc.runtime.text.arguments import ArgumentWriter
from mkc.runtime.text.arguments import argument_types
from mkc.runtime.text.events import ContentDelta
from mkc.runtime.text.events import Event
from mkc.runtime.text.events import ReasoningDelta
from mkc.runtime.text.events import ToolArgumentsDelta
from mkc.runtime.text.events import ToolCallBegin
from mkc.runtime.text.events import ToolCallEnd
from mkc.runtime.text.formats import TagFormat
from mkc.runtime.text.matcher import Found
from mkc.runtime.text.matcher import Matcher
from mkc.runtime.text.trim import Trim


class _Place(Enum):
    """Where in the output the parser is."""

    REASONING = auto()
    CONTENT = auto()
    CALL = auto()  # behind <tool_call>
    FUNCTION_NAME = auto()
    FUNCTION = auto()  # between parameters
    PARAMETER_NAME = auto()
    VALUE = auto()
    AFTER_FUNCTION = auto()


class TagParser:
    """Parses a stream of text; how it is divided makes no difference.

    In every place only certain tags mean anything: a tag inside a thought or an argument is text
    unless it is the one that ends it. What begins like a tool call and is none is content.
    """

    def __init__(
        self,
        tags: TagFormat,
        *,
        in_reasoning: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        calls_first: bool = False,
    ) -> None:
        """
        Args:
          tags: the markup.
          in_reasoning: whether the prompt has opened a thought.
          tools: what may be called; their schemas give arguments their types. None leaves tags of
            tool calls as content.
          calls_first: calls come before any content; behind some, their tags are content.
        """
        self._tags = tags
        self._tools = tools
        self._events: list[Event] = []
        self._name = ""
        self._calls_first = calls_first
        self._calls = 0
        self._writer = ArgumentWriter({})
        self._skipped = ""  # what has to become content if the tool call is none
        self._has_content = False
        self._reasoning = Trim("\n", lead=False)
        self._content = Trim(lead=False)
        self._value = Trim()
        self._is_value_begin = False
        self._go(_Place.REASONING if in_reasoning else _Place.CONTENT)

    def feed(self, text: str) -> list[Event]:
        """What the next text of the stream means."""
        begin = 0
        while begin < len(text):
            found = self._matcher.feed(text, begin)
            again = self._take(found)
            begin = found.end
            if again:
                text, begin = again + text[begin:], 0
        return self._taken()

    def end(self) -> list[Event]:
        """The end of the output: an unclosed thought was a thought, and a call is incomplete."""
        held = self._matcher.flush()
        match self._place:
            case _Place.REASONING:
                self._think(held)
            case _Place.CONTENT:
                self._say(held)
                self._emit_content(self._content.flush())
            case _Place.FUNCTION | _Place.PARAMETER_NAME | _Place.VALUE:
                self._end_call(complete=False)
        return self._taken()

    def _take(self, found: Found) -> str:
        """Acts on what the matcher has found; gives text that has to be read again."""
        match self._place:
            case _Place.REASONING:
                self._think(found.before)
                if found.pattern:
                    self._content = Trim(lead=True)
                    self._go(_Place.CONTENT)
            case _Place.CONTENT:
                self._take_content(found)
            case _Place.CALL | _Place.AFTER_FUNCTION:
                return self._take_between(found)
            case _Place.FUNCTION_NAME | _Place.PARAMETER_NAME:
                self._take_name(found)
            case _Place.FUNCTION:
                self._take_function(found)
            case _Place.VALUE:
                self._take_value(found)
        return ""

    def _take_content(self, found: Found) -> None:
        self._say(found.before)
        if not found.pattern:
            return
        if found.pattern == self._tags.call_open and not (self._calls_first and self._has_content):
            self._skipped = self._content.flush() + found.pattern
            self._go(_Place.CALL)
        elif self._has_content:
            self._say(found.pattern)  # a thought comes first or not at all
        else:
            self._reasoning = Trim("\n")
            self._go(_Place.REASONING)

    def _take_between(self, found: Found) -> str:
        """Between <tool_call> and <function=, or behind </function>: only white space."""
        is_call = found.pattern == self._tags.function_open
        if not found.before.strip() and (is_call or not found.pattern):
            self._skipped += found.before
            if is_call:
                self._go(_Place.FUNCTION_NAME)
            return ""
        if self._place is _Place.AFTER_FUNCTION:
            self._content = Trim(lead=True)
            again = "" if not found.before.strip() else found.before + (found.pattern or "")
        else:
            self._say(self._skipped)
            again = found.before + (found.pattern or "")
        again += self._matcher.flush()
        self._skipped = ""
        self._go(_Place.CONTENT)
        return again

    def _take_name(self, found: Found) -> None:
        self._name += found.before
        if not found.pattern:
            return
        name = self._name.strip()
        self._name = ""
        if self._place is _Place.FUNCTION_NAME:
            self._writer = ArgumentWriter(argument_types(self._tools or (), name))
            self._events.append(ToolCallBegin(index=self._calls, name=name))
            self._go(_Place.FUNCTION)
        else:
            self._argue(self._writer.begin(name))
            self._value = Trim("\n", lead=False)
            self._is_value_begin = True
            self._go(_Place.VALUE)

    def _take_function(self, found: Found) -> None:
        if found.pattern == self._tags.parameter_open:
            self._go(_Place.PARAMETER_NAME)
        elif found.pattern:
            self._end_call(complete=True)
            self._skipped = ""
            if found.pattern == self._tags.function_close:
                self._go(_Place.AFTER_FUNCTION)
            else:
                self._content = Trim(lead=True)
                self._go(_Place.CONTENT)

    def _take_value(self, found: Found) -> None:
        text = found.before
        if self._is_value_begin and text:
            text = text.removeprefix("\n")
            self._is_value_begin = False
        self._argue(self._writer.add(self._value.feed(text)))
        if found.pattern:
            # Of the line ends in front of the end tag, one belongs to the tag.
            self._argue(self._writer.add(self._value.flush().removesuffix("\n")))
            self._argue(self._writer.end())
            self._go(_Place.FUNCTION)

    def _think(self, text: str) -> None:
        shown = self._reasoning.feed(text)
        if shown:
            self._events.append(ReasoningDelta(text=shown))

    def _say(self, text: str) -> None:
        self._emit_content(self._content.feed(text))

    def _emit_content(self, text: str) -> None:
        if text:
            self._has_content = True
            self._events.append(ContentDelta(text=text))

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(ToolArgumentsDelta(index=self._calls, text=text))

    def _end_call(self, *, complete: bool) -> None:
        if complete:
            self._argue(self._writer.close())
        self._events.append(ToolCallEnd(index=self._calls, complete=complete))
        self._calls += 1

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _go(self, place: _Place) -> None:
        """Enters a place, and looks for the tags that mean something there."""
        tags = self._tags
        match place:
            case _Place.REASONING:
                patterns = [tags.reasoning_close]
            case _Place.CONTENT:
                patterns = [tags.reasoning_open, tags.call_open if self._tools is not None else ""]
            case _Place.CALL | _Place.AFTER_FUNCTION:
                patterns = [tags.function_open, tags.call_close]
            case _Place.FUNCTION_NAME | _Place.PARAMETER_NAME:
                patterns = [tags.name_end]
            case _Place.FUNCTION:
                patterns = [tags.parameter_open, tags.function_close, tags.call_close]
            case _Place.VALUE:
                patterns = [tags.parameter_close]
        self._place = place
        self._matcher = Matcher([one for one in patterns if one])
