"""The arguments of a tool, as grammars of calls need them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mkc.errors import RequestFieldError
from mkc.runtime.text.arguments import STRING
from mkc.runtime.text.arguments import value_types
from serve.grammar import Part
from serve.grammar import schema_part
from serve.schemas.chat import Tool

DEFINITIONS = ("$defs", "definitions")
UNCHECKED = ("pattern", "format", "not", "allOf", "if")  # of texts, which are no JSON in a call


@dataclass(frozen=True, kw_only=True)
class Value:
    """One kind of value. Texts stand in calls as they are; other values as JSON.

    Attributes:
      kind: JSON type of the value.
      schema: of a value that is no text.
      texts: the only texts that are allowed, None for any.
      repeats: how many characters a text has, as regular expressions say it.
    """

    kind: str
    schema: Part | None = None
    texts: Sequence[str] | None = None
    repeats: str = "*"


@dataclass(frozen=True, kw_only=True)
class Argument:
    """One argument; its value is of one of some kinds."""

    key: str
    required: bool
    values: tuple[Value, ...]


def arguments_of(tool: Tool, place: int, *, ends_name: str) -> list[Argument]:
    """The arguments of a tool in the order of its schema; one without properties has none.

    Args:
      place: of the tool in the request, for messages.
      ends_name: what stands behind names, so that none may contain it.

    Raises:
      RequestFieldError: a name that cannot be written, or, for a strict tool, a schema that cannot
        be kept to.
    """
    where = f"tools[{place}].function"
    root = tool.function.parameters or {}
    _check_name(tool.function.name, f"{where}.name", ends_name)
    properties, required = root.get("properties") or {}, root.get("required") or ()
    for name, value, kind in (
        ("properties", properties, Mapping),
        ("required", required, list | tuple),
    ):
        if not isinstance(value, kind):
            raise RequestFieldError(
                field=f"{where}.parameters.{name}",
                problem="is something else",
                expected="an object" if kind is Mapping else "a list",
            )
    found = []
    for key, schema in properties.items():
        field = f"{where}.parameters.properties.{key[:64]}"
        _check_name(key, field, ends_name)
        values = _values(schema, root, strict=bool(tool.function.strict), field=field)
        found.append(Argument(key=key, required=key in required, values=values))
    return found


def _values(
    schema: object, root: Mapping[str, Any], *, strict: bool, field: str
) -> tuple[Value, ...]:
    kinds = value_types(schema, root)
    given: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
    if kinds == (STRING,):
        if strict:
            _check_text(given, field)
        return (_text(given),)
    found = [Value(kind=STRING)] if STRING in kinds else []
    for kind in kinds:
        if kind != STRING:
            found.append(Value(kind=kind, schema=_json(given, root, kind, len(kinds) == 1, strict)))
    return tuple(found)


def _json(
    schema: Mapping[str, Any], root: Mapping[str, Any], kind: str, alone: bool, strict: bool
) -> Part:
    """JSON of one kind; all of the schema counts where there is no other kind."""
    definitions = {key: root[key] for key in DEFINITIONS if key in root}
    whole = {**schema, **definitions} if alone else {"type": kind}
    return schema_part(whole, lenient=not strict)


def _text(schema: Mapping[str, Any]) -> Value:
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list):
        texts = [one for one in choices if isinstance(one, str)]
        return Value(kind=STRING, texts=texts or None)
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if not all(isinstance(one, int) and one >= 0 for one in (least, most or 0)):
        return Value(kind=STRING)
    return Value(kind=STRING, repeats="*" if (least, most) == (0, "") else f"{{{least},{most}}}")


def _check_text(schema: Mapping[str, Any], field: str) -> None:
    for key in UNCHECKED:
        if key in schema:
            raise RequestFieldError(
                field=f"{field}.{key}",
                problem="cannot be kept to in a text, and the tool is strict",
                expected="type, enum, const, minLength and maxLength",
            )


def _check_name(name: str, field: str, ends_name: str) -> None:
    if not name.strip() or any(one in name for one in ("\n", '"', ends_name)):
        raise RequestFieldError(
            field=field,
            problem=f"has a name that a call cannot have ({name[:64]!r})",
            expected=f"one without line ends, '\"' and '{ends_name}'",
        )
