"""Scalars that ranks differ in, so that a traced kernel is executed once for all ranks.

Ranks run the same code and differ in their number alone. Whatever is computed from it is kept as
one value for each rank, up to the places, semaphores and peers of events. Nothing is assumed about
which events these are. Where ranks would go different ways, `RanksDivergeError` is raised, and they
have to be executed one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import fields
from dataclasses import replace
from typing import Any
from typing import overload

from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Place


class RanksDivergeError(Exception):
    """What a kernel does next is not the same on all ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PerRank:
    """A scalar with its value on each rank; not all are equal."""

    values: tuple[Any, ...]

    def __add__(self, other: Any) -> Any:
        return applied(lambda a, b: a + b, self, other)

    def __radd__(self, other: Any) -> Any:
        return applied(lambda a, b: a + b, other, self)

    def __bool__(self) -> bool:
        raise RanksDivergeError

    def __index__(self) -> int:
        raise RanksDivergeError


def per_rank(values: Iterable[Any]) -> Any:
    """One value where all ranks have the same."""
    found = tuple(values)
    return found[0] if all(one == found[0] for one in found) else PerRank(values=found)


def applied(operation: Callable[..., Any], *inputs: Any) -> Any:
    """The operation on every rank's inputs."""
    count = next((len(one.values) for one in inputs if isinstance(one, PerRank)), 0)
    if not count:
        return operation(*inputs)
    return per_rank(
        operation(*(one.values[rank] if isinstance(one, PerRank) else one for one in inputs))
        for rank in range(count)
    )


def values_of(value: Any) -> Sequence[Any]:
    """The different values that a scalar has."""
    return value.values if isinstance(value, PerRank) else (value,)


class EventsByRank(Sequence[Sequence[Event]]):
    """The events of every rank, made when they are asked for; those without a difference are
    shared."""

    def __init__(self, events: Sequence[Event], ranks: int) -> None:
        self._events = events
        self._ranks = ranks
        differs = {id(one): _differs(one) for one in {id(one): one for one in events}.values()}
        self._differing = [number for number, one in enumerate(events) if differs[id(one)]]

    def __len__(self) -> int:
        return self._ranks

    @overload
    def __getitem__(self, rank: int) -> Sequence[Event]: ...

    @overload
    def __getitem__(self, rank: slice) -> Sequence[Sequence[Event]]: ...

    def __getitem__(self, rank: int | slice) -> Sequence[Event] | Sequence[Sequence[Event]]:
        if isinstance(rank, slice):
            return [self[one] for one in range(*rank.indices(self._ranks))]
        if not 0 <= rank < self._ranks:
            raise IndexError(rank)
        own = list(self._events)
        for number in self._differing:
            own[number] = _of_rank(own[number], rank)
        return own


def _differs(value: Any) -> bool:
    if isinstance(value, Event | Place):
        return any(_differs(getattr(value, one)) for one in value.__dataclass_fields__)
    if isinstance(value, tuple):
        return any(map(_differs, value))
    return isinstance(value, PerRank)


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, PerRank):
        return value.values[rank]
    if isinstance(value, tuple):
        return tuple(_of_rank(one, rank) for one in value)
    if isinstance(value, Event | Place):
        parts = {one.name: _of_rank(getattr(value, one.name), rank) for one in fields(value)}
        return replace(value, **parts)
    return value
