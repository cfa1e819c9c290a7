"""Records from the JSON objects that `mkc.plan.form.plain` made of them.

The annotations of the dataclasses say what is expected, so a new record needs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from types import UnionType
from typing import Any
from typing import Union
from typing import get_args
from typing import get_origin
from typing import get_type_hints

from mkc.ir.facets import MNEMONICS
from mkc.ir.ops import Op
from mkc.plan.form import RECORD
from mkc.schedule import expert_phases
from mkc.schedule import mixing_phases
from mkc.schedule import round_phases
from mkc.schedule.program import View

# Of records that are known once their module is imported.
MODULES = (expert_phases, mixing_phases, round_phases)


class DecodeError(Exception):
    """JSON that is not of the expected form. `place` is a path such as `program.body[2].id`."""

    def __init__(self, place: str, problem: str) -> None:
        super().__init__(f"{place}: {problem}")
        self.place = place
        self.problem = problem


def decode(expected: Any, value: Any, place: str) -> Any:
    """The value of type `expected` that `value` was written from. Raises `DecodeError`."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, UnionType):
        return _choice(arguments, value, place)
    if origin is tuple:
        return _tuple(arguments, value, place)
    if origin is dict:
        _require(isinstance(value, dict), place, "is no object")
        return {key: decode(arguments[1], one, f"{place}.{key}") for key, one in value.items()}
    if is_dataclass(expected):
        return _record((expected,), value, place)
    if isinstance(expected, type) and issubclass(expected, Enum):
        known = [one.value for one in expected]
        _require(value in known, place, f"is {value!r}, not one of {known}")
        return expected(value)
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    _require(type(value) is expected, place, f"is {value!r}, not a value of type {expected}")
    return value


def _require(holds: bool, place: str, problem: str) -> None:
    if not holds:
        raise DecodeError(place, problem)


def _choice(arguments: tuple[Any, ...], value: Any, place: str) -> Any:
    """One of several types: nothing, records told apart by their kind, or one other type."""
    if value is None and NoneType in arguments:
        return None
    records = tuple(one for one in arguments if is_dataclass(one))
    if records and isinstance(value, dict):
        return _record(records, value, place)
    others = [one for one in arguments if one is not NoneType and not is_dataclass(one)]
    _require(len(others) == 1, place, f"is {value!r}")
    return decode(others[0], value, place)


def _tuple(arguments: tuple[Any, ...], value: Any, place: str) -> tuple[Any, ...]:
    _require(isinstance(value, list), place, "is no list")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        kinds: tuple[Any, ...] = (arguments[0],) * len(value)
    else:
        kinds = arguments
    _require(len(kinds) == len(value), place, f"has {len(value)} entries, not {len(kinds)}")
    return tuple(
        decode(kind, one, f"{place}[{index}]")
        for index, (kind, one) in enumerate(zip(kinds, value, strict=True))
    )


def _record(bases: tuple[Any, ...], value: Any, place: str) -> Any:
    """A dataclass that is one of `bases` or derived from one."""
    _require(isinstance(value, dict), place, "is no object")
    is_op = any(issubclass(base, Op) for base in bases)
    key = "op" if is_op else RECORD
    # An op is what is registered by its name, which a class of that name need not be.
    known: dict[str, Any] = {one.__name__: one for base in bases for one in _derived(base)}
    if is_op:
        known = dict(MNEMONICS)
    name = value.get(key)
    _require(name in known, place, f"has {key} {name!r}; expected one of {sorted(known)}")
    kind = known[name]
    types = _types(kind)
    given = value.keys() - {key}
    _require(given == types.keys(), place, f"has other fields than {sorted(types)}")
    members = {part: decode(types[part], value[part], f"{place}.{part}") for part in types}
    return kind(**members)


def _derived(base: Any) -> Iterator[Any]:
    yield base
    for one in base.__subclasses__():
        yield from _derived(one)


@cache
def _types(kind: Any) -> dict[str, Any]:
    """Field -> annotation. Some modules know these types only while types are checked."""
    hints = get_type_hints(kind, localns={"Op": Op, "View": View})
    return {part.name: hints[part.name] for part in fields(kind)}
