"""What a request says about the form of its output, as a constraint of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mkc.errors import RequestFieldError
from mkc.runtime.request import TokenConstraint
from serve.model import ServedModel
from serve.schemas.chat import NamedTool
from serve.schemas.chat import Tool

type MakeConstraint = Callable[[], TokenConstraint | None]  # one for each sequence


def constraint_maker(
    model: ServedModel,
    *,
    response_format: dict[str, Any] | None,
    tools: list[Tool],
    tool_choice: str | NamedTool | None,
    parallel_tool_calls: bool | None,
) -> MakeConstraint:
    """What makes the constraint of each sequence of a request.

    Raises:
      RequestFieldError: a form that cannot be kept to.
    """
    if response_format is not None and response_format.get("type") != "text":
        raise _unsupported("response_format", "{'type': 'text'}")
    if isinstance(tool_choice, NamedTool) or tool_choice == "required":
        raise _unsupported("tool_choice", "'auto' or 'none'")
    if parallel_tool_calls is False and tools:
        raise _unsupported("parallel_tool_calls", "true")
    for place, tool in enumerate(tools):
        if tool.function.strict:
            raise _unsupported(f"tools[{place}].function.strict", "false")
    return lambda: None


def _unsupported(field: str, expected: str) -> RequestFieldError:
    return RequestFieldError(
        field=field, problem="asks for a form that this server cannot keep to", expected=expected
    )
