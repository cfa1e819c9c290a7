"""A program of the compiler as a machine program: every copy, wait and message of the kernel.

This follows what `codegen_pallas` emits, statement by statement: which slot a load goes to, when it
is started, what is waited for. Loops are unrolled, so every iteration has its own events.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from math import prod

from mkc.ir.routing import Routing
from mkc.schedule.exchange_plan import Part
from mkc.schedule.messages import Messages
from mkc.schedule.messages import messages
from mkc.schedule.program import ROUNDS
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import DeltaRulePhase
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import Guard
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.program import StreamAdvancePhase
from mkc.schedule.program import StreamWaitPhase
from mkc.schedule.program import VectorPhase
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.round_phases import TopKPhase
from mkc.schedule.round_phases import masks_of
from mkc.schedule.simulate.cost_parts import PhaseCost
from mkc.schedule.simulate.cost_parts import exchange_plan
from mkc.schedule.simulate.machine import Engine
from mkc.schedule.simulate.machine import Instruction
from mkc.schedule.simulate.machine import MachineProgram
from mkc.schedule.simulate.machine import Mark
from mkc.schedule.simulate.machine import RoundStart
from mkc.schedule.simulate.machine import Send
from mkc.schedule.simulate.machine import Stall
from mkc.schedule.simulate.machine import Start
from mkc.schedule.simulate.machine import Wait
from mkc.schedule.simulate.machine import Work
from mkc.schedule.simulate.translate_rounds import BF16_BYTES
from mkc.schedule.simulate.translate_rounds import BLOCK_ROWS
from mkc.schedule.simulate.translate_rounds import entering_blocks
from mkc.schedule.simulate.translate_rounds import round_instructions
from mkc.schedule.simulate.translate_rounds import round_span
from mkc.schedule.stream_plans import CacheStream
from mkc.schedule.stream_plans import StreamPlan

ROW_BYTES = TAPE_LANES * 2
F32_BYTES = 4
SIGNAL_BYTES = 4
PROLOGUE, EPILOGUE = "prologue", "epilogue"

type Exchanging = AllReducePhase | ArgmaxPhase | AcceptPhase | TopKPhase | AllGatherPhase


def machine_program(
    program: Program,
    costs: Mapping[str, PhaseCost],
    *,
    position: int,
    rounds: int,
    routing: Routing = Routing.UNIFORM,
) -> MachineProgram:
    """The machine program of all ranks.

    Args:
      costs: by phase id.
      position: of every sequence in the first round; it grows by a round's rows in each.
      rounds: rounds that the launch runs, at most the program's own.
      routing: how rows choose experts.
    """
    assert 1 <= rounds <= program.rounds_per_launch, "more rounds than a launch may run"
    last = program.context - rounds * rows_per_round(program)
    assert 0 <= position <= last, "a position beyond the context"
    return MachineProgram(
        ranks=program.ranks,
        instructions=lambda rank: Translator(
            program=program,
            costs=costs,
            position=position,
            rounds=rounds,
            rank=rank,
            routing=routing,
        ).launch(),
        symmetric=_symmetric(program.ranks),
    )


def rows_per_round(program: Program) -> int:
    """Positions that a round goes on by: all of its rows, when every draft is accepted."""
    return 1 if program.round is None else program.round.rows_per_sequence


def _symmetric(ranks: int) -> bool:
    """With a power of two every rank's k-th peer is at the same distance, by exclusive or."""
    return ranks & (ranks - 1) == 0


@dataclass(kw_only=True)
class Stream:
    """A small stream of the current round: the item to consume next."""

    plan: StreamPlan
    item: int = 0

    @property
    def slot(self) -> int:
        return self.item % self.plan.slots

    @property
    def bytes(self) -> int:
        return prod(self.plan.item_shape) * self.plan.dtype.bytes


@dataclass(kw_only=True)
class Cache:
    """Cache tiles of the current round: how many were fetched and consumed."""

    plan: CacheStream
    tiles: int  # per sequence and layer
    blocks: int = 1  # of rows that are written, per sequence and layer
    fetched: int = 0
    consumed: int = 0
    calls: int = 0

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Of a row of the keys and of one of the values."""
        keys, values = self.plan.widths
        return keys * BF16_BYTES, values * BF16_BYTES

    @property
    def total(self) -> int:
        return self.plan.layers * self.plan.batch * self.tiles


@dataclass(kw_only=True)
class Translator:
    """Walks a program as its kernel does. One object per rank."""

    program: Program
    costs: Mapping[str, PhaseCost]
    position: int
    rounds: int
    rank: int
    routing: Routing = Routing.UNIFORM
    consumed: int = 0  # loads of the tape
    layer: int = -1
    layers: int = 0
    round: int = 0
    last: dict[str, bool] = field(default_factory=dict)  # loop -> in its last iteration
    streams: dict[str, Stream] = field(default_factory=dict)
    caches: dict[str, Cache] = field(default_factory=dict)

    def launch(self) -> Iterator[Instruction]:
        """The whole kernel."""
        tape = self.program.tape
        mark = self.mark(PROLOGUE, "tape")
        for slot, rows in enumerate(tape.prologue[: tape.slots]):
            yield self._load(mark, slot, rows)
        yield from self._meet(self.mark(PROLOGUE, "entry barrier"))
        for number in range(self.rounds):
            self.round, self.layers, self.layer = number, 0, -1
            self.last = {ROUNDS: number == self.rounds - 1}
            yield RoundStart(mark=self.mark(PROLOGUE))
            yield from self._begin_round(self.position + number * rows_per_round(self.program))
            yield from self._body(self.program.body, None)
            self.layer = -1
            yield from self._end_round()

    def mark(self, phase: str, op: str = "") -> Mark:
        return Mark(phase=phase, op=op, layer=self.layer, round=self.round)

    def _load(self, mark: Mark, slot: int, rows: int) -> Start:
        return Start(mark=mark, bytes=rows * ROW_BYTES, semaphore=f"tape {slot}", slot=slot)

    def _begin_round(self, position: int) -> Iterator[Instruction]:
        for plan in self.program.streams:
            stream = self.streams[plan.name] = Stream(plan=plan)
            for slot in range(plan.slots):
                yield self._fetch(self.mark(PROLOGUE, plan.name), stream, slot)
        for cache_plan in self.program.caches:
            cache = self.caches[cache_plan.name] = self._cache(cache_plan, position)
            for _ in range(cache_plan.slots):
                yield from self.fetch_tile(self.mark(PROLOGUE, cache_plan.name), cache)

        for phase in self.program.phases():
            if masks := masks_of(phase):
                mark, size = self.mark(PROLOGUE, masks), self._operand_bytes(masks)
                yield Start(mark=mark, bytes=size, semaphore=masks, urgent=True)

    def _cache(self, plan: CacheStream, position: int) -> Cache:
        if self.program.round is None:
            return Cache(plan=plan, tiles=position // plan.tile + 1)
        first, end = round_span(plan, position)
        return Cache(plan=plan, tiles=end - first, blocks=entering_blocks(self.program, position))

    def _operand_bytes(self, name: str) -> int:
        operand = next(one for one in self.program.operands if one.name == name)
        return prod(operand.shape) * operand.dtype.bytes

    def _end_round(self) -> Iterator[Instruction]:
        for name, stream in self.streams.items():
            if stream.plan.writes_back:
                for slot in range(stream.plan.slots):
                    yield self._written(self.mark(EPILOGUE, name), stream, slot)
        for name, cache in self.caches.items():
            mark = self.mark(EPILOGUE, name)
            for sequence in range(cache.plan.batch):
                yield self.rows_written(mark, cache, sequence)
        if self.program.logits is not None:
            mark = self.mark(EPILOGUE, "logits")
            size = self.program.padded_rows * self.program.logits.width * F32_BYTES
            yield Start(mark=mark, bytes=size, semaphore="logits")
            yield Wait(mark=mark, bytes=size, semaphore="logits", stall=Stall.COPY)

    def _body(self, body: tuple[Phase | Loop, ...], loop: Loop | None) -> Iterator[Instruction]:
        """Phases of a body; consecutive ones inside a loop make up a layer."""
        inside = False
        for item in body:
            if isinstance(item, Loop):
                inside = False
                for index in range(item.count):
                    self.last[item.name] = index == item.count - 1
                    yield from self._body(item.body, item)
                continue
            if loop is not None and not inside and isinstance(item, MatmulPhase | VectorPhase):
                inside, self.layer = True, self.layers
                self.layers += 1
            yield from self._phase(item)
        if loop is not None:
            self.layer = -1

    def _phase(self, phase: Phase) -> Iterator[Instruction]:
        match phase:
            case StreamWaitPhase():
                yield self.arrived(self.mark(phase.id, phase.stream), self.streams[phase.stream])
            case StreamAdvancePhase():
                mark = self.mark(phase.id, phase.stream)
                yield from self.advance(mark, self.streams[phase.stream])
            case MatmulPhase():
                yield from self._matmul(phase)
            case VectorPhase():
                yield from self._vector(phase)
            case DeltaRulePhase():
                yield from self._delta_rule(phase)
            case AttentionPhase():
                yield from self._attention(phase)
            case AllReducePhase() | ArgmaxPhase() | AcceptPhase() | TopKPhase() | AllGatherPhase():
                yield from self._exchange(phase)
            case EmbedPhase():
                yield from self._embed(phase)
            case _:
                yield from round_instructions(self, phase)

    def work(self, phase: Phase, us: float, engine: Engine = Engine.VECTOR) -> Work:
        return Work(mark=self.mark(phase.id, phase.title), us=us, engine=engine)

    # The tape.

    def _matmul(self, phase: MatmulPhase) -> Iterator[Instruction]:
        cost, mark = self.costs[phase.id], self.mark(phase.id, phase.title)
        if cost.once_us:
            yield Work(mark=mark, us=cost.once_us, engine=Engine.CONTROL)
        for run, step_us in zip(phase.runs, cost.tile_us, strict=True):
            rows = phase.load_rows(run.first)
            sizes = [self._refill_rows(guards) for guards in run.refill]
            push_us = step_us / phase.loads_per_step
            for _ in range(run.count):
                for size in sizes:
                    slot = self.consumed % self.program.tape.slots
                    self.consumed += 1
                    yield Wait(
                        mark=mark,
                        bytes=rows * ROW_BYTES,
                        semaphore=f"tape {slot}",
                        stall=Stall.TAPE,
                        slot=slot,
                    )
                    yield Work(mark=mark, us=push_us, engine=Engine.MATRIX)
                    if size is not None:
                        yield self._load(mark, slot, size)

    def _refill_rows(self, guards: tuple[Guard, ...]) -> int | None:
        """Rows of the load that a refill starts, None when there is none."""
        for guard in guards[:-1]:
            assert guard.loop is not None
            if not self.last[guard.loop]:
                return guard.rows
        return guards[-1].rows

    # Small streams.

    def _fetch(self, mark: Mark, stream: Stream, slot: int) -> Start:
        semaphore = f"{stream.plan.name} arrived {slot}"
        return Start(mark=mark, bytes=stream.bytes, semaphore=semaphore, urgent=True, slot=slot)

    def arrived(self, mark: Mark, stream: Stream) -> Wait:
        return Wait(
            mark=mark,
            bytes=stream.bytes,
            semaphore=f"{stream.plan.name} arrived {stream.slot}",
            stall=Stall.COPY,
            slot=stream.slot,
        )

    def _written(self, mark: Mark, stream: Stream, slot: int) -> Wait:
        semaphore = f"{stream.plan.name} written {slot}"
        return Wait(mark=mark, bytes=stream.bytes, semaphore=semaphore, stall=Stall.COPY, slot=slot)

    def advance(self, mark: Mark, stream: Stream) -> Iterator[Instruction]:
        plan, slot = stream.plan, stream.slot
        if not plan.writes_back:
            if stream.item + plan.slots < plan.items:
                yield self._fetch(mark, stream, slot)
        else:
            semaphore = f"{plan.name} written {slot}"
            yield Start(mark=mark, bytes=stream.bytes, semaphore=semaphore, urgent=True, slot=slot)
            if stream.item > 0 and stream.item - 1 + plan.slots < plan.items:
                previous = (stream.item - 1) % plan.slots
                yield self._written(mark, stream, previous)
                yield self._fetch(mark, stream, previous)
        stream.item += 1

    def _vector(self, phase: VectorPhase) -> Iterator[Instruction]:
        streams = [self.streams[name] for name in dict.fromkeys(phase.states.values())]
        mark = self.mark(phase.id, phase.title)
        for stream in streams:
            yield self.arrived(mark, stream)
        yield self.work(phase, self.costs[phase.id].once_us)
        for stream in streams:
            yield from self.advance(mark, stream)

    def _delta_rule(self, phase: DeltaRulePhase) -> Iterator[Instruction]:
        cost, stream = self.costs[phase.id], self.streams[phase.stream]
        mark = self.mark(phase.id, phase.title)
        yield self.work(phase, cost.once_us)
        for _ in range(self.program.batch):
            yield self.arrived(mark, stream)
            yield self.work(phase, cost.item_us)
            yield from self.advance(mark, stream)

    def _embed(self, phase: EmbedPhase) -> Iterator[Instruction]:
        mark, rows = self.mark(phase.id, phase.title), self.program.rows
        size = BLOCK_ROWS * phase.output.width * BF16_BYTES
        for _ in range(rows):
            yield Start(mark=mark, bytes=size, semaphore=phase.id, urgent=True)
        yield Wait(mark=mark, bytes=rows * size, semaphore=phase.id, stall=Stall.COPY)
        yield self.work(phase, self.costs[phase.id].once_us)

    # Attention.

    def fetch_tile(self, mark: Mark, cache: Cache) -> Iterator[Instruction]:
        if cache.fetched < cache.total:
            slot = cache.fetched % cache.plan.slots
            semaphore = f"{cache.plan.name} arrived {slot}"
            for row in cache.row_bytes:
                size = cache.plan.tile * row
                yield Start(mark=mark, bytes=size, semaphore=semaphore, urgent=True, slot=slot)
        cache.fetched += 1

    def tile_arrived(self, mark: Mark, cache: Cache) -> Wait:
        slot = cache.consumed % cache.plan.slots
        cache.consumed += 1
        return Wait(
            mark=mark,
            bytes=cache.plan.tile * sum(cache.row_bytes),
            semaphore=f"{cache.plan.name} arrived {slot}",
            stall=Stall.COPY,
            slot=slot,
        )

    def rows_written(self, mark: Mark, cache: Cache, sequence: int) -> Wait:
        size = cache.blocks * BLOCK_ROWS * sum(cache.row_bytes)
        semaphore = f"{cache.plan.name} written {sequence}"
        return Wait(mark=mark, bytes=size, semaphore=semaphore, stall=Stall.COPY)

    def _attention(self, phase: AttentionPhase) -> Iterator[Instruction]:
        cost, cache = self.costs[phase.id], self.caches[phase.cache]
        mark = self.mark(phase.id, phase.title)
        yield self.work(phase, cost.once_us)
        for sequence in range(cache.plan.batch):
            yield self.work(phase, cost.item_us)
            for tile in range(cache.tiles):
                yield self.tile_arrived(mark, cache)
                if tile == cache.tiles - 1:
                    yield from self._write_row(mark, cache, sequence)
                yield self.work(phase, cost.tile_us[0])
                yield from self.fetch_tile(mark, cache)
        cache.calls += 1

    def _write_row(self, mark: Mark, cache: Cache, sequence: int) -> Iterator[Instruction]:
        """The new key and value rows go to the cache, once those of the layer before have."""
        if cache.calls > 0:
            yield self.rows_written(mark, cache, sequence)
        semaphore = f"{cache.plan.name} written {sequence}"
        for row in cache.row_bytes:
            yield Start(mark=mark, bytes=BLOCK_ROWS * row, semaphore=semaphore, urgent=True)

    # Exchanges.

    def _peers(self) -> list[int]:
        """As the kernel visits them, the farthest rank number first."""
        ranks = self.program.ranks
        return Messages(members=ranks, stride=1, bytes=SIGNAL_BYTES).others(self.rank)

    def _messages(self, exchange: str) -> tuple[Messages, ...]:
        ranks = self.program.ranks
        return messages(exchange_plan(self.program, exchange), ranks) if ranks > 1 else ()

    def _meet(self, mark: Mark) -> Iterator[Instruction]:
        peers = self._peers()
        if not peers:
            return
        for peer in peers:
            yield Send(mark=mark, peer=peer, bytes=SIGNAL_BYTES, semaphore="barrier")
        size = len(peers) * SIGNAL_BYTES
        yield Wait(mark=mark, bytes=size, semaphore="barrier", stall=Stall.BARRIER)

    def exchanged(self, mark: Mark, name: str) -> Iterator[Instruction]:
        """Messages to all peers and from them, without work."""
        for number, one in enumerate(self._messages(name)):
            arrived, sent = f"{name} arrived {number}", f"{name} sent {number}"
            for peer in one.others(self.rank):
                yield Send(mark=mark, peer=peer, bytes=one.bytes, semaphore=arrived, sent=sent)
            total = one.peers * one.bytes
            yield Wait(mark=mark, bytes=total, semaphore=arrived, stall=Stall.EXCHANGE)
            yield Wait(mark=mark, bytes=total, semaphore=sent, stall=Stall.EXCHANGE)

    def _exchange(self, phase: Exchanging) -> Iterator[Instruction]:
        """The core adds up after the last message; it searches its own logits before the first."""
        name, mark = phase.exchange, self.mark(phase.id, phase.title)
        core_us = self.costs[phase.id].once_us
        part = phase.part if isinstance(phase, AllReducePhase | AllGatherPhase) else Part.WHOLE
        before_us = core_us if part is Part.START else 0.0
        if isinstance(phase, ArgmaxPhase | AcceptPhase | TopKPhase):
            before_us = core_us
            if masks := masks_of(phase):
                size = self._operand_bytes(masks)
                yield Wait(mark=mark, bytes=size, semaphore=masks, stall=Stall.COPY)
        if part is not Part.FINISH:
            yield self.work(phase, before_us)
        parts = self._messages(name) if name else ()
        if isinstance(phase, AcceptPhase) and phase.sampling and phase.sampling.race:
            parts = (*parts, *self._messages(phase.sampling.race))
        totals = []
        for number, one in enumerate(parts):
            arrived, sent = f"{name} arrived {number}", f"{name} sent {number}"
            if number or part is not Part.FINISH:
                for peer in one.others(self.rank):
                    yield Send(mark=mark, peer=peer, bytes=one.bytes, semaphore=arrived, sent=sent)
            if part is Part.START:
                return
            total = one.peers * one.bytes
            totals.append((total, sent))
            yield Wait(mark=mark, bytes=total, semaphore=arrived, stall=Stall.EXCHANGE)
            yield self.work(phase, (core_us - before_us) / len(parts))
        if not totals:
            yield self.work(phase, core_us - before_us)
        for total, sent in totals:
            yield Wait(mark=mark, bytes=total, semaphore=sent, stall=Stall.EXCHANGE)
        if phase.meets:
            yield from self._meet(mark)
