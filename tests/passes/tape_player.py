"""Plays the tape of a program: consumes every load and starts every refill, loop by loop.

The player knows the rules of the ring and nothing of how the refills were derived: slots are used
in turn, a load goes into the slot that was consumed last, loads are started in tape order, and a
load that is consumed must be the next one of the tape and have the size that the matmul reads.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from dataclasses import field

from mkc.schedule.program import ROUNDS
from mkc.schedule.program import Guard
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program


class TapeError(AssertionError):
    """The tape and the refills do not agree."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Tape rows `first` .. `first + rows`, counted on from round to round, in a slot."""

    first: int
    rows: int
    slot: int


@dataclass(kw_only=True)
class Player:
    """Attributes:
    rounds: how often the tape is to be played; it wraps from the last load to the first.
    ring: loads that were started and not consumed, oldest first.
    started, consumed: tape rows so far.
    loops: loop name -> (iteration, count), of the loops around the current phase.
    """

    program: Program
    rounds: int = 1
    ring: deque[Load] = field(default_factory=deque)
    started: int = 0
    loads: int = 0
    consumed: int = 0
    loops: dict[str, tuple[int, int]] = field(default_factory=dict)
    at: str = "prologue"

    def play(self, stop_after: int | None = None) -> None:
        """Raises `TapeError` at the first load that goes wrong.

        Args:
          stop_after: rounds after which all sequences have stopped, None for all rounds. The loads
            of the round that does not come are then those of the prologue, and are waited for.
        """
        ran = stop_after or self.rounds
        for rows in self.program.tape.prologue:
            self.start(rows)
        for index in range(ran):
            if self.program.rounds_per_launch > 1:
                self.loops[ROUNDS] = (index, self.rounds)
            self.body(self.program.body)
            if self.consumed != self.program.tape.rows * (index + 1):
                self.fail(f"{self.consumed} rows consumed of {self.program.tape.rows}")
        self.at = "end"
        unused = self.program.tape.prologue if ran < self.rounds else ()
        for rows in unused:
            self.consume(rows)
        if self.ring:
            self.fail(f"{len(self.ring)} loads were started and never consumed")

    def fail(self, problem: str) -> None:
        raise TapeError(f"{self.at} in {self.loops}: {problem}")

    def body(self, body: tuple[Phase | Loop, ...]) -> None:
        for item in body:
            if isinstance(item, Loop):
                for iteration in range(item.count):
                    self.loops[item.name] = (iteration, item.count)
                    self.body(item.body)
                del self.loops[item.name]
            elif isinstance(item, MatmulPhase):
                self.at = item.id
                self.matmul(item)

    def matmul(self, phase: MatmulPhase) -> None:
        """Consumes K rows of every column block, in the order of the runs."""
        next_step = 0
        for run in phase.runs:
            if run.first != next_step or len(run.refill) != phase.loads_per_step:
                self.fail(f"step {next_step} is followed by a run from {run.first}")
            next_step += run.count
            sizes = {self.step_rows(phase, step) for step in range(run.first, next_step)}
            if len(sizes) != 1:
                self.fail(f"steps of {sizes} rows share a loop")
            for step in range(run.first, next_step):
                for guards in run.refill:
                    self.consume(self.step_rows(phase, step) // phase.loads_per_step)
                    rows = self.chosen(guards)
                    if rows is not None:
                        self.start(rows)
        if next_step != -(-phase.blocks // phase.blocks_per_step):
            self.fail(f"{next_step} steps")

    def step_rows(self, phase: MatmulPhase, step: int) -> int:
        """Tape rows of one output step: its column blocks of K rows each."""
        left = phase.blocks - step * phase.blocks_per_step
        return phase.K * min(left, phase.blocks_per_step)

    def start(self, rows: int) -> None:
        tape = self.program.tape
        if len(self.ring) == tape.slots:
            self.fail("a load is started into a slot that is still to be consumed")
        if not 0 < rows <= tape.slot_rows:
            self.fail(f"a load of {rows} rows in slots of {tape.slot_rows}")
        here = self.started % tape.rows
        if here + rows > tape.rows or self.started >= tape.rows * self.rounds:
            self.fail("a load behind the end of the tape")
        self.ring.append(Load(first=self.started, rows=rows, slot=self.loads % tape.slots))
        self.started += rows
        self.loads += 1

    def consume(self, rows: int) -> None:
        if not self.ring:
            self.fail(f"nothing in flight where {rows} rows are needed")
        load = self.ring.popleft()
        if load.first != self.consumed or load.rows != rows:
            self.fail(f"{load} arrived, rows {self.consumed} to {self.consumed + rows} are needed")
        self.consumed += rows

    def chosen(self, guards: tuple[Guard, ...]) -> int | None:
        """Rows of the one guard that holds now."""
        holding = [one for one in guards if self.holds(one)]
        if len(holding) != 1:
            self.fail(f"{len(holding)} of the guards {guards} hold")
        return holding[0].rows

    def holds(self, guard: Guard) -> bool:
        ended = all(self.is_last(name) for name in guard.ended)
        return ended and (guard.loop is None or not self.is_last(guard.loop))

    def is_last(self, loop: str) -> bool:
        if loop not in self.loops:
            self.fail(f"a guard asks for the loop {loop}, which does not run")
        iteration, count = self.loops[loop]
        return iteration == count - 1
