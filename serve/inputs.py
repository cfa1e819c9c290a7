"""From the input of a response to the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from mkc.errors import RequestFieldError
from serve.schemas.base import read_body
from serve.schemas.chat import Message

TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "text")
KINDS = "message, function_call, function_call_output, reasoning"


def messages_of(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None
) -> list[Message]:
    """The messages of an input, behind the instructions.

    Calls and thoughts become a part of the assistant's message next to them.

    Raises:
      RequestFieldError: names the item that is wrong.
    """
    found: list[dict[str, Any]] = []
    if instructions is not None:
        found.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        found.append({"role": "user", "content": given})
    else:
        for place, item in enumerate(given):
            _append(found, item, f"input[{place}]")
    return [_message(one) for one in found]


def _append(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role, content = item.get("role"), _content(item.get("content"), f"{where}.content")
        if role == "assistant":
            _assistant(messages)["content"] = content
        else:
            messages.append({"role": _text(role, f"{where}.role"), "content": content})
    elif kind == "reasoning":
        thought = _content(item.get("content") or "", f"{where}.content")
        _assistant(messages)["reasoning_content"] = thought
    elif kind == "function_call":
        call = {
            "id": _text(item.get("call_id"), f"{where}.call_id"),
            "type": "function",
            "function": {
                "name": _text(item.get("name"), f"{where}.name"),
                "arguments": _text(item.get("arguments"), f"{where}.arguments"),
            },
        }
        _assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append(
            {
                "role": "tool",
                "tool_call_id": _text(item.get("call_id"), f"{where}.call_id"),
                "content": _content(item.get("output"), f"{where}.output"),
            }
        )
    else:
        raise RequestFieldError(
            field=f"{where}.type", problem=f"is {str(kind)[:40]!r}", expected=f"one of {KINDS}"
        )


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message at the end, which is made if there is none or it has an answer."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "a string or a list of text parts")
    return "".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") not in TEXT_PARTS:
        raise _wrong(f"{where}.type", f"one of {', '.join(TEXT_PARTS)}")
    return _text(part.get("text"), f"{where}.text")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "a string")
    return value


def _wrong(where: str, expected: str) -> RequestFieldError:
    return RequestFieldError(field=where, problem="is something else", expected=expected)


def _message(given: Mapping[str, Any]) -> Message:
    return read_body(Message, given, lenient=False)[0]
