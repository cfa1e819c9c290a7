"""The phases of speculative rounds as machine instructions; part of `translate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.expert_store import ExpertRing
from mkc.schedule.mixing_phases import LatentAttentionPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.simulate.cost_parts import Source
from mkc.schedule.simulate.costs_experts import experts_read
from mkc.schedule.simulate.costs_experts import plan_and_ring
from mkc.schedule.simulate.machine import Engine
from mkc.schedule.simulate.machine import Instruction
from mkc.schedule.simulate.machine import Mark
from mkc.schedule.simulate.machine import Stall
from mkc.schedule.simulate.machine import Start
from mkc.schedule.simulate.machine import Wait
from mkc.schedule.stream_plans import CacheStream

if TYPE_CHECKING:
    from mkc.schedule.simulate.translate import Cache
    from mkc.schedule.simulate.translate import Translator

BF16_BYTES = 2
BLOCK_ROWS = 16  # rows of the smallest block of bf16 rows that a copy may move


def round_span(plan: CacheStream, position: int) -> tuple[int, int]:
    """The first tile that lies before a position and is seen, and the one behind the last."""
    end = max(position - 1, 0) // plan.tile + 1
    if plan.window is None:
        return 0, end
    return max(position + 1 - plan.window, 0) // plan.tile, end


def entering_blocks(program: Program, position: int) -> int:
    """Blocks of rows that all rows of a round from `position` touch."""
    assert program.round is not None
    rows = program.round.rows_per_sequence
    return (position + rows - 1) // BLOCK_ROWS - position // BLOCK_ROWS + 1


def round_instructions(translator: Translator, phase: Phase) -> Iterator[Instruction]:
    """Of a phase that only rounds have and that is more than work."""
    match phase:
        case KeptDeltaRulePhase():
            yield from _kept_delta_rule(translator, phase)
        case RowsAttentionPhase():
            yield from _rows_attention(translator, phase)
        case LatentAttentionPhase():
            yield from _latent_attention(translator, phase)
        case RoutePhase():
            yield from _route(translator, phase)
        case ExpertsPhase():
            yield from _experts(translator, phase)
        case SelectorWalkPhase():
            yield from _selector_walk(translator, phase)
        case MarkovWalkPhase():
            yield from _markov_walk(translator, phase)
        case _:
            yield translator.work(phase, translator.costs[phase.id].once_us)


def _kept_delta_rule(translator: Translator, phase: KeptDeltaRulePhase) -> Iterator[Instruction]:
    """The state and what is kept of the rows arrive and leave together."""
    cost = translator.costs[phase.id]
    names = (phase.state, phase.kept_k, phase.kept_u, phase.kept_decay)
    streams = [translator.streams[name] for name in names]
    mark = translator.mark(phase.id, phase.title)
    yield translator.work(phase, cost.once_us)
    for _ in range(translator.program.batch):
        for stream in streams:
            yield translator.arrived(mark, stream)
        yield translator.work(phase, cost.item_us)
        for stream in streams:
            yield from translator.advance(mark, stream)


def _route(translator: Translator, phase: RoutePhase) -> Iterator[Instruction]:
    """The choice, then the first experts are started."""
    yield translator.work(phase, translator.costs[phase.id].once_us)
    _, ring = plan_and_ring(translator.program, phase.experts)
    read = experts_read(translator.program, phase.experts, translator.routing)
    count = min(ring.slots, read)
    mark = translator.mark(phase.id, phase.title)
    for slot in range(count):
        yield from _expert_loads(mark, ring, slot)


def _experts(translator: Translator, phase: ExpertsPhase) -> Iterator[Instruction]:
    """One expert after the other, each refilling the slot of the one before it; then the second
    product of the last one."""
    cost, mark = translator.costs[phase.id], translator.mark(phase.id, phase.title)
    _, ring = plan_and_ring(translator.program, phase.experts)
    count = experts_read(translator.program, phase.experts, translator.routing)
    # Machine code has waited for its results already.
    engine = Engine.VECTOR if cost.source is Source.MACHINE_CODE else Engine.MATRIX
    for number in range(count):
        slot = number % ring.slots
        yield Wait(
            mark=mark,
            bytes=ring.slice.bytes,
            semaphore=f"{ring.name} arrived {slot}",
            stall=Stall.COPY,
            slot=slot,
        )
        yield translator.work(phase, cost.item_us, engine)
        if 0 < number <= count - ring.slots:
            yield from _expert_loads(mark, ring, (number - 1) % ring.slots)
    yield translator.work(phase, cost.once_us, engine)


def _expert_loads(mark: Mark, ring: ExpertRing, slot: int) -> Iterator[Instruction]:
    semaphore = f"{ring.name} arrived {slot}"
    for rows, columns in (ring.slice.gate_up, ring.slice.down):
        size = rows * columns * ring.slice.dtype.bytes
        yield Start(mark=mark, bytes=size, semaphore=semaphore, urgent=True, slot=slot)


def _rows_attention(translator: Translator, phase: RowsAttentionPhase) -> Iterator[Instruction]:
    cost, cache = translator.costs[phase.id], translator.caches[phase.cache]
    mark = translator.mark(phase.id, phase.title)
    yield translator.work(phase, cost.once_us)
    for sequence in range(cache.plan.batch):
        yield translator.work(phase, cost.item_us)
        for tile in range(cache.tiles):
            yield translator.tile_arrived(mark, cache)
            if tile == cache.tiles - 1:
                yield from _append(translator, mark, cache, sequence)
            yield translator.work(phase, cost.tile_us[0])
            yield from translator.fetch_tile(mark, cache)
    cache.calls += 1


def _latent_attention(translator: Translator, phase: LatentAttentionPhase) -> Iterator[Instruction]:
    """The last tile of a sequence has code of its own: part of the work on the sequence."""
    cost, cache = translator.costs[phase.id], translator.caches[phase.cache]
    mark = translator.mark(phase.id, phase.title)
    yield translator.work(phase, cost.once_us)
    for sequence in range(cache.plan.batch):
        for _ in range(cache.tiles - 1):
            yield translator.tile_arrived(mark, cache)
            yield translator.work(phase, cost.tile_us[0])
            yield from translator.fetch_tile(mark, cache)
        yield translator.tile_arrived(mark, cache)
        yield from _append(translator, mark, cache, sequence)
        yield translator.work(phase, cost.item_us)
        yield from translator.fetch_tile(mark, cache)
    cache.calls += 1


def _append(
    translator: Translator, mark: Mark, cache: Cache, sequence: int
) -> Iterator[Instruction]:
    """New rows go to the cache, once those of the layer before have."""
    if cache.calls > 0:
        yield translator.rows_written(mark, cache, sequence)
    semaphore = f"{cache.plan.name} written {sequence}"
    for row in cache.row_bytes * cache.blocks:
        yield Start(mark=mark, bytes=BLOCK_ROWS * row, semaphore=semaphore, urgent=True)


def _selector_walk(translator: Translator, phase: SelectorWalkPhase) -> Iterator[Instruction]:
    """The candidates' rows come one row of the walk ahead, that of a choice when it is made."""
    program = translator.program
    assert program.round is not None
    cost = translator.costs[phase.id]
    mark = translator.mark(phase.id, phase.title)
    size = BLOCK_ROWS * phase.rank * BF16_BYTES
    rows = program.round.rows_per_sequence

    def fetch(what: str, count: int) -> Iterator[Instruction]:
        for _ in range(count):
            yield Start(mark=mark, bytes=size, semaphore=f"{phase.id} {what}", urgent=True)

    def wait(what: str, count: int) -> Instruction:
        semaphore = f"{phase.id} {what}"
        return Wait(mark=mark, bytes=count * size, semaphore=semaphore, stall=Stall.COPY)

    yield translator.work(phase, cost.once_us)
    candidates = program.batch * phase.k
    yield from fetch("candidates 1", candidates)
    for row in range(1, rows):
        yield from fetch("choice", program.batch)
        if row + 1 < rows:
            yield from fetch(f"candidates {row + 1}", candidates)
        yield wait("choice", program.batch)
        yield wait(f"candidates {row}", candidates)
        yield translator.work(phase, program.batch * cost.item_us)


def _markov_walk(translator: Translator, phase: MarkovWalkPhase) -> Iterator[Instruction]:
    """Of every row the choice before is looked up, and the best columns of all ranks exchanged."""
    program = translator.program
    assert program.round is not None
    cost, mark = translator.costs[phase.id], translator.mark(phase.id, phase.title)
    size = BLOCK_ROWS * phase.rank * BF16_BYTES
    for row in range(1, program.round.rows_per_sequence):
        for _ in range(program.batch):
            yield Start(mark=mark, bytes=size, semaphore=f"{phase.id} choice", urgent=True)
        yield Wait(
            mark=mark,
            bytes=program.batch * size,
            semaphore=f"{phase.id} choice",
            stall=Stall.COPY,
        )
        yield translator.work(phase, cost.item_us)
        if phase.exchanges:
            name = phase.exchanges[(row - 1) % len(phase.exchanges)]
            yield from translator.exchanged(mark, name)
