"""What the walks of drafters do with their tables, as events; part of `protocol_rounds`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import View
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.verify.arrays import BLOCK_ROWS
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.events import Semaphore

if TYPE_CHECKING:
    from mkc.schedule.verify.protocol import Kernel

ROUTINE = "selector_walk"
IDS, PREVIOUS, CANDIDATES = 0, 1, 2  # semaphores; candidates have two, for rows in turn


@dataclass(frozen=True, kw_only=True)
class Walk:
    """The walk of one phase. Every token stands for any: its block of rows is the first one."""

    kernel: Kernel
    phase: SelectorWalkPhase

    def semaphore(self, number: int) -> Semaphore:
        return f"{self.phase.id}_sems", (number,)

    def fetch_ids(self) -> None:
        """Whole registers of ids go to where addresses are computed."""
        kernel, ids = self.kernel, self.phase.ids
        kernel.load(ROUTINE, ids)
        lanes = View(buffer=ids.buffer, start=ids.start, width=VECTOR_LANES)
        target = Place(array=f"{self.phase.id}_candidate_ids")
        kernel.start(ROUTINE, kernel.lanes(lanes), target, self.semaphore(IDS))
        kernel.wait(ROUTINE, self.semaphore(IDS), kernel.size(target))

    def candidates(self, row: int, *, wait: bool) -> None:
        """The blocks of all sequences' candidates of a row."""
        semaphore = self.semaphore(CANDIDATES + row % 2)
        for number in range(self.kernel.program.batch * self.phase.k):
            self.block(self.phase.successor, self.candidate(row, number), semaphore, wait=wait)

    def previous(self, *, wait: bool) -> None:
        """The blocks of all sequences' choices before."""
        for sequence in range(self.kernel.program.batch):
            place = self.chosen(sequence)
            self.block(self.phase.predecessor, place, self.semaphore(PREVIOUS), wait=wait)

    def choose(self, sequence: int, row: int) -> None:
        kernel, phase = self.kernel, self.phase
        for view in (phase.hidden, phase.values):
            kernel.load(ROUTINE, view)
        place = self.chosen(sequence)
        kernel.read(ROUTINE, place, Place(array=phase.predecessor, count=BLOCK_ROWS))
        for number in range(sequence * phase.k, (sequence + 1) * phase.k):
            data = Place(array=phase.successor, count=BLOCK_ROWS)
            kernel.read(ROUTINE, self.candidate(row, number), data)

    def candidate(self, row: int, number: int) -> Place:
        return Place(
            array=f"{self.phase.id}_candidates",
            index=(row % 2,),
            first=number * BLOCK_ROWS,
            count=BLOCK_ROWS,
        )

    def chosen(self, sequence: int) -> Place:
        return Place(array=f"{self.phase.id}_previous", index=(sequence,), count=BLOCK_ROWS)

    def block(self, table: str, place: Place, semaphore: Semaphore, *, wait: bool) -> None:
        if wait:
            self.kernel.wait(ROUTINE, semaphore, self.kernel.size(place))
            return
        source = Place(array=table, count=BLOCK_ROWS)
        self.kernel.start(ROUTINE, source, place, semaphore)


MARKOV = "markov_walk"


@dataclass(frozen=True, kw_only=True)
class MarkovWalk:
    """A walk that corrects logits. Every token stands for any, as in `Walk`."""

    kernel: Kernel
    phase: MarkovWalkPhase

    def run(self, rows: int) -> None:
        kernel, phase = self.kernel, self.phase
        if phase.confidence is not None:
            kernel.stream_read(MARKOV, kernel.streams[phase.page])
        scores = Place(array=f"{phase.id}_scores")
        kernel.write(MARKOV, scores)
        self.judge()
        for row in range(1, rows):
            self.previous(wait=False)
            self.previous(wait=True)
            for sequence in range(kernel.program.batch):
                data = Place(array=phase.predecessor, count=BLOCK_ROWS)
                kernel.read(MARKOV, self.place(sequence), data)
            for view in (phase.logits, phase.hidden):
                kernel.load(MARKOV, view)
            self.judge()
            kernel.read(MARKOV, scores)
            kernel.stream_read(MARKOV, kernel.streams[phase.successor])
            kernel.write(MARKOV, scores)
            if phase.exchanges:
                kernel.exchanges.best(phase.exchanges[(row - 1) % len(phase.exchanges)])

    def judge(self) -> None:
        """Confidences are stored row by row."""
        if self.phase.confidence is not None:
            self.kernel.store_row(MARKOV, self.phase.confidence)

    def previous(self, *, wait: bool) -> None:
        """The blocks of all sequences' choices before."""
        kernel, semaphore = self.kernel, (f"{self.phase.id}_sems", (0,))
        for sequence in range(kernel.program.batch):
            place = self.place(sequence)
            if wait:
                kernel.wait(MARKOV, semaphore, kernel.size(place))
            else:
                source = Place(array=self.phase.predecessor, count=BLOCK_ROWS)
                kernel.start(MARKOV, source, place, semaphore)

    def place(self, sequence: int) -> Place:
        return Place(array=f"{self.phase.id}_previous", index=(sequence,), count=BLOCK_ROWS)
