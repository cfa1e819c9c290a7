"""Memory under other names, and when two memories are the same.

States are compared at every border of every loop. Between two borders most arrays stay as they are,
so what is known of an array is kept until it is touched, or places that it names move.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from itertools import chain
from typing import Any

from mkc.schedule.verify.events import Index
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.events import Semaphore
from mkc.schedule.verify.memory import Held
from mkc.schedule.verify.memory import Memory

type Move = tuple[int, int | None]

type Moves = Mapping[str, Move]
"""Array or semaphores -> how far their numbers move on, and where they wrap: along the first index,
along the rows of an array without one, along the last index of semaphores."""


def move(memory: Memory, moves: Moves) -> None:
    """Renumbers the blocks of every array of `moves`, and its semaphores."""
    if not moves:
        return
    for name, blocks in memory.held.items():
        named = {one.data.array for block in blocks.values() for one in block if one.data}
        if name in moves or not named.isdisjoint(moves):
            memory.touched.add(name)
            memory.held[name] = {
                _index(name, index, moves): [
                    replace(one, data=_place(one.data, moves)) if one.data else one for one in block
                ]
                for index, block in blocks.items()
            }
    copies = {
        id(one): replace(one, source=_place(one.source, moves), target=_place(one.target, moves))
        for found in memory.started.values()
        for one in found
        if one.source.array in moves or one.target.array in moves
    }
    for name, flying in memory.flying.items():
        memory.flying[name] = [copies.get(id(one), one) for one in flying]
    memory.touched |= memory.started.keys()
    memory.started = {
        _semaphore(name, moves): [copies.get(id(one), one) for one in found]
        for name, found in memory.started.items()
    }
    memory.touched |= memory.started.keys()
    memory.expected = {_semaphore(name, moves): size for name, size in memory.expected.items()}
    memory.counted = {_semaphore(name, moves): size for name, size in memory.counted.items()}


type Part = str | Semaphore
"""An array with what it holds, or a semaphore with the copies that it counts."""


@dataclass(kw_only=True)
class States:
    """Values that are equal for equal memories; where a copy was started does not matter.

    Attributes:
      numbers: what a part may be -> a number that stands for it.
      naming: array or semaphores -> the parts in which it is named, or was.
      parts: numbers of the parts of the last state.
      moves: of the last state.
    """

    numbers: dict[Any, int] = field(default_factory=dict)
    naming: dict[str, set[Part]] = field(default_factory=dict)
    parts: dict[Part, int] = field(default_factory=dict)
    moves: Moves = field(default_factory=dict)

    def state(self, memory: Memory, moves: Moves) -> frozenset[int]:
        """Of the memory under its names behind `moves`."""
        others = (name for name, one in moves.items() if self.moves.get(name) != one)
        gone = (name for name in self.moves if name not in moves)
        changed = memory.touched.union(*(self.naming.get(one, ()) for one in chain(others, gone)))
        memory.touched.clear()
        self.moves = moves
        for part in changed:
            value = self.value(memory, part)
            if value is None:
                self.parts.pop(part, None)
            else:
                self.parts[part] = self.numbers.setdefault(value, len(self.numbers))
        return frozenset(self.parts.values())

    def value(self, memory: Memory, part: Part) -> Any:
        if isinstance(part, str):
            return self.array(memory, part)
        return self.copies(memory, part)

    def array(self, memory: Memory, name: str) -> Any:
        """What will be overwritten by a copy that is under way matters to nobody."""
        blocks = []
        for index, block in memory.held.get(name, {}).items():
            coming = [
                copy.target
                for copy in memory.flying.get(name, ())
                if copy.target.array == name and copy.target.index == index
            ]
            seen = tuple(
                (one.first, one.count, self.data(name, one), one.changed, one.unsaved, one.stale)
                for one in block
                if one.unsaved or not any(_covers(place, one) for place in coming)
            )
            if seen:
                blocks.append((_index(name, index, self.moves), seen))
        self.naming.setdefault(name, set()).add(name)
        return (name, frozenset(blocks)) if blocks else None

    def data(self, name: str, held: Held) -> Place | None:
        if held.data is None:
            return None
        self.naming.setdefault(held.data.array, set()).add(name)
        return _place(held.data, self.moves)

    def copies(self, memory: Memory, semaphore: Semaphore) -> Any:
        """Those that are under way, and the bytes that have been waited for."""
        found = memory.started.get(semaphore)
        if found is None:
            return None
        for one in found:
            for name in (semaphore[0], one.source.array, one.target.array):
                self.naming.setdefault(name, set()).add(semaphore)
        places = tuple(
            (_place(one.source, self.moves), _place(one.target, self.moves)) for one in found
        )
        return _semaphore(semaphore, self.moves), places, memory.counted.get(semaphore, 0)


def _covers(place: Place, held: Held) -> bool:
    return place.first <= held.first and held.end <= place.first + place.count


def _place(place: Place, moves: Moves) -> Place:
    found = moves.get(place.array)
    return place.moved(*found) if found else place


def _index(name: str, index: Index, moves: Moves) -> Index:
    return _place(Place(array=name, index=index), moves).index if index else index


def _semaphore(semaphore: Semaphore, moves: Moves) -> Semaphore:
    name, index = semaphore
    if name not in moves:
        return semaphore
    amount, modulo = moves[name]
    assert modulo is not None, f"{name} has no end"
    return name, (*index[:-1], (index[-1] + amount) % modulo)
