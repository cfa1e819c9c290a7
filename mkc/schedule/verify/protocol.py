"""What the code generated for a program does, as events: the one place that says it.

Every method here mirrors a function of the generated kernel's support module, or what the generator
writes for a phase. `tests/schedule/verify/test_protocol.py` traces real kernels and compares: the
same copies, waits, signals and accesses in the same order. Scalars in SMEM are left out, because
nothing reaches them but the instruction stream itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from typing import Any
from typing import Protocol as Interface

from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.mixing_phases import ClearBlocksPhase
from mkc.schedule.mixing_phases import LatentAttentionPhase
from mkc.schedule.mixing_phases import StoreBlockPhase
from mkc.schedule.program import ROUNDS
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import Buffer
from mkc.schedule.program import DeltaRulePhase
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.program import StreamAdvancePhase
from mkc.schedule.program import StreamWaitPhase
from mkc.schedule.program import TileRun
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import View
from mkc.schedule.stream_plans import StreamPlan
from mkc.schedule.verify.arrays import BLOCK_ROWS
from mkc.schedule.verify.arrays import Array
from mkc.schedule.verify.arrays import arrays_of
from mkc.schedule.verify.caches import Attention
from mkc.schedule.verify.caches import CacheCursor
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Rest
from mkc.schedule.verify.events import Semaphore
from mkc.schedule.verify.events import Start
from mkc.schedule.verify.events import Wait
from mkc.schedule.verify.events import Write
from mkc.schedule.verify.exchanges import Exchanges
from mkc.schedule.verify.experts import ExpertCursor
from mkc.schedule.verify.experts import Experts
from mkc.schedule.verify.latent_caches import LatentAttention
from mkc.schedule.verify.protocol_rounds import Rounds
from mkc.schedule.verify.rows_caches import RowsAttention
from mkc.schedule.verify.tape import Tape


class Sink(Interface):
    """Takes the events, and may shorten loops."""

    def event(self, event: Event) -> None: ...

    def enter(self, loop: str, count: int) -> None:
        """A loop of `count` iterations begins."""

    def border(self, index: int) -> int:
        """Before iteration `index` of the innermost loop; returns how many to leave out."""

    def leave(self) -> None:
        """The innermost loop has ended."""

    def problem(self, code: str, phase: str, message: str) -> None:
        """Something that the generated code cannot be written for."""


@dataclass(kw_only=True)
class StreamCursor:
    """Where a stream stands: `item` is the next one to consume, in `slot`."""

    plan: StreamPlan
    slot: int = 0
    item: int = 0


@dataclass(kw_only=True)
class Kernel:
    """Executes the kernel of one rank, without arithmetic.

    Attributes:
      rank: which one; all run the same program.
      last: loop name -> the iteration is the last one, of the loops around the current phase.
      positions: of the round, of every sequence its first one.
      real, counts: of a round of a scheme: rows of every sequence, and how many are accepted.
      asked: somebody has asked for `accepted` since this was false.
    """

    program: Program
    rank: int
    case: Case
    sink: Sink
    arrays: dict[str, Array] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    streams: dict[str, StreamCursor] = field(default_factory=dict)
    caches: dict[str, CacheCursor] = field(default_factory=dict)
    experts: dict[str, ExpertCursor] = field(default_factory=dict)
    last: dict[str, bool] = field(default_factory=dict)
    positions: tuple[int, ...] = ()
    real: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    asked: bool = False
    at: str = "prologue"

    def __post_init__(self) -> None:
        self.arrays = self.arrays or arrays_of(self.program)
        self.buffers = {one.name: one for one in self.program.buffers}
        self.streams = {one.name: StreamCursor(plan=one) for one in self.program.streams}
        self.caches = {one.name: CacheCursor(plan=one) for one in self.program.caches}
        rings = {one.name: one for one in self.program.expert_rings}
        for plan in self.program.experts:
            self.experts[plan.name] = ExpertCursor(plan=plan, ring=rings[plan.ring])
        self.tape = Tape(kernel=self)
        self.mixtures = Experts(kernel=self)
        self.attention = Attention(kernel=self)
        self.exchanges = Exchanges(kernel=self)
        self.rounds = Rounds(kernel=self)
        self.rows_attention = RowsAttention(kernel=self)
        self.latent_attention = LatentAttention(kernel=self)

    @property
    def accepted(self) -> tuple[int, ...]:
        """How many rows of every sequence are accepted in this round."""
        self.asked = True
        return self.counts

    # events

    def size(self, place: Place) -> int:
        return place.count * self.arrays[place.array].unit_bytes

    def start(self, routine: str, source: Place, target: Place, semaphore: Semaphore) -> None:
        self.sink.event(
            Start(phase=self.at, routine=routine, source=source, target=target, semaphore=semaphore)
        )

    def wait(self, routine: str, semaphore: Semaphore, size: int) -> None:
        self.sink.event(Wait(phase=self.at, routine=routine, semaphore=semaphore, size=size))

    def read(
        self, routine: str, place: Place, data: Place | None = None, sender: int | None = None
    ) -> None:
        self.sink.event(Read(phase=self.at, routine=routine, place=place, data=data, sender=sender))

    def write(
        self,
        routine: str,
        place: Place,
        data: Place | None = None,
        *,
        saved: bool = False,
        same: bool = False,
    ) -> None:
        self.sink.event(
            Write(phase=self.at, routine=routine, place=place, data=data, saved=saved, same=same)
        )

    def lanes(self, view: View) -> Place:
        """The lanes of a view in its region."""
        return Place(array=self.buffers[view.buffer].region, first=view.start, count=view.width)

    def load(self, routine: str, view: View) -> None:
        data = Place(array=view.buffer, first=view.start, count=view.width)
        self.read(routine, self.lanes(view), data)

    def store(self, routine: str, view: View) -> None:
        data = Place(array=view.buffer, first=view.start, count=view.width)
        self.write(routine, self.lanes(view), data)

    def store_row(self, routine: str, view: View) -> None:
        """Stores one row, by a choice between it and whatever all rows hold."""
        self.read(routine, self.lanes(view))
        self.store(routine, view)

    def rest(self, routine: str, view: View) -> None:
        data = Place(array=view.buffer, first=view.start, count=view.width)
        place = self.lanes(view)
        self.sink.event(Rest(phase=self.at, routine=routine, place=place, data=data))

    # the whole launch

    def run(self) -> None:
        """`step(m)`: one step, or the rounds of one launch."""
        self.rounds.fetch_rows()
        self.tape.prologue()
        many = self.program.rounds_per_launch > 1
        if self.program.round is None and not many:
            self.positions = self.case.at(0)
            self.start_streams()
            self.exchanges.barrier("entry_barrier")
            self.body(self.program.body)
            self.end_streams()
            return
        self.exchanges.barrier("entry_barrier")
        self.sink.enter(ROUNDS, self.case.ran)
        index = 0
        while index < self.case.ran:
            index += self.sink.border(index)
            self.last = {ROUNDS: index == self.case.rounds - 1} if many else {}
            self.begin_round(index)
            self.start_streams()
            self.body(self.program.body)
            self.end_streams()
            index += 1
        self.sink.leave()
        self.at = "end"
        if self.case.ran < self.case.rounds:
            self.tape.drain()
        self.rounds.save_rows()

    def begin_round(self, index: int) -> None:
        self.positions = self.case.at(index)
        if self.program.round is not None:
            self.real, self.counts = self.case.rows_at(index), self.case.counts_at(index)
            self.rounds.begin(self.case.kept_at(index))

    def tiles(self, cache: str) -> Attention | RowsAttention:
        """Who fetches the tiles of a cache."""
        phases = self.program.phases()
        if any(isinstance(one, LatentAttentionPhase) and one.cache == cache for one in phases):
            return self.latent_attention
        return self.attention if self.program.round is None else self.rows_attention

    def start_streams(self) -> None:
        self.at = "prologue"
        for name in self.streams:
            self.stream_prologue(name)
        for name in self.caches:
            self.tiles(name).prologue(name)
        for mixture in self.experts.values():
            mixture.go_to(0)
        for operand in self.program.operands:
            if operand.role == "token_masks":
                source, target = Place(array=operand.name), Place(array=f"{operand.name}_block")
                self.start("fetch_masks", source, target, (f"{operand.name}_sem", (0,)))

    def end_streams(self) -> None:
        self.at = "end"
        for cursor in self.streams.values():
            if cursor.plan.writes_back:
                self.stream_drain(cursor)
        for name, cache in self.caches.items():
            self.tiles(name).drain(cache)
        logits = self.program.logits
        if logits is not None:
            self.load("copy_out", logits)
            buffer = self.buffers[logits.buffer]
            whole = View(buffer=buffer.name, start=0, width=buffer.shape[1])
            target = Place(array="logits", count=buffer.shape[1])
            self.start("copy_out", self.lanes(whole), target, ("logits_sem", (0,)))
            self.wait("copy_out", ("logits_sem", (0,)), self.size(target))
        if self.program.round is not None:
            self.rounds.end()
        self.check_used_up()

    def check_used_up(self) -> None:
        """The streams have no drain for items that nobody consumed: the counts must agree."""
        used = {name: (one.item, one.plan.items) for name, one in self.streams.items()}
        used |= {name: (one.calls, one.plan.layers) for name, one in self.caches.items()}
        used |= {name: (one.layer, one.plan.layers) for name, one in self.experts.items()}
        for name, (found, planned) in used.items():
            if found != planned:
                self.sink.problem("V501", name, f"{found} of {planned} items are consumed")

    def body(self, body: tuple[Phase | Loop, ...]) -> None:
        for item in body:
            if isinstance(item, Loop):
                self.loop(item)
            else:
                self.at = item.id
                self.phase(item)

    def loop(self, loop: Loop) -> None:
        outer = self.last
        self.sink.enter(loop.name, loop.count)
        index = 0
        while index < loop.count:
            left_out = self.sink.border(index)
            if left_out:
                index += left_out
                continue
            self.last = {**outer, loop.name: index == loop.count - 1}
            self.body(loop.body)
            index += 1
        self.sink.leave()
        self.last = outer

    def phase(self, phase: Phase) -> None:
        known: dict[type[Phase], Callable[[Any], None]] = {
            EmbedPhase: self.embed,
            MatmulPhase: self.matmul,
            NarrowMatmulPhase: self.narrow,
            VectorPhase: self.vector,
            DeltaRulePhase: self.delta_rule,
            AttentionPhase: self.attention.phase,
            AllReducePhase: self.exchanges.all_reduce,
            ArgmaxPhase: self.exchanges.argmax,
            ClearBlocksPhase: self.clear_blocks,
            RoutePhase: self.mixtures.route,
            ExpertsPhase: self.mixtures.compute,
            LatentAttentionPhase: self.latent_attention.latent_phase,
            StoreBlockPhase: self.store_block,
            StreamWaitPhase: lambda one: self.stream_wait(self.streams[one.stream]),
            StreamAdvancePhase: lambda one: self.stream_advance(self.streams[one.stream]),
        }
        known.get(type(phase), self.rounds.phase)(phase)

    # streams

    def fetch(self, routine: str, plan: StreamPlan, item: int, slot: int) -> None:
        self.start(
            routine,
            Place(array=plan.array, index=(item,)),
            Place(array=f"{plan.name}_ring", index=(slot,)),
            (f"{plan.name}_arrived", (slot,)),
        )

    def stream_prologue(self, name: str) -> None:
        plan = self.streams[name].plan
        for slot in range(plan.slots):
            self.fetch("stream_prologue", plan, slot, slot)
        self.streams[name] = StreamCursor(plan=plan)

    def stream_wait(self, cursor: StreamCursor) -> None:
        place = Place(array=f"{cursor.plan.name}_ring", index=(cursor.slot,))
        self.wait("stream_wait", (f"{cursor.plan.name}_arrived", (cursor.slot,)), self.size(place))

    def stream_read(self, routine: str, cursor: StreamCursor) -> None:
        place = Place(array=f"{cursor.plan.name}_ring", index=(cursor.slot,))
        self.read(routine, place, Place(array=cursor.plan.array, index=(cursor.item,)))

    def stream_change(self, routine: str, cursor: StreamCursor) -> None:
        place = Place(array=f"{cursor.plan.name}_ring", index=(cursor.slot,))
        self.write(routine, place, saved=True)

    def stream_advance(self, cursor: StreamCursor) -> None:
        """A stream that is written back refills the slot before, one item later."""
        plan, slot = cursor.plan, cursor.slot
        routine = "stream_advance"
        if not plan.writes_back:
            if cursor.item + plan.slots < plan.items:
                self.fetch(routine, plan, cursor.item + plan.slots, slot)
        else:
            place = Place(array=f"{plan.name}_ring", index=(slot,))
            item = Place(array=plan.array, index=(cursor.item,))
            self.start(routine, place, item, (f"{plan.name}_written", (slot,)))
            previous = (slot - 1) % plan.slots
            following = cursor.item - 1 + plan.slots
            if cursor.item > 0 and following < plan.items:
                written = (f"{plan.name}_written", (previous,))
                self.wait(routine, written, self.size(place))
                self.fetch(routine, plan, following, previous)
        cursor.slot = (slot + 1) % plan.slots
        cursor.item += 1

    def stream_drain(self, cursor: StreamCursor) -> None:
        for slot in range(cursor.plan.slots):
            place = Place(array=f"{cursor.plan.name}_ring", index=(slot,))
            self.wait("stream_drain", (f"{cursor.plan.name}_written", (slot,)), self.size(place))

    # phases

    def embed(self, phase: EmbedPhase) -> None:
        """The blocks of rows that hold what is looked up; all lookups in a table share places."""
        name = phase.table.removeprefix("table_")
        semaphore = (f"{name}_sem", (0,))
        sources = [
            Place(array=phase.table, first=one & -BLOCK_ROWS, count=BLOCK_ROWS)
            for one in self.lookups(phase.source)
        ]
        places = [
            Place(array=f"{name}_blocks", index=(row,), count=BLOCK_ROWS)
            for row in range(self.program.rows)
        ]
        for source, place in zip(sources, places, strict=True):
            self.start("embed", source, place, semaphore)
        for place in places:
            self.wait("embed", semaphore, self.size(place))
        for source, place in zip(sources, places, strict=True):
            self.read("embed", place, source)
        buffer = self.buffers[phase.output.buffer]
        self.store("embed", View(buffer=buffer.name, start=0, width=buffer.shape[1]))

    def lookups(self, source: str) -> list[int]:
        """Table rows: positions stand for themselves, tokens for any; who rests looks up row 0."""
        if self.program.round is not None:
            return self.rounds.lookups(source)
        if source == "positions":
            return [max(one, 0) for one in self.positions]
        return [0] * self.program.batch

    def matmul(self, phase: MatmulPhase) -> None:
        for run in phase.runs:
            for step in range(run.first, run.first + run.count):
                self.matmul_step(phase, run, step)

    def matmul_step(self, phase: MatmulPhase, run: TileRun, step: int) -> None:
        """All steps of a run execute the code of its first one."""
        rows = phase.load_rows(run.first)
        share = phase.K // phase.loads_per_step
        chunked = phase.loads_per_step > 1
        for load, guards in enumerate(run.refill):
            self.tape.wait(rows)
            for one in phase.lefts:
                start = one.start + load * share
                self.load("matmul", View(buffer=one.buffer, start=start, width=share))
            self.tape.read(rows)
            if chunked:
                self.tape.refill(guards)
        width = phase.step_blocks(run.first) * TAPE_LANES
        for one in phase.outputs:
            start = one.start + step * phase.blocks_per_step * TAPE_LANES
            self.store("matmul", View(buffer=one.buffer, start=start, width=width))
        if not chunked:
            self.tape.refill(run.refill[0])

    def narrow(self, phase: NarrowMatmulPhase) -> None:
        self.load("narrow_matmul", phase.left)
        self.stream_read("narrow_matmul", self.streams[phase.stream])
        self.store("narrow_matmul", phase.output)

    def vector(self, phase: VectorPhase) -> None:
        if self.program.round is not None:
            self.rounds.vector(phase)
        states = [self.streams[name] for name in dict.fromkeys(phase.states.values())]
        for cursor in states:
            self.stream_wait(cursor)
        if phase.page:
            self.stream_read("vector", self.streams[phase.page])
        for view in phase.reads.values():
            self.load("vector", view)
        for cursor in states:
            self.stream_read("vector", cursor)
            self.stream_change("vector", cursor)
        for view in phase.writes.values():
            self.store("vector", view)
        for cursor in states:
            self.stream_advance(cursor)

    def clear_blocks(self, phase: ClearBlocksPhase) -> None:
        self.store("clear_blocks", phase.blocks)
        self.store("clear_blocks", phase.count)
        self.rounds.executed[phase.counter] = 0

    def store_block(self, phase: StoreBlockPhase) -> None:
        """Of `period` executions the first one stores, behind what is stored already."""
        routine, executed = "store_block", self.rounds.executed
        slot = phase.place(executed[phase.counter])
        executed[phase.counter] += 1
        self.load(routine, phase.count)
        self.store(routine, phase.count)
        if slot is None:
            return
        residual = phase.residual
        self.load(routine, residual)
        start = phase.blocks.start + slot * residual.width
        self.store(routine, replace(phase.blocks, start=start, width=residual.width))
        self.store(routine, residual)

    def delta_rule(self, phase: DeltaRulePhase) -> None:
        """Heads are read and stored in turn, so an output must not take the place of an input."""
        cursor = self.streams[phase.stream]
        views = (phase.q, phase.k, phase.v, phase.beta, phase.decay)
        for sequence in range(self.program.batch):
            self.stream_wait(cursor)
            if self.positions[sequence] >= 0:
                for view in views:
                    self.load("delta_rule", view)
                self.stream_read("delta_rule", cursor)
                self.stream_change("delta_rule", cursor)
                self.store_row("delta_rule", phase.output)
                for view in views:
                    self.load("delta_rule", view)
            self.stream_advance(cursor)
        if not any(position >= 0 for position in self.positions):
            self.rest("delta_rule", phase.output)
