"""What a stream of output means: deltas of thoughts, of content and of tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ReasoningDelta:
    """More of the thought."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ContentDelta:
    """More of the answer."""

    text: str


@dataclass(frozen=True, kw_only=True)
class ToolCallBegin:
    """A tool call has begun.

    Attributes:
      index: of the call in this message, from 0.
      name: of the tool.
    """

    index: int
    name: str


@dataclass(frozen=True, kw_only=True)
class ToolArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, kw_only=True)
class ToolCallEnd:
    """A tool call is over.

    Attributes:
      index: of the call.
      complete: False when the output ended inside it; its arguments are then no whole JSON text.
    """

    index: int
    complete: bool


type Event = ReasoningDelta | ContentDelta | ToolCallBegin | ToolArgumentsDelta | ToolCallEnd


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """A whole tool call; `arguments` is JSON text."""

    name: str
    arguments: str
    complete: bool


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A whole output, for requests that do not stream."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]


def joined(events: Sequence[Event]) -> Reply:
    """The output that a stream of events amounts to."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    complete: dict[int, bool] = {}
    for one in events:
        match one:
            case ToolCallBegin():
                names[one.index] = one.name
            case ToolArgumentsDelta():
                arguments[one.index] = arguments.get(one.index, "") + one.text
            case ToolCallEnd():
                complete[one.index] = one.complete
    return Reply(
        reasoning="".join(one.text for one in events if isinstance(one, ReasoningDelta)),
        content="".join(one.text for one in events if isinstance(one, ContentDelta)),
        tool_calls=tuple(
            ToolCall(
                name=name,
                arguments=arguments.get(index, ""),
                complete=complete.get(index, False),
            )
            for index, name in sorted(names.items())
        ),
    )
