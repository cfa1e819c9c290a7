"""Iterations that do what an executed one has done: they are not executed again.

What an iteration does depends on the state before it, on which loops around it end with it, on the
numbers that the round was given, and on how far the streams are from their ends. Where all of these
are the same, it reports nothing if the other one reported nothing, and leaves the same state, so
many items further on. That holds for other iterations, other executions of the loop and other
launches alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import TYPE_CHECKING
from typing import Any

from mkc.schedule.counted import COUNTED
from mkc.schedule.counted import places
from mkc.schedule.verify.events import Semaphore
from mkc.schedule.verify.memory import Memory
from mkc.schedule.verify.states import Part

if TYPE_CHECKING:
    from mkc.schedule.verify.protocol import Kernel

type Amounts = Mapping[str, int]
"""Items by stream; rows of the tape, layers of a cache, experts, executions of taps."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a kernel stands: items used up, the next row of the tape, slots, tiles of caches."""

    used: Amounts
    row: int
    slots: Mapping[str, int]
    tiles: Mapping[str, tuple[int, int, int]]  # layers ahead, turn, tile


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """An executed iteration.

    Attributes:
      before, after: where the kernel stood.
      memory, parts: behind it; parts of its state, see `States`.
      asked: it has asked how many rows are accepted.
    """

    before: Position
    after: Position
    memory: Memory
    parts: Mapping[Part, int]
    asked: bool

    def step(self) -> dict[str, int]:
        return {name: used - self.before.used[name] for name, used in self.after.used.items()}


@dataclass(kw_only=True)
class Repeats:
    """What one rank has executed, in all of its launches.

    Attributes:
      executed: by what an iteration depends on.
      numbers, naming: of parts of states, see `States`.
      uses: what each semaphore counts, of all launches.
      left_out: iterations that were not executed again.
    """

    executed: dict[Any, Iteration] = field(default_factory=dict)
    numbers: dict[Any, int] = field(default_factory=dict)
    naming: dict[str, set[Part]] = field(default_factory=dict)
    uses: dict[Semaphore, str] = field(default_factory=dict)
    left_out: int = 0

    def find(self, kernel: Kernel, key: Any) -> Iteration | None:
        """An executed iteration that does what the next one does."""
        for accepted in (None, kernel.counts):
            found = self.executed.get((key, accepted))
            if found is not None and all(_same_ends(kernel, found)):
                return found
        return None

    def keep(self, kernel: Kernel, key: Any, iteration: Iteration) -> None:
        accepted = kernel.counts if iteration.asked else None
        self.executed.setdefault((key, accepted), iteration)


def _same_ends(kernel: Kernel, found: Iteration) -> Iterator[bool]:
    """Everything is as far from its end as it was, or both times far enough."""
    here, there, step = used_of(kernel), found.before.used, found.step()
    rows = kernel.program.tape.rows
    last = max(kernel.tape.row, found.before.row) + found.after.row - found.before.row
    yield kernel.tape.row == found.before.row or (
        found.after.row >= found.before.row and last <= rows
    )
    for name, items, ahead in ends(kernel):
        inside = items - max(here[name], there[name]) >= step[name] + ahead
        inside = inside and min(here[name], there[name]) > 0
        yield here[name] == there[name] or step[name] == 0 or inside
    for phase in kernel.program.phases():
        if isinstance(phase, COUNTED):
            amount = step[phase.counter]
            now, then = (places(phase, used[phase.counter], amount) for used in (here, there))
            yield now == then


def ends(kernel: Kernel) -> Iterator[tuple[str, int, int]]:
    """Name, items and slots of everything whose items are fetched ahead."""
    for name, stream in kernel.streams.items():
        yield name, stream.plan.items, stream.plan.slots
    for name, cache in kernel.caches.items():
        yield name, cache.plan.layers, cache.plan.slots
    for name, mixture in kernel.experts.items():
        yield name, mixture.end, mixture.ring.slots


def used_of(kernel: Kernel) -> dict[str, int]:
    """Items used up so far, by stream; rows of the tape, layers of a cache, experts."""
    found = {name: one.item for name, one in kernel.streams.items()}
    found |= {name: one.calls for name, one in kernel.caches.items()}
    found |= {name: one.entry for name, one in kernel.experts.items()}
    found |= kernel.rounds.executed
    return {**found, "tape": kernel.tape.consumed}


def position_of(kernel: Kernel) -> Position:
    slots = {name: one.slot for name, one in kernel.streams.items()}
    slots |= {name: one.slot for name, one in kernel.caches.items()}
    return Position(
        used=used_of(kernel),
        row=kernel.tape.row,
        slots={**slots, "tape": kernel.tape.slot},
        tiles={
            name: (one.layer - one.calls, one.turn, one.tile) for name, one in kernel.caches.items()
        },
    )


def advance(kernel: Kernel, amounts: Amounts) -> None:
    """Goes on by so many items."""
    for name, stream in kernel.streams.items():
        stream.item += amounts[name]
    for name, cache in kernel.caches.items():
        cache.calls += amounts[name]
        cache.layer += amounts[name]
    for name, mixture in kernel.experts.items():
        mixture.entry += amounts[name]
    for name in kernel.rounds.executed:
        kernel.rounds.executed[name] += amounts[name]
    kernel.tape.consumed += amounts["tape"]


def go_behind(kernel: Kernel, iteration: Iteration) -> None:
    """As if the kernel had executed an iteration that does the same, in slots of the same names."""
    advance(kernel, iteration.step())
    after = iteration.after
    for name, stream in kernel.streams.items():
        stream.slot = after.slots[name]
    for name, cache in kernel.caches.items():
        ahead, cache.turn, cache.tile = after.tiles[name]
        cache.slot, cache.layer = after.slots[name], cache.calls + ahead
    kernel.tape.slot = after.slots["tape"]
    kernel.tape.row += after.row - iteration.before.row
    kernel.asked = kernel.asked or iteration.asked
