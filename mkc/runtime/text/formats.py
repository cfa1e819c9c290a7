"""Descriptions of how a model writes messages, thoughts and tool calls.

A description is data: a JSON file beside the checkpoint, or the defaults here. Two kinds of markup
are known. *Tags* are text in angle brackets inside what a Jinja template renders; *channels* are
nested elements whose delimiters are special tokens, and need no template.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path

from mkc.errors import TextFormatError
from mkc.runtime.text.files import read_json
from mkc.runtime.text.records import read_record

FORMAT_FILE = "text_format.json"


@dataclass(frozen=True, kw_only=True)
class TagFormat:
    """Thoughts and tool calls between tags.

    A thought is `<think>...</think>`. A tool call is

        <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>

    with white space between tags, and one line end on either side of a value, that mean nothing.

    Attributes:
      reasoning_open, reasoning_close: around a thought; empty for a model without thoughts.
      call_open, call_close: around a tool call; empty for a model without tool calls.
      function_open, parameter_open: in front of a name.
      name_end: behind a name.
      function_close, parameter_close: end tags.
    """

    reasoning_open: str = "<think>"
    reasoning_close: str = "</think>"
    call_open: str = "<tool_call>"
    call_close: str = "</tool_call>"
    function_open: str = "<function="
    function_close: str = "</function>"
    parameter_open: str = "<parameter="
    parameter_close: str = "</parameter>"
    name_end: str = ">"


@dataclass(frozen=True, kw_only=True)
class Markers:
    """Special tokens that delimit elements."""

    open: str
    close: str
    separator: str
    end_of_message: str


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names of elements and of their attributes.

    Attributes:
      message, call, argument: elements.
      raw_arguments: element that holds the arguments of a call when they are no JSON object.
      role, type, name, tool, index, key: attributes.
    """

    message: str = "message"
    call: str = "call"
    argument: str = "argument"
    raw_arguments: str = "json"
    role: str = "role"
    type: str = "type"
    name: str = "name"
    tool: str = "tool"
    index: str = "index"
    key: str = "key"


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Names of the parts of an assistant message, in the order in which they appear."""

    reasoning: str = "think"
    content: str = "response"
    tools: str = "tools"


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """A system message that the format itself writes.

    Attributes:
      type: value of its type attribute.
      text: the message; `{value}` stands for what it is about.
    """

    type: str
    text: str


@dataclass(frozen=True, kw_only=True)
class ChannelFormat:
    """Messages and their parts as elements delimited by special tokens.

    An element is `open NAME KEY="VALUE"... separator CONTENT close NAME separator`. A marker is
    therefore a sequence of tokens; the delimiters alone mean nothing.

    Attributes:
      markers: the delimiters.
      names: of elements and attributes.
      channels: of an assistant message.
      first_index: index of the first tool call of a message.
      thinking: whether the model thinks unless told otherwise.
      efforts: levels of thinking that the model knows; none when it knows no levels.
      default_effort: the level unless told otherwise.
      instructions: system messages by occasion. `effort`, `tools`, `tool_choice_required`,
        `tool_choice_none`, `json_object` and `json_schema`; an occasion that is not there
        gets no message.
    """

    markers: Markers
    names: Names = field(default_factory=Names)
    channels: Channels = field(default_factory=Channels)
    first_index: int = 1
    thinking: bool = True
    efforts: tuple[str, ...] = ()
    default_effort: str = ""
    instructions: Mapping[str, Instruction] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """Everything about text that a checkpoint's own files do not say.

    Attributes:
      pattern: regular expression that divides text for a vocabulary by rank; empty when the
        tokenizer's files hold it.
      special_slots: ids behind the ranks that are reserved for special tokens.
      tags: how the output of a templated model is read.
      channels: how messages are written and read without a template; None with a template.
    """

    pattern: str = ""
    special_slots: int = 0
    tags: TagFormat = field(default_factory=TagFormat)
    channels: ChannelFormat | None = None


OCCASIONS = (
    "effort",
    "json_object",
    "json_schema",
    "tool_choice_none",
    "tool_choice_required",
    "tools",
)


def load_format(path: Path) -> TextFormat:
    """Reads a description, or the defaults for a checkpoint folder that has none.

    Args:
      path: the JSON file, or a folder with or without a `text_format.json`.

    Raises:
      TextFormatError: with the key that is wrong.
    """
    file = path / FORMAT_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        return TextFormat()
    found = read_record(TextFormat, read_json(file), path=file)
    if found.channels is not None:
        _check_channels(found.channels, file)
    return found


def _check_channels(channels: ChannelFormat, path: Path) -> None:
    unknown = sorted(set(channels.instructions) - set(OCCASIONS))
    if unknown:
        raise TextFormatError(
            path=path,
            key=f"channels.instructions.{unknown[0]}",
            problem="is no occasion for an instruction",
            expected=f"one of {', '.join(OCCASIONS)}",
        )
    if channels.efforts and channels.default_effort not in channels.efforts:
        raise TextFormatError(
            path=path,
            key="channels.default_effort",
            problem=f"is {channels.default_effort!r}",
            expected=f"one of efforts: {', '.join(channels.efforts)}",
        )
