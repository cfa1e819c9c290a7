"""The form that a request asks of its output: a schema, an expression, a grammar, calls."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from typing import Literal

from llguidance import LLTokenizer

from mkc.errors import RequestFieldError
from serve.grammar import ANY_JSON_OBJECT
from serve.grammar import Part
from serve.grammar import choice_part
from serve.grammar import grammar_part
from serve.grammar import problem
from serve.grammar import regex_part
from serve.grammar import schema_part
from serve.schemas.base import GuidedFields
from serve.schemas.base import StructuredOutputs
from serve.schemas.chat import NamedTool
from serve.schemas.chat import Tool

SCHEMA_KEYS = frozenset({"name", "description", "schema", "strict"})


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Calls that an output has.

    Attributes:
      tools: what may be called, by place in the request.
      needed: the output has to be a call.
      several: it may be more than one.
    """

    tools: Mapping[int, Tool]
    needed: bool
    several: bool


@dataclass(frozen=True, kw_only=True)
class Form:
    """What an output has to look like behind its thought.

    Attributes:
      content: of the answer; None for any text.
      calls: None when calls are not looked at: there are none, or they are as the model likes.
    """

    content: Part | None = None
    calls: Calls | None = None

    @property
    def is_free(self) -> bool:
        return self.content is None and self.calls is None


def content_of(
    response_format: Mapping[str, Any] | None,
    guided: GuidedFields,
    words: Callable[[], LLTokenizer],
) -> Part | None:
    """The form of the answer's text; None for any text.

    Args:
      words: gives the vocabulary; it is asked only if there is a form.

    Raises:
      RequestFieldError: a form that is not known, or more than one.
    """
    found = {**_response_format(response_format), **_guides(guided)}
    if len(found) > 1:
        first, second, *_ = found
        raise RequestFieldError(
            field=second, problem=f"is there together with {first}", expected="one form"
        )
    for field, make in found.items():
        return _made(field, make, words())
    return None


def has_form(response_format: Mapping[str, Any] | None, guided: GuidedFields | None = None) -> bool:
    """Whether the answer's text has a form. Raises `RequestFieldError`."""
    return bool(_response_format(response_format) or _guides(guided or GuidedFields()))


def _made(field: str, make: Callable[[], Part], words: LLTokenizer) -> Part:
    try:
        part = make()
        wrong = problem(part, words)
    except ValueError as error:
        wrong = str(error).partition("\n")[0][:200]
    if wrong:
        raise RequestFieldError(
            field=field,
            problem=f"cannot be kept to ({wrong})",
            expected="a form that the documentation lists",
        )
    return part


def _response_format(given: Mapping[str, Any] | None) -> dict[str, Callable[[], Part]]:
    """What makes the part, by the field that a message would name."""
    match (given or {"type": "text"}).get("type"):
        case "text":
            return {}
        case "json_object":
            return {"response_format": lambda: schema_part(ANY_JSON_OBJECT)}
        case "json_schema":
            schema = _schema((given or {}).get("json_schema"))
            return {"response_format.json_schema.schema": lambda: schema_part(schema)}
        case kind:
            raise RequestFieldError(
                field="response_format.type",
                problem=f"is {str(kind)[:40]!r}",
                expected="text, json_object or json_schema",
            )


def _schema(holder: object) -> Mapping[str, Any]:
    where = "response_format.json_schema"
    if not isinstance(holder, Mapping):
        raise RequestFieldError(field=where, problem="is no object", expected="name and schema")
    for key in sorted(holder.keys() - SCHEMA_KEYS):
        raise RequestFieldError(
            field=f"{where}.{str(key)[:40]}",
            problem="is not known",
            expected=f"one of {', '.join(sorted(SCHEMA_KEYS))}",
        )
    schema = holder.get("schema")
    if not isinstance(schema, Mapping):
        raise RequestFieldError(
            field=f"{where}.schema", problem="is no object", expected="a JSON schema"
        )
    return schema


def _guides(guided: GuidedFields) -> dict[str, Callable[[], Part]]:
    inner = guided.structured_outputs or StructuredOutputs()
    anything = ANY_JSON_OBJECT if inner.json_object else None
    fields: tuple[tuple[str, Any, Callable[[Any], Part]], ...] = (
        ("structured_outputs.json", inner.json_schema, schema_part),
        ("structured_outputs.json_object", anything, schema_part),
        ("structured_outputs.regex", inner.regex, regex_part),
        ("structured_outputs.choice", inner.choice, choice_part),
        ("structured_outputs.grammar", inner.grammar, grammar_part),
        ("guided_json", guided.guided_json, schema_part),
        ("guided_regex", guided.guided_regex, regex_part),
        ("guided_choice", guided.guided_choice, choice_part),
        ("guided_grammar", guided.guided_grammar, grammar_part),
    )
    return {name: partial(make, value) for name, value, make in fields if value is not None}


def calls_of(
    tools: Sequence[Tool],
    choice: Literal["auto", "none", "required"] | NamedTool | None,
    parallel: bool | None,
    *,
    with_content: bool,
) -> Calls | None:
    """The calls that a request asks for, or has to be kept to.

    Args:
      with_content: the answer has a form, so that calls have to be told from it.

    Raises:
      RequestFieldError: a tool that there is not.
    """
    known = dict(enumerate(tools))
    if isinstance(choice, NamedTool):
        name = choice.function.name
        known = {at: one for at, one in known.items() if one.function.name == name}
        if not known:
            names = ", ".join(one.function.name for one in tools) or "none"
            raise RequestFieldError(
                field="tool_choice.function.name",
                problem=f"is {name[:64]!r}, which is none of the tools",
                expected=f"one of them: {names}",
            )
        return Calls(tools=known, needed=True, several=False)
    if choice == "required":
        if not known:
            raise RequestFieldError(
                field="tool_choice", problem="is 'required' without tools", expected="tools"
            )
        return Calls(tools=known, needed=True, several=parallel is not False)
    strict = any(one.function.strict for one in tools)
    if known and (strict or with_content or parallel is False):
        return Calls(tools=known, needed=False, several=parallel is not False)
    return None
