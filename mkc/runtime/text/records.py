"""Reading a dataclass out of JSON, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from dataclasses import Field
from dataclasses import fields
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from types import UnionType
from typing import Any
from typing import get_args
from typing import get_origin
from typing import get_type_hints

from mkc.errors import TextFormatError

KINDS = {str: "a string", int: "a whole number", bool: "true or false"}


def read_record[T](kind: type[T], value: object, *, path: Path, key: str = "") -> T:
    """An instance of the dataclass `kind` from a JSON object.

    Fields may be strings, whole numbers, booleans, tuples, mappings from strings, dataclasses,
    and any of them or None.

    Raises:
      TextFormatError: an unknown or missing key, or a value of another type.
    """
    entries = _expect(value, dict, "an object", path=path, key=key)
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    for name in sorted(set(entries) - set(known)):
        expected = f"one of {', '.join(sorted(known))}"
        raise TextFormatError(
            path=path, key=_join(key, name), problem="is unknown", expected=expected
        )
    hints = get_type_hints(kind)
    arguments: dict[str, Any] = {}
    for name, one in known.items():
        if name in entries:
            arguments[name] = _read(hints[name], entries[name], path=path, key=_join(key, name))
        elif _is_required(one):
            expected = f"a value, as for all of {', '.join(known)}"
            raise TextFormatError(
                path=path, key=_join(key, name), problem="is missing", expected=expected
            )
    return kind(**arguments)


def _read(hint: Any, value: object, *, path: Path, key: str) -> object:
    """`value` as the type that an annotation asks for."""
    origin = get_origin(hint)
    if origin is UnionType:
        (inner,) = (one for one in get_args(hint) if one is not NoneType)
        return None if value is None else _read(inner, value, path=path, key=key)
    if origin is tuple:
        items = _expect(value, list, "a list", path=path, key=key)
        inner = get_args(hint)[0]
        return tuple(
            _read(inner, item, path=path, key=f"{key}[{place}]") for place, item in enumerate(items)
        )
    if origin is Mapping:
        entries = _expect(value, dict, "an object", path=path, key=key)
        inner = get_args(hint)[1]
        return {
            name: _read(inner, item, path=path, key=_join(key, name))
            for name, item in sorted(entries.items())
        }
    if is_dataclass(hint):
        return read_record(hint, value, path=path, key=key)  # type: ignore[arg-type]
    return _expect(value, hint, KINDS[hint], path=path, key=key)


def _expect(value: object, kind: type, words: str, *, path: Path, key: str) -> Any:
    if type(value) is not kind:
        raise TextFormatError(
            path=path, key=key or "(the whole file)", problem=f"is {value!r}", expected=words
        )
    return value


def _is_required(one: Field[Any]) -> bool:
    return one.default is MISSING and one.default_factory is MISSING


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name
