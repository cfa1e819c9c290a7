"""Runs the kernel of one rank through its memory; loops that repeat themselves are cut short.

At every border of a loop the whole state is compared with that at earlier borders of the same
execution, all places counted from the next item of their stream. When the state repeats, the
iterations from there on do again what they did since: everything that the code asks for (the memory
and the cursors) is the same, as long as no stream comes near its end and the loop does not. So
whole periods are left out, by moving the cursors and what the memory holds, and the last iterations
are executed as they come: the first ones, one period and the last ones stand for all.

The slots of a ring are compared from the one to consume next: the code only ever asks for the next
slot or for all of them, so turning a ring changes nothing but names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any

from mkc.schedule.program import ROUNDS
from mkc.schedule.program import Program
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.verify.arrays import Array
from mkc.schedule.verify.arrays import Semaphores
from mkc.schedule.verify.arrays import receive_arrays
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.edit import Edit
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.memory import Memory
from mkc.schedule.verify.memory import Moves
from mkc.schedule.verify.memory import Report
from mkc.schedule.verify.protocol import Kernel


@dataclass(frozen=True, kw_only=True)
class Period:
    """A loop that repeats itself: the state before iteration `first` comes back `length` later."""

    loop: str
    count: int
    first: int
    length: int
    left_out: int


@dataclass(kw_only=True)
class _Loop:
    """An execution of a loop: states at its borders so far, with the items used up by then."""

    name: str
    count: int
    seen: dict[Any, tuple[int, dict[str, int]]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Walk:
    """One rank and one case.

    Attributes:
      shorten: leave out whole periods; without it every iteration is executed.
    """

    program: Program
    case: Case
    arrays: dict[str, Array]
    semaphores: Mapping[str, Semaphores]
    report: Report
    edit: Edit | None = None
    shorten: bool = True
    rank: int = 0
    periods: list[Period] = field(default_factory=list)
    loops: list[_Loop] = field(default_factory=list)
    events: int = 0

    def run(self) -> None:
        self.memory = Memory(
            arrays=self.arrays,
            semaphores=self.semaphores,
            elsewhere=receive_arrays(self.program),
            report=self.report,
        )
        self.kernel = Kernel(
            program=self.program, rank=self.rank, case=self.case, sink=self, arrays=self.arrays
        )
        self.kernel.run()
        self.memory.end()
        planned = self.program.tape.rows * self.case.ran
        if self.kernel.tape.consumed != planned:
            message = f"{self.kernel.tape.consumed} of {planned} rows are consumed"
            self.report("V501", "tape", message)

    # what the kernel calls

    def event(self, event: Event) -> None:
        self.events += 1
        if self.edit is None:
            self.memory.event(event)
            return
        for one in self.edit(self.rank, event):
            self.memory.event(one)

    def problem(self, code: str, phase: str, message: str) -> None:
        self.report(code, phase, message)

    def enter(self, loop: str, count: int) -> None:
        self.loops.append(_Loop(name=loop, count=count))

    def leave(self) -> None:
        self.loops.pop()

    def border(self, index: int) -> int:
        loop = self.loops[-1]
        scripted = loop.name == ROUNDS and index < len(self.case.positions)
        if not self.shorten or scripted or loop.count - index < 2:
            return 0
        used = self.used()
        state = self.state(used)
        if state not in loop.seen:
            loop.seen[state] = (index, used)
            return 0
        first, before = loop.seen[state]
        length = index - first
        step = {name: used[name] - before[name] for name in used}
        left = [*self.periods_left(used, step), *self.equal_taps(used, step)]
        periods = min([(loop.count - 1 - index) // length, *left])
        if periods <= 0:
            return 0
        self.move({name: periods * amount for name, amount in step.items()})
        self.periods.append(
            Period(
                loop=loop.name,
                count=loop.count,
                first=first,
                length=length,
                left_out=periods * length,
            )
        )
        loop.seen.clear()
        return periods * length

    def used(self) -> dict[str, int]:
        """Items used up so far, by stream; rows of the tape, layers of a cache."""
        kernel = self.kernel
        found = {name: one.item for name, one in kernel.streams.items()}
        found |= {name: one.calls for name, one in kernel.caches.items()}
        found |= {name: one.layer for name, one in kernel.experts.items()}
        found |= kernel.rounds.executed
        return {**found, "tape": kernel.tape.consumed}

    def periods_left(self, used: Mapping[str, int], step: Mapping[str, int]) -> list[int]:
        """How many periods can be left out before a stream looks beyond its end."""
        plans = {one.name: (one.items, one.slots) for one in self.program.streams}
        plans |= {one.name: (one.layers, one.slots) for one in self.program.caches}
        plans |= {one.name: (one.layers, 0) for one in self.program.experts}
        return [
            (items - used[name] - slots - 1 - step[name]) // step[name]
            for name, (items, slots) in plans.items()
            if step[name] > 0
        ]

    def equal_taps(self, used: Mapping[str, int], step: Mapping[str, int]) -> list[int]:
        """How many of the coming periods store their taps where the last one did."""
        found = []
        for phase in self.program.phases():
            if isinstance(phase, TapPhase) and step[phase.counter] > 0:
                at, amount = used[phase.counter], step[phase.counter]
                last = phase.places[at - amount : at]
                periods = 0
                while len(last) == amount and phase.places[at : at + amount] == last:
                    periods, at = periods + 1, at + amount
                found.append(periods)
        return found

    def state(self, used: Mapping[str, int]) -> Any:
        """Memory and cursors, with every place counted from the next item of its stream."""
        kernel = self.kernel
        rows = self.program.tape.rows
        cursors = (
            (kernel.tape.row - used["tape"]) % rows,
            *((one.layer - one.calls, one.turn, one.tile) for one in kernel.caches.values()),
        )
        moves = self.moves({name: -amount for name, amount in used.items()})
        return cursors, self.memory.moved({**moves, **self.turns()}).signature()

    def turns(self) -> Moves:
        """Turns every ring so that the slot to consume next is the first one."""
        kernel = self.kernel
        tape = (-kernel.tape.slot, self.program.tape.slots)
        found: dict[str, tuple[int, int | None]] = {"tape_ring": tape, "tape_sems": tape}
        for name, stream in kernel.streams.items():
            turn = (-stream.slot, stream.plan.slots)
            found |= {f"{name}_{part}": turn for part in ("ring", "arrived", "written")}
        for name, cache in kernel.caches.items():
            turn = (-cache.slot, cache.plan.slots)
            found |= {f"{name}_{part}": turn for part in ("key_ring", "value_ring", "arrived")}
        return found

    def moves(self, amounts: Mapping[str, int]) -> dict[str, tuple[int, int | None]]:
        """Array -> how far its places move, and where they wrap."""
        program = self.program
        found: dict[str, tuple[int, int | None]] = {}
        for stream in program.streams:
            found[stream.array] = (amounts[stream.name], None)
        for cache in program.caches:
            found[cache.key_array] = found[cache.value_array] = (amounts[cache.name], None)
        for plan in program.experts:
            entries = (amounts[plan.name] * plan.local, None)
            found[plan.gate_up_array] = found[plan.down_array] = entries
        found["tape"] = (amounts["tape"], program.tape.rows)
        return found

    def move(self, amounts: Mapping[str, int]) -> None:
        """Goes on by whole periods: cursors, and what is in memory and on its way there."""
        kernel = self.kernel
        self.memory = self.memory.moved(self.moves(amounts))
        for name, stream in kernel.streams.items():
            stream.item += amounts[name]
        for name, cache in kernel.caches.items():
            cache.calls += amounts[name]
            cache.layer += amounts[name]
        for name, mixture in kernel.experts.items():
            mixture.layer += amounts[name]
        for name in kernel.rounds.executed:
            kernel.rounds.executed[name] += amounts[name]
        kernel.tape.consumed += amounts["tape"]
        kernel.tape.row += amounts["tape"]
        if self.program.rounds_per_launch > 1:
            kernel.tape.row %= self.program.tape.rows
