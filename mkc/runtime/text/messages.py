"""Chat requests, and the one form that messages have before they are rendered."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from json import JSONDecodeError
from json import loads
from typing import Any

from mkc.errors import ChatMessageError

type Message = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """What is to be rendered.

    Attributes:
      messages: in the form of the chat completions interface: `role`, `content` (text, or parts
        that are text), `reasoning_content`, `tool_calls`, `tool_call_id`.
      tools: function definitions in the same form.
      documents: passed to the template.
      add_generation_prompt: whether the prompt ends where the model's answer begins.
      thinking: whether the model is to think; None leaves it to the format.
      effort: how much; None leaves it to the format.
      tool_choice: `auto`, `none` or `required`.
      response_format: as in the chat completions interface; None for free text.
      options: anything else that the template understands.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    documents: Sequence[Mapping[str, Any]] = ()
    add_generation_prompt: bool = True
    thinking: bool | None = None
    effort: str | None = None
    tool_choice: str = "auto"
    response_format: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A rendered chat.

    Attributes:
      ids: what the model reads.
      text: the same, to be read by people; markup and text can no longer be told apart in it.
      opens_reasoning: whether the output begins inside a thought.
      may_reason: whether a thought is wanted; the model may write one all the same.
    """

    ids: tuple[int, ...]
    text: str
    opens_reasoning: bool
    may_reason: bool = True


def normal_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of messages with text contents, parsed arguments and `reasoning_content`.

    Raises:
      ChatMessageError: with the place of what is wrong, such as `messages[2].content[0]`.
    """
    return [_normal(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _normal(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatMessageError(where=where, problem=f"is {message!r}", expected="an object")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ChatMessageError(
            where=f"{where}.role", problem=f"is {role!r}", expected="a string such as 'user'"
        )
    normal = {**message, "content": _text(message.get("content"), f"{where}.content")}
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is not None:
        normal["reasoning_content"] = _text(reasoning, f"{where}.reasoning_content")
    if message.get("tool_calls"):
        normal["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    return normal


def _text(content: object, where: str) -> str:
    """The text of a content: parts follow each other without anything between them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise ChatMessageError(
            where=where, problem=f"is {content!r}", expected="a string or a list of text parts"
        )
    parts = []
    for place, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ChatMessageError(
                where=f"{where}[{place}]",
                problem=f"is a part of type {kind!r}",
                expected="a part of type 'text' with a string 'text'",
            )
        parts.append(text)
    return "".join(parts)


def _calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise ChatMessageError(where=where, problem=f"is {calls!r}", expected="a list")
    normal = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not name:
            raise ChatMessageError(
                where=f"{where}[{place}]",
                problem="has no function with a name",
                expected="an object with 'function', which has 'name' and 'arguments'",
            )
        arguments = _arguments(function.get("arguments"))
        normal.append({**call, "function": {**function, "arguments": arguments}})
    return normal


def _arguments(arguments: object) -> object:
    """Arguments as a mapping; text that is no JSON object stays text."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = loads(arguments)
    except JSONDecodeError:
        return arguments
    return value if isinstance(value, dict) else arguments
