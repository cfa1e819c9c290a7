"""What the tape of weights does, as events; part of `protocol`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkc.schedule.program import Guard
from mkc.schedule.verify.events import Place

if TYPE_CHECKING:
    from mkc.schedule.verify.protocol import Kernel


@dataclass(kw_only=True)
class Tape:
    """Where the tape stands: the `row` of the next load to start, and rows `consumed` so far."""

    kernel: Kernel
    slot: int = 0
    row: int = 0
    consumed: int = 0

    def load(self, routine: str, rows: int) -> None:
        slot = self.slot
        self.kernel.start(
            routine,
            Place(array="tape", first=self.row, count=rows),
            Place(array="tape_ring", index=(slot,), count=rows),
            ("tape_sems", (slot,)),
        )
        self.row += rows

    def move(self) -> None:
        self.slot = (self.slot + 1) % self.kernel.program.tape.slots
        if self.kernel.program.rounds_per_launch > 1 and self.row == self.kernel.program.tape.rows:
            self.row = 0

    def prologue(self) -> None:
        for rows in self.kernel.program.tape.prologue[: self.kernel.program.tape.slots]:
            self.load("tape_prologue", rows)
            self.move()
        self.slot = 0

    def wait(self, rows: int) -> None:
        slot = self.slot
        size = self.kernel.size(Place(array="tape_ring", index=(slot,), count=rows))
        self.kernel.wait("tape_wait", ("tape_sems", (slot,)), size)

    def read(self, rows: int) -> None:
        """Weights are on the tape in the order of their use."""
        place = Place(array="tape_ring", index=(self.slot,), count=rows)
        data = Place(array="tape", first=self.consumed % self.kernel.program.tape.rows, count=rows)
        self.kernel.read("matmul", place, data)
        self.consumed += rows

    def refill(self, guards: tuple[Guard, ...]) -> None:
        rows = self.refill_rows(guards)
        if rows is not None:
            self.load("refill", rows)
        self.move()

    def refill_rows(self, guards: tuple[Guard, ...]) -> int | None:
        """The first guard whose loop goes on; the last one stands for all others."""
        for guard in guards[:-1]:
            if guard.loop is None or guard.loop not in self.kernel.last:
                message = f"a refill asks for the loop {guard.loop}, which is not around it"
                self.kernel.sink.problem("V502", self.kernel.at, message)
            elif not self.kernel.last[guard.loop]:
                return guard.rows
        return guards[-1].rows

    def drain(self) -> None:
        for rows in self.kernel.program.tape.prologue:
            slot = self.slot
            size = self.kernel.size(Place(array="tape_ring", index=(slot,), count=rows))
            self.kernel.wait("tape_drain", ("tape_sems", (slot,)), size)
            self.slot = (slot + 1) % self.kernel.program.tape.slots
