"""Arguments of a tool call, written as JSON while they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from json import dumps
from json import loads
from typing import Any

STRING = "string"
KINDS = ("boolean", "integer", "number", "null", "array", "object")
# JSON has these words in lower case; templates that print Python values teach models the others.
WORDS = {"true": True, "false": False, "null": None, "none": None}


class ArgumentWriter:
    """Writes `{"key": value, ...}` piece by piece; the pieces, joined, are valid JSON.

    A string is written as it arrives. Any other value is one piece, when it is whole, because only
    then it is known to be what its type promises.
    """

    def __init__(self, types: Mapping[str, Sequence[str]]) -> None:
        """
        Args:
          types: JSON types that each key may have; a key that is not there is a string.
        """
        self._types = types
        self._is_first = True
        self._kinds: Sequence[str] = ()
        self._value = ""

    def begin(self, key: str, kinds: Sequence[str] = ()) -> str:
        """Starts an argument; `kinds` are its types where the output itself says them."""
        self._kinds = kinds or self._types.get(key) or (STRING,)
        self._value = ""
        lead = "{" if self._is_first else ", "
        self._is_first = False
        quote = '"' if self._is_text() else ""
        return f"{lead}{dumps(key, ensure_ascii=False)}: {quote}"

    def add(self, text: str) -> str:
        """More of the current argument."""
        if self._is_text():
            return dumps(text, ensure_ascii=False)[1:-1]
        self._value += text
        return ""

    def end(self) -> str:
        """Ends the current argument."""
        return '"' if self._is_text() else typed_json(self._value, self._kinds)

    def close(self) -> str:
        """Ends the arguments."""
        return "{}" if self._is_first else "}"

    def _is_text(self) -> bool:
        return tuple(self._kinds) == (STRING,)


def typed_json(text: str, kinds: Sequence[str]) -> str:
    """JSON of an argument that arrived as text: of one of its types if it can be, else a string."""
    stripped = text.strip()
    try:
        value = loads(stripped, parse_constant=_no_constant)
        whole = dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        if stripped.lower() not in WORDS:
            return dumps(text, ensure_ascii=False)
        value = WORDS[stripped.lower()]
        whole = dumps(value)
    fits = any(_is_of(value, kind) for kind in kinds)
    return whole if fits else dumps(text, ensure_ascii=False)


def argument_types(tools: Sequence[Mapping[str, Any]], name: str) -> dict[str, tuple[str, ...]]:
    """The types of a tool's parameters, as far as its schema says them."""
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or function.get("name") != name:
            continue
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if isinstance(schema, Mapping) and isinstance(properties, Mapping):
            return {key: value_types(one, schema) for key, one in properties.items()}
    return {}


def value_types(schema: object, root: Mapping[str, Any]) -> tuple[str, ...]:
    """JSON types that a schema allows; a string when it does not say.

    Args:
      root: in which references of the schema are looked up.
    """
    return tuple(dict.fromkeys(_types(schema, root, set()))) or (STRING,)


def _types(schema: object, root: Mapping[str, Any], followed: set[str]) -> Iterator[str]:
    """`followed` are references that have been looked up: they may lead back to themselves."""
    if not isinstance(schema, Mapping):
        return
    reference, kind = schema.get("$ref"), schema.get("type")
    choices = schema.get("anyOf") or schema.get("oneOf")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(reference, str):
        if reference not in followed:
            followed.add(reference)
            yield from _types(_pointed(reference, root), root, followed)
    elif isinstance(kind, str):
        yield kind
    elif isinstance(kind, list):
        yield from map(str, kind)
    elif isinstance(choices, list):
        for one in choices:
            yield from _types(one, root, followed) if one else (STRING,)
    elif isinstance(values, list):
        yield from (_kind(one) for one in values)


def _pointed(reference: str, root: Mapping[str, Any]) -> object:
    """What a reference such as `#/$defs/Place` points to; None for nothing."""
    found: object = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def _kind(value: object) -> str:
    """The JSON type of a value."""
    return next((kind for kind in KINDS if _is_of(value, kind)), STRING)


def _is_of(value: object, kind: str) -> bool:
    match kind:
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return isinstance(value, list)
        case "object":
            return isinstance(value, dict)
    return False


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")
