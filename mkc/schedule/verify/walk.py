"""Runs the kernel of one rank through its memory; what repeats itself is executed once.

At every border of a loop the whole state is compared with that at earlier borders of the same
execution, all places counted from the next item of their stream. When the state repeats, the
iterations from there on do again what they did since: everything that the code asks for (the memory
and the cursors) is the same, as long as no stream comes near its end and the loop does not. So
whole periods are left out, by moving the cursors and what the memory holds, and the last iterations
are executed as they come: the first ones, one period and the last ones stand for all. An iteration
that does what another one has done, in another execution of the loop or in another launch, is left
out by itself (`repeats`).

The slots of a ring are compared from the one to consume next: the code only ever asks for the next
slot or for all of them, so turning a ring changes nothing but names.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from typing import NamedTuple

from mkc.schedule.counted import COUNTED
from mkc.schedule.counted import places
from mkc.schedule.program import ROUNDS
from mkc.schedule.program import Loop
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.verify.arrays import Array
from mkc.schedule.verify.arrays import Semaphores
from mkc.schedule.verify.arrays import receive_arrays
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.edit import Edit
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.memory import Memory
from mkc.schedule.verify.memory import Report
from mkc.schedule.verify.protocol import Kernel
from mkc.schedule.verify.repeats import Amounts
from mkc.schedule.verify.repeats import Iteration
from mkc.schedule.verify.repeats import Position
from mkc.schedule.verify.repeats import Repeats
from mkc.schedule.verify.repeats import advance
from mkc.schedule.verify.repeats import ends
from mkc.schedule.verify.repeats import go_behind
from mkc.schedule.verify.repeats import position_of
from mkc.schedule.verify.repeats import used_of
from mkc.schedule.verify.states import Moves
from mkc.schedule.verify.states import States
from mkc.schedule.verify.states import move


@dataclass(frozen=True, kw_only=True)
class Period:
    """A loop that repeats itself: the state before iteration `first` comes back `length` later."""

    loop: str
    count: int
    first: int
    length: int
    left_out: int


class _Open(NamedTuple):
    """An iteration that is being executed: what it depends on, and what there was before it."""

    key: Any
    before: Position
    given: Any
    problems: int
    asked: bool


@dataclass(kw_only=True)
class _Loop:
    """An execution of a loop: states at its borders so far, with the items used up by then.

    Attributes:
      over: nothing more can be left out.
    """

    name: str
    count: int
    over: bool = False
    open: _Open | None = None
    seen: dict[Any, tuple[int, dict[str, int]]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Walk:
    """One rank and one case.

    Attributes:
      shorten: leave out what repeats itself; without it every iteration is executed.
      repeats: what other launches of the rank have executed.
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
    repeats: Repeats = field(default_factory=Repeats)
    problems: int = 0
    events: int = 0

    def run(self) -> None:
        self.memory = Memory(
            arrays=self.arrays,
            semaphores=self.semaphores,
            elsewhere=receive_arrays(self.program),
            report=self.told,
            uses=self.repeats.uses,
        )
        self.kernel = Kernel(
            program=self.program, rank=self.rank, case=self.case, sink=self, arrays=self.arrays
        )
        self.states = States(numbers=self.repeats.numbers, naming=self.repeats.naming)
        self.inner = set(_loops(self.program.body))
        self.kernel.run()
        self.memory.end()
        planned = self.program.tape.rows * self.case.ran
        if self.kernel.tape.consumed != planned:
            message = f"{self.kernel.tape.consumed} of {planned} rows are consumed"
            self.told("V501", "tape", message)

    # what the kernel calls

    def event(self, event: Event) -> None:
        self.events += 1
        if self.edit is None:
            self.memory.event(event)
            return
        for one in self.edit(self.rank, event):
            self.memory.event(one)

    def problem(self, code: str, phase: str, message: str) -> None:
        self.told(code, phase, message)

    def told(self, code: str, phase: str, message: str) -> None:
        self.problems += 1
        self.report(code, phase, message)

    def enter(self, loop: str, count: int) -> None:
        self.loops.append(_Loop(name=loop, count=count))

    def leave(self) -> None:
        self.close(self.loops.pop())

    def border(self, index: int) -> int:
        if not self.shorten:
            return 0
        loop = self.loops[-1]
        self.close(loop)
        return self.periods_out(loop, index) or self.iteration_out(loop, index)

    def iteration_out(self, loop: _Loop, index: int) -> int:
        """Leaves out the next iteration, if one has been executed that does the same."""
        if loop.name not in self.inner:
            return 0
        kernel, before = self.kernel, position_of(self.kernel)
        ends_with = frozenset(name for name, last in kernel.last.items() if last)
        given, last = self.given(), index == loop.count - 1
        key = (loop.name, last, ends_with, given, self.state(before.used))
        found = self.repeats.find(kernel, key)
        if found is None:
            loop.open = _Open(key, before, given, self.problems, kernel.asked)
            kernel.asked = False
            return 0
        go_behind(kernel, found)
        self.memory = found.memory.copy()
        here, there = used_of(kernel), found.after.used
        self.rename({name: here[name] - there[name] for name in here})
        self.memory.touched.clear()
        self.states.parts, self.states.moves = dict(found.parts), self.names(here)
        self.repeats.left_out += 1
        return 1

    def close(self, loop: _Loop) -> None:
        """The iteration that is being executed has ended; what it has done can be used again."""
        if loop.open is None:
            return
        kernel, began = self.kernel, loop.open
        loop.open = None
        if self.problems == began.problems and self.given() == began.given:
            after = position_of(kernel)
            self.state(after.used)
            iteration = Iteration(
                before=began.before,
                after=after,
                memory=self.memory.copy(),
                parts=dict(self.states.parts),
                asked=kernel.asked,
            )
            self.repeats.keep(kernel, began.key, iteration)
        kernel.asked = kernel.asked or began.asked

    def given(self) -> Any:
        """The numbers of the round by which its phases decide, but for how many are accepted."""
        kernel = self.kernel
        scalars = tuple((name, *numbers) for name, numbers in kernel.rounds.scalars.items())
        return kernel.positions, kernel.real, scalars

    def periods_out(self, loop: _Loop, index: int) -> int:
        """Leaves out whole periods, if the state has come back."""
        scripted = loop.name == ROUNDS and index < len(self.case.positions)
        following = loop.count - 1 - index
        if scripted or loop.over or following < (1 if loop.seen else 2):
            return 0
        used = used_of(self.kernel)
        state = self.state(used)
        if state not in loop.seen:
            loop.seen[state] = (index, used)
            return 0
        first, before = loop.seen[state]
        length = index - first
        step = {name: used[name] - before[name] for name in used}
        most = min([following // length, *self.periods_left(used, step)])
        periods = min([most, *self.equal_stores(used, step, most)])
        loop.over = periods == most
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

    def periods_left(self, used: Mapping[str, int], step: Mapping[str, int]) -> list[int]:
        """How many periods can be left out before a stream looks beyond its end."""
        return [
            (items - used[name] - slots - 1 - step[name]) // step[name]
            for name, items, slots in ends(self.kernel)
            if step[name] > 0
        ]

    def equal_stores(
        self, used: Mapping[str, int], step: Mapping[str, int], most: int
    ) -> Iterator[int]:
        """How many of the coming periods, `most` at most, store taps and blocks where the last one
        did."""
        for phase in self.program.phases():
            if isinstance(phase, COUNTED) and step[phase.counter] > 0:
                at, amount = used[phase.counter], step[phase.counter]
                last = places(phase, at - amount, amount)
                periods = 0
                while periods < most and places(phase, at, amount) == last:
                    periods, at = periods + 1, at + amount
                yield periods

    def state(self, used: Mapping[str, int]) -> Any:
        """Memory and cursors, with every place counted from the next item of its stream."""
        kernel = self.kernel
        rows = self.program.tape.rows
        cursors = (
            (kernel.tape.row - used["tape"]) % rows,
            *((one.layer - one.calls, one.turn, one.tile) for one in kernel.caches.values()),
        )
        return cursors, self.states.state(self.memory, self.names(used))

    def names(self, used: Amounts) -> Moves:
        """Moves to where every place is counted from the next item of its stream."""
        return {**self.moves({name: -amount for name, amount in used.items()}), **self.turns()}

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
        for mixture in kernel.experts.values():
            if mixture.slot:  # mixtures share a ring, one after the other
                turn, name = (-mixture.slot, mixture.ring.slots), mixture.ring.name
                found |= {f"{name}_{part}": turn for part in ("gate_up", "down", "arrived")}
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
            entries = (amounts[plan.name], None)
            found[plan.gate_up_array] = found[plan.down_array] = entries
        found["tape"] = (amounts["tape"], program.tape.rows)
        return found

    def move(self, amounts: Amounts) -> None:
        """Goes on by whole periods: cursors, and what is in memory and on its way there."""
        kernel = self.kernel
        self.rename(amounts)
        advance(kernel, amounts)
        kernel.tape.row += amounts["tape"]
        if self.program.rounds_per_launch > 1:
            kernel.tape.row %= self.program.tape.rows

    def rename(self, amounts: Amounts) -> None:
        moves = self.moves(amounts)
        move(self.memory, {name: one for name, one in moves.items() if one[0]})


def _loops(body: tuple[Phase | Loop, ...]) -> Iterator[str]:
    """Names of all loops of a program."""
    for item in body:
        if isinstance(item, Loop):
            yield item.name
            yield from _loops(item.body)
