"""Pass 50: gives every value, small parameter, state and cache a place.

Activations live in VMEM regions, packed by lifetime. Small vectors of a layer form one page, states
and caches are streams: their items arrive ahead of the layer that uses them. The ring of the tape
gives way when everything together would not fit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from mkc.errors import LiveBuffer
from mkc.errors import VmemError
from mkc.ir.types import DType
from mkc.passes.expert_places import place_experts
from mkc.passes.lifetimes import Lifetime
from mkc.passes.lifetimes import lifetimes
from mkc.passes.lifetimes import pack
from mkc.passes.p30_tile import ROW_BYTES
from mkc.passes.p30_tile import Tiles
from mkc.passes.p40_collectives import TWO_PHASE
from mkc.passes.p40_collectives import Collectives
from mkc.passes.sampled import samples_of
from mkc.passes.spare_vmem import with_spare_slots
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.passes.steps import StepLoop
from mkc.passes.streams import Streams
from mkc.passes.streams import place_streams
from mkc.passes.streams import with_cache_slots
from mkc.passes.streams import with_state_slots
from mkc.passes.walk_scratch import Scratch
from mkc.passes.walk_scratch import markov_scratch
from mkc.passes.walk_scratch import walk_scratch
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.exchange_plan import ExchangePlan
from mkc.schedule.exchange_plan import exchange_buffers
from mkc.schedule.expert_store import ExpertPlan
from mkc.schedule.expert_store import ExpertRing
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import Buffer
from mkc.schedule.program import View
from mkc.schedule.program import mask_lanes
from mkc.schedule.stream_plans import CacheStream
from mkc.schedule.stream_plans import StreamPlan
from mkc.targets import Target

EMBED_ROWS = 16  # a table row is read with its aligned block of bf16 rows


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One VMEM array of the kernel.

    Attributes:
      bytes: with hardware tile padding.
      op: what it belongs to, for people.
    """

    name: str
    bytes: int
    op: str


@dataclass(frozen=True, kw_only=True)
class Residency:
    """Where everything is.

    Attributes:
      views: buffer lanes of every base value.
      allocations: all VMEM arrays, largest first.
      reserve_bytes: VMEM left to the compiler.
    """

    buffers: tuple[Buffer, ...]
    views: dict[str, View]
    streams: Streams
    experts: tuple[ExpertPlan, ...]
    expert_rings: tuple[ExpertRing, ...]
    slots: int
    allocations: tuple[Allocation, ...]
    reserve_bytes: int

    @property
    def vmem_bytes(self) -> int:
        return sum(one.bytes for one in self.allocations)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Decides residency.

    Attributes:
      reserve_bytes: VMEM left to the compiler; 0 takes the target's figure.
      cache_tile: positions per key/value tile; 0 chooses.
      largest_tile: most positions per tile that is chosen; 0 for the usual.
      fewest_slots: the tape's ring is not made shorter than this.
      state_slots: slots of every state that streams from HBM and back; 0 chooses.
    """

    name: ClassVar[str] = "residency"
    reserve_bytes: int = 0
    cache_tile: int = 0
    largest_tile: int = 0
    fewest_slots: int = 3
    state_slots: int = 0

    def apply(
        self,
        graph: StepGraph,
        tiles: Tiles,
        collectives: Collectives,
        padded_rows: int,
        target: Target,
        log: DecisionLog,
    ) -> Residency:
        """Returns the places. Raises `VmemError` when they exceed the target's VMEM."""
        streams = place_streams(
            graph,
            padded_rows,
            cache_tile=self.cache_tile,
            largest_tile=self.largest_tile,
            state_slots=self.state_slots,
        )
        experts, expert_rings = place_experts(graph, padded_rows, target)
        buffers, views = _buffers(graph, tiles, collectives, padded_rows)
        activations = [
            *_region_allocations(buffers, target),
            *_exchange_allocations(collectives.exchanges, graph.sharded.ranks, target),
            *_expert_allocations(expert_rings, target),
            *_embed_allocations(graph, target),
            *_mask_allocations(graph, padded_rows, target),
            *_walk_allocations(graph, padded_rows, target),
            *_carried_allocations(graph, padded_rows, target),
        ]
        reserve = self.reserve_bytes or target.vmem.reserve_bytes
        limit = target.vmem.usable_bytes - reserve
        slot_bytes = tiles.slot_rows * ROW_BYTES
        wanted = tiles.slots * slot_bytes
        # What does not fit gives way in this order: deep state rings, deep cache rings, the tape's.
        deep = streams
        for smaller in (deep, with_state_slots(deep), with_cache_slots(deep)):
            streams = smaller
            fixed = [*activations, *_stream_allocations(streams, target)]
            free = limit - sum(one.bytes for one in fixed)
            if free >= wanted:
                break
        slots = min(tiles.slots, max(self.fewest_slots, free // slot_bytes))
        ring = Allocation(name="tape_ring", bytes=slots * slot_bytes, op="weight stream")
        if free > ring.bytes:
            streams = with_spare_slots(streams, deep, free - ring.bytes, target)
            fixed = [*activations, *_stream_allocations(streams, target)]
        allocations = tuple(sorted([*fixed, ring], key=lambda one: (-one.bytes, one.name)))
        total = sum(one.bytes for one in allocations)
        if total > limit:
            self._refuse(total, limit, allocations, graph)
        log.choose(
            "residency.reserve",
            passed=self.name,
            chosen=f"{reserve} bytes left to the compiler",
            because=f"{total} of {limit} bytes of VMEM are planned",
            rejected={"nothing": "the compiler spills into it, and refuses what it cannot place"},
        )
        log.choose(
            "residency.ring_slots",
            passed=self.name,
            chosen=f"{slots} of {tiles.slots} wanted slots",
            because="the ring takes what the other arrays leave",
        )
        self._record(streams, log)
        return Residency(
            buffers=buffers,
            views=views,
            streams=streams,
            experts=experts,
            expert_rings=expert_rings,
            slots=slots,
            allocations=allocations,
            reserve_bytes=reserve,
        )

    def _record(self, streams: Streams, log: DecisionLog) -> None:
        for stream in streams.streams:
            if stream.writes_back:
                log.choose(
                    f"residency.{stream.name}",
                    passed=self.name,
                    chosen=f"{stream.slots} slots in VMEM, items stream from HBM and back",
                    because="items arrive while earlier ones are used",
                    rejected={
                        "resident": f"{_item_bytes(stream) * stream.items} bytes of VMEM, and they "
                        "come from HBM and go back there in every step all the same"
                    },
                )
        for cache in streams.caches:
            log.choose(
                f"residency.{cache.name}",
                passed=self.name,
                chosen=f"tiles of {cache.tile} positions, {cache.slots} slots",
                because="only tiles up to each sequence's position are read, ahead of their layer",
            )

    def _refuse(
        self, total: int, limit: int, allocations: tuple[Allocation, ...], graph: StepGraph
    ) -> None:
        batch = graph.sharded.graph.batch
        change = (
            f"a lower --batch than {batch}"
            if batch > 1
            else "a larger --tp, which divides the widest buffers"
        )
        raise VmemError(
            needed_bytes=total,
            limit_bytes=limit,
            live=[LiveBuffer(name=one.name, op=one.op, bytes=one.bytes) for one in allocations],
            cheapest_change=change,
        )


def _item_bytes(stream: StreamPlan) -> int:
    return prod(stream.item_shape) * stream.dtype.bytes


def _buffers(
    graph: StepGraph, tiles: Tiles, collectives: Collectives, padded_rows: int
) -> tuple[tuple[Buffer, ...], dict[str, View]]:
    """Buffers of all values that live between steps, packed into regions."""
    found = lifetimes(graph)
    owners = _owners(graph)
    scattered = _scattered(graph, collectives)
    dtypes = _dtypes(graph)
    wanted = []
    facts: dict[str, tuple[Lifetime, int, DType]] = {}
    for lifetime in found:
        name = buffer_name(lifetime.values[0])
        if name in facts:  # values whose names differ in punctuation only
            name = f"{name}_{len(facts)}"
        width = max(
            max(_lanes(graph, tiles, value, owners), scattered.get(value, 0))
            for value in lifetime.values
        )
        dtype = _memory_dtype(lifetime, dtypes)
        facts[name] = (lifetime, width, dtype)
        wanted.append((name, dtype, width, lifetime.first, lifetime.last))
    placed, regions = pack(iter(wanted))
    lanes = {region.name: region.lanes for region in regions}
    buffers = []
    views = {}
    for name, (lifetime, width, dtype) in facts.items():
        buffers.append(
            Buffer(
                name=name,
                shape=(padded_rows, width),
                dtype=dtype,
                region=placed[name],
                region_lanes=lanes[placed[name]],
                first=lifetime.first,
                last=lifetime.last,
                purpose=", ".join(lifetime.values),
            )
        )
        for value in lifetime.values:
            views[value] = View(buffer=name, start=0, width=graph.widths[value])
    return tuple(buffers), views


def _memory_dtype(lifetime: Lifetime, dtypes: dict[str, DType]) -> DType:
    """bf16 for what only matmuls read, f32 for other numbers."""
    kinds = {dtypes[value] for value in lifetime.values}
    if kinds == {DType.I32}:
        return DType.I32
    return DType.BF16 if lifetime.matmul_left and kinds == {DType.BF16} else DType.F32


def _dtypes(graph: StepGraph) -> dict[str, DType]:
    """Element types of all values that steps define or loops carry, fused projections included."""
    dtypes: dict[str, DType] = {}

    def visit(body: tuple[Step | StepLoop, ...]) -> None:
        for item in body:
            if isinstance(item, StepLoop):
                for carry in item.carries:
                    for value in (carry.argument, carry.result):
                        dtypes[value.name] = value.type.dtype
                visit(item.body)
                continue
            for node in (*item.nodes, *item.also):
                dtypes.update({value.name: value.type.dtype for value in node.results})
            if item.kind is StepKind.TAP:
                dtypes[item.output] = DType.BF16
            elif item.output:
                for nodes, output in item.products:
                    kinds = {node.results[0].type.dtype for node in nodes}
                    dtypes[output] = DType.F32 if DType.F32 in kinds else kinds.pop()

    visit(graph.body)
    return dtypes


def _owners(graph: StepGraph) -> dict[str, str]:
    """Matmul output value -> step id."""
    return {
        output: step.id
        for step in graph.steps()
        if step.kind is StepKind.MATMUL
        for _, output in step.products
    }


def _scattered(graph: StepGraph, collectives: Collectives) -> dict[str, int]:
    """Lanes of values that are summed in two phases: shares may end behind the last column."""
    columns = {one.name: one.columns for one in collectives.exchanges}
    found: dict[str, int] = {}
    for step in graph.steps():
        if step.kind is StepKind.ALL_REDUCE:
            choice = collectives.steps[step.id]
            if choice.algorithm == TWO_PHASE:
                place = graph.resolve(step.nodes[0].operands[0])
                end = place.start + columns[choice.exchange]
                found[place.base] = max(found.get(place.base, 0), end)
    return found


def _lanes(graph: StepGraph, tiles: Tiles, value: str, owners: dict[str, str]) -> int:
    """Buffer lanes of a value: whole blocks for matmul outputs, whole registers otherwise."""
    if value in owners:
        return tiles.tilings[owners[value]].blocks * TAPE_LANES
    return -(-graph.widths[value] // VECTOR_LANES) * VECTOR_LANES


def buffer_name(value: str) -> str:
    """A Python name for the buffer of a value."""
    return "v_" + re.sub(r"\W+", "_", value).strip("_")


def _region_allocations(buffers: tuple[Buffer, ...], target: Target) -> list[Allocation]:
    regions: dict[str, list[Buffer]] = {}
    for buffer in buffers:
        regions.setdefault(buffer.region, []).append(buffer)
    out = []
    for name in sorted(regions):
        members = regions[name]
        shape = (members[0].shape[0], members[0].region_lanes)
        out.append(
            Allocation(
                name=name,
                bytes=target.padded_bytes(shape, members[0].dtype.bytes),
                op="values " + "; ".join(one.purpose for one in members),
            )
        )
    return out


def new_rows(cache: CacheStream) -> int:
    """Rows of the blocks in which new keys and values of a sequence enter a cache.

    One row lies in one aligned block; several may touch two.
    """
    return 2 * EMBED_ROWS if cache.by_rows else EMBED_ROWS


def _stream_allocations(streams: Streams, target: Target) -> list[Allocation]:
    out = [
        Allocation(
            name=f"{one.name}_ring",
            bytes=target.padded_bytes((one.slots, *one.item_shape), one.dtype.bytes),
            op=one.purpose,
        )
        for one in streams.streams
    ]
    for cache in streams.caches:
        rows = new_rows(cache)
        tile = sum(
            target.padded_bytes((cache.slots, cache.tile, width), 2) for width in cache.widths
        )
        new = sum(target.padded_bytes((cache.batch, rows, width), 2) for width in cache.widths)
        out += [
            Allocation(name=f"{cache.name}_ring", bytes=tile, op="key and value tiles"),
            Allocation(name=f"{cache.name}_new", bytes=new, op="new key and value rows"),
        ]
    return out


def _exchange_allocations(
    exchanges: tuple[ExchangePlan, ...], ranks: int, target: Target
) -> list[Allocation]:
    return [
        Allocation(
            name=f"{one.name}_{suffix}",
            bytes=target.padded_bytes(shape, dtype.bytes),
            op="exchange",
        )
        for one in exchanges
        for suffix, shape, dtype in exchange_buffers(one, ranks)
    ]


def _expert_allocations(rings: tuple[ExpertRing, ...], target: Target) -> list[Allocation]:
    return [
        Allocation(
            name=f"{ring.name}_{suffix}",
            bytes=target.padded_bytes(shape, dtype.bytes),
            op="chosen experts",
        )
        for ring in rings
        for suffix, shape, dtype in ring.arrays()
    ]


def _embed_allocations(graph: StepGraph, target: Target) -> list[Allocation]:
    """Blocks of table rows, one set for all lookups in one table."""
    local = graph.sharded.graph
    first: dict[str, str] = {}
    for step in graph.steps():
        if step.kind is StepKind.EMBED:
            first.setdefault(step.nodes[0].operands[1], step.id)
    return [
        Allocation(
            name=f"{step}_blocks",
            bytes=target.padded_bytes((local.rows, EMBED_ROWS, local.params[key].type.shape[1]), 2),
            op="embedding rows",
        )
        for key, step in first.items()
    ]


def _mask_allocations(graph: StepGraph, padded_rows: int, target: Target) -> list[Allocation]:
    found = []
    for step in graph.steps():
        if step.masks:
            lanes = mask_lanes(graph.resolve(step.nodes[-1].operands[0]).width)
            size = target.padded_bytes((padded_rows, lanes), DType.I32.bytes)
            name = f"{step.masks}_block"
            found.append(Allocation(name=name, bytes=size, op="masks of allowed tokens"))
    return found


def _carried_allocations(graph: StepGraph, padded_rows: int, target: Target) -> list[Allocation]:
    samples = samples_of(graph)
    size = target.padded_bytes((padded_rows, VECTOR_LANES), DType.F32.bytes)
    return [
        Allocation(name=f"{name}_rows", bytes=size, op="of the drafts, from round to round")
        for name in (samples.proposed if samples else ())
    ]


def _walk_allocations(graph: StepGraph, padded_rows: int, target: Target) -> list[Allocation]:
    local, found = graph.sharded.graph, []
    for step in graph.steps():
        operands = step.nodes[0].operands
        scratch: tuple[Scratch, ...] = ()
        if step.kind is StepKind.SELECTOR_WALK:
            rank = local.params[operands[3]].type.shape[1]
            scratch = walk_scratch(graph.resolve(operands[0]).width, rank, local.batch, padded_rows)
        elif step.kind is StepKind.MARKOV_WALK:
            rank = local.params[operands[1]].type.shape[1]
            scratch = markov_scratch(rank, graph.resolve(operands[0]).width, local.batch)
        for one in scratch:
            if one.kind in (DType.BF16.value, DType.F32.value):
                size = target.padded_bytes(one.shape, DType(one.kind).bytes)
                op = "what a walk of drafts needs"
                found.append(Allocation(name=f"{step.id}_{one.name}", bytes=size, op=op))
    return found
