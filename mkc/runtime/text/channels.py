"""Messages as channels: elements delimited by special tokens, written without a template."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import Any

from mkc.errors import ChatMessageError
from mkc.errors import ChatOptionError
from mkc.errors import TextFormatError
from mkc.runtime.text.formats import ChannelFormat
from mkc.runtime.text.messages import ChatRequest
from mkc.runtime.text.messages import Prompt
from mkc.runtime.text.messages import normal_messages
from mkc.runtime.text.tokenizer import Tokenizer

NO_EFFORT = "none"  # as an effort it means: do not think
THINKING_OPTIONS = ("thinking", "enable_thinking")
EFFORT_OPTIONS = ("thinking_effort", "reasoning_effort")
TOOL_CHOICES = ("auto", "none", "required")


class ChannelChat:
    """Writes requests in a channel format.

    Delimiters are written as ids and everything else is encoded as text, each name, attribute and
    content by itself, so nothing in a message can become a delimiter.
    """

    def __init__(self, channels: ChannelFormat, tokenizer: Tokenizer, *, path: Path) -> None:
        """
        Args:
          channels: the format.
          tokenizer: must have its delimiters.
          path: of the description, for messages.
        """
        self._format = channels
        self._tokenizer = tokenizer
        for key, text in sorted(vars(channels.markers).items()):
            if text not in tokenizer.special_tokens:
                raise TextFormatError(
                    path=path,
                    key=f"channels.markers.{key}",
                    problem=f"is {text!r}, which is no special token of the tokenizer",
                    expected="one of its special tokens",
                )

    def encode(self, request: ChatRequest) -> Prompt:
        """Renders a request.

        Raises:
          ChatMessageError: a message that the format cannot write.
          ChatOptionError: an option that the format does not have.
        """
        thinking, effort = self._thinking(request)
        writer = _Writer(self._format, self._tokenizer)
        if request.tools:
            writer.instruct("tools", compact_json(list(request.tools)))
        if thinking and effort:
            writer.instruct("effort", effort)
        self._messages(writer, normal_messages(request.messages), thinking)
        if request.tool_choice not in TOOL_CHOICES:
            expected = f"one of {', '.join(TOOL_CHOICES)}"
            raise ChatOptionError(option="tool_choice", got=request.tool_choice, expected=expected)
        if request.tools and request.tool_choice != "auto":
            writer.instruct(f"tool_choice_{request.tool_choice}", request.tool_choice)
        _response_format(writer, request.response_format)
        if request.add_generation_prompt:
            writer.open(self._format.names.message, {self._format.names.role: "assistant"})
            channels = self._format.channels
            writer.open(channels.reasoning if thinking else channels.content)
        return Prompt(
            ids=tuple(writer.ids),
            text="".join(writer.shown),
            opens_reasoning=thinking and request.add_generation_prompt,
        )

    def _thinking(self, request: ChatRequest) -> tuple[bool, str]:
        """Whether to think, and how much."""
        known = (*THINKING_OPTIONS, *EFFORT_OPTIONS)
        for option in sorted(set(request.options) - set(known)):
            expected = f"no such option; there are {', '.join(known)}"
            raise ChatOptionError(option=option, got=request.options[option], expected=expected)
        thinking = _first(request.thinking, request.options, THINKING_OPTIONS)
        effort = _first(request.effort, request.options, EFFORT_OPTIONS)
        if thinking is None:
            thinking = self._format.thinking if effort is None else effort != NO_EFFORT
        if not isinstance(thinking, bool):
            raise ChatOptionError(option="thinking", got=thinking, expected="true or false")
        if effort is None or effort == NO_EFFORT:
            return thinking and effort is None, self._format.default_effort
        if effort not in self._format.efforts:
            levels = ", ".join((NO_EFFORT, *self._format.efforts))
            raise ChatOptionError(option="effort", got=effort, expected=f"one of {levels}")
        return thinking, str(effort)

    def _messages(
        self, writer: _Writer, messages: Sequence[Mapping[str, Any]], thinking: bool
    ) -> None:
        calls: dict[str, tuple[int, str]] = {}
        results: list[tuple[int, str, str]] = []
        for place, message in enumerate(messages):
            if message["role"] == "tool":
                results.append(_result(message, calls, f"messages[{place}]", len(results)))
                continue
            self._results(writer, results)
            results = []
            match message["role"]:
                case "assistant":
                    calls = _call_places(message)
                    self._assistant(writer, message, thinking)
                case "system" | "developer":
                    self._plain(writer, "system", message)
                case "user":
                    self._plain(writer, "user", message)
                case role:
                    raise ChatMessageError(
                        where=f"messages[{place}].role",
                        problem=f"is {role!r}",
                        expected="system, developer, user, assistant or tool",
                    )
        self._results(writer, results)

    def _plain(self, writer: _Writer, role: str, message: Mapping[str, Any]) -> None:
        names = self._format.names
        attributes = {names.role: role}
        if message.get("name"):
            attributes[names.name] = str(message["name"])
        writer.message(attributes, message["content"])

    def _results(self, writer: _Writer, results: list[tuple[int, str, str]]) -> None:
        """Results of tools, in the order of the calls whatever their order in the request."""
        names = self._format.names
        for place, tool, content in sorted(results, key=lambda one: one[0]):
            index = str(place + self._format.first_index)
            writer.message({names.role: "tool", names.tool: tool, names.index: index}, content)

    def _assistant(self, writer: _Writer, message: Mapping[str, Any], thinking: bool) -> None:
        """Thought, answer and calls. A thinking model's thought is there even when it is empty."""
        names, channels = self._format.names, self._format.channels
        writer.open(names.message, {names.role: "assistant"})
        if thinking:
            thought = message.get("reasoning_content", "")
            writer.element(channels.reasoning, {}, thought if thought.strip() else "")
        writer.element(channels.content, {}, message["content"])
        if message.get("tool_calls"):
            writer.open(channels.tools)
            for place, call in enumerate(message["tool_calls"]):
                self._call(writer, call["function"], str(place + self._format.first_index))
            writer.close(channels.tools)
        writer.close(names.message)
        writer.mark(self._format.markers.end_of_message)

    def _call(self, writer: _Writer, function: Mapping[str, Any], index: str) -> None:
        names = self._format.names
        arguments = function["arguments"]
        writer.open(names.call, {names.tool: str(function["name"]), names.index: index})
        if isinstance(arguments, Mapping):
            for key, value in arguments.items():
                text = value if isinstance(value, str) else compact_json(value, sort_keys=False)
                attributes = {names.key: key, names.type: json_type(value)}
                writer.element(names.argument, attributes, text)
        else:
            text = arguments if isinstance(arguments, str) else compact_json(arguments)
            writer.element(names.raw_arguments, {names.type: "object"}, text)
        writer.close(names.call)


class _Writer:
    """Ids of markup and text, in order."""

    def __init__(self, channels: ChannelFormat, tokenizer: Tokenizer) -> None:
        self._format = channels
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown: list[str] = []

    def mark(self, marker: str) -> None:
        self.ids.append(self._tokenizer.special_tokens[marker])
        self.shown.append(marker)

    def text(self, text: str) -> None:
        self.ids.extend(self._tokenizer.encode(text, allow_special=False))
        self.shown.append(text)

    def open(self, name: str, attributes: Mapping[str, str] | None = None) -> None:
        self.mark(self._format.markers.open)
        self.text(name)
        for key, value in (attributes or {}).items():
            # In pieces, as the models were trained: a name and a value are never one token.
            for piece in (f" {key}", '="', escaped(value), '"'):
                self.text(piece)
        self.mark(self._format.markers.separator)

    def close(self, name: str) -> None:
        self.mark(self._format.markers.close)
        self.text(name)
        self.mark(self._format.markers.separator)

    def element(self, name: str, attributes: Mapping[str, str], content: str) -> None:
        self.open(name, attributes)
        self.text(content)
        self.close(name)

    def message(self, attributes: Mapping[str, str], content: str) -> None:
        self.element(self._format.names.message, attributes, content)
        self.mark(self._format.markers.end_of_message)

    def instruct(self, occasion: str, value: str) -> None:
        """The format's own system message for an occasion, if it has one."""
        instruction = self._format.instructions.get(occasion)
        if instruction is not None:
            names = self._format.names
            attributes = {names.role: "system", names.type: instruction.type}
            self.message(attributes, instruction.text.replace("{value}", value))


def escaped(value: str) -> str:
    """An attribute value as it is written."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def compact_json(value: object, *, sort_keys: bool = True) -> str:
    """JSON without spaces."""
    return dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=sort_keys)


def json_type(value: object) -> str:
    """The name of a JSON value's type."""
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list() | tuple():
            return "array"
    return "object"


def _response_format(writer: _Writer, wanted: Mapping[str, Any] | None) -> None:
    match (wanted or {}).get("type", "text"):
        case "text":
            return
        case "json_object":
            writer.instruct("json_object", "")
        case "json_schema":
            holder = (wanted or {}).get("json_schema") or {}
            writer.instruct("json_schema", compact_json(holder.get("schema", holder)))
        case kind:
            expected = "text, json_object or json_schema"
            raise ChatOptionError(option="response_format", got=kind, expected=expected)


def _call_places(message: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
    """Id of each call of a message to its place and tool."""
    places: dict[str, tuple[int, str]] = {}
    for place, call in enumerate(message.get("tool_calls") or ()):
        name = str(call["function"]["name"])
        for known in (call.get("id"), f"{name}:{place}"):
            if known:
                places.setdefault(str(known), (place, name))
    return places


def _result(
    message: Mapping[str, Any], calls: Mapping[str, tuple[int, str]], where: str, order: int
) -> tuple[int, str, str]:
    """Place, tool and content of a tool's result."""
    found = calls.get(str(message.get("tool_call_id")))
    if found is not None:
        return (*found, message["content"])
    if message.get("name"):
        return (order, str(message["name"]), message["content"])
    raise ChatMessageError(
        where=f"{where}.tool_call_id",
        problem=f"is {message.get('tool_call_id')!r}, no call of the assistant message before it",
        expected="the id of one of its tool_calls, or a 'name'",
    )


def _first(value: object, options: Mapping[str, Any], names: Sequence[str]) -> object:
    """`value`, or else the first of some options that is given."""
    if value is not None:
        return value
    return next((options[name] for name in names if options.get(name) is not None), None)
