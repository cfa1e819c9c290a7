"""Pass 30: cuts every weight matrix into loads and sizes the ring.

A matrix [K, N] lies on the tape as N / 256 column blocks of K rows. A load is a run of consecutive
tape rows: several whole blocks where K is small, an equal share of one block where K is large, so
that all loads are near the size at which the memory system is fully used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from math import isqrt
from math import log2
from typing import ClassVar

from mkc.errors import PassSpecError
from mkc.errors import TileError
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.passes.steps import StepLoop
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.exchange_plan import Part
from mkc.schedule.program import TAPE_LANES
from mkc.targets import Target

ROW_BYTES = TAPE_LANES * 2  # a tape row of bf16
ROW_TILE = 16  # bf16 rows of a memory tile: loads and slices start and end on it
LARGEST_RATIO = 1.5  # a load may exceed the wanted size by this much before a block is divided


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How one matrix is read; the fields are those of `MatmulPhase`."""

    K: int
    columns: int
    blocks: int
    blocks_per_step: int
    loads_per_step: int

    @property
    def steps(self) -> int:
        return -(-self.blocks // self.blocks_per_step)

    def loads(self) -> tuple[int, ...]:
        """Tape rows of every load in order."""
        rows = []
        for step in range(self.steps):
            blocks = min(self.blocks_per_step, self.blocks - step * self.blocks_per_step)
            rows += [self.K * blocks // self.loads_per_step] * self.loads_per_step
        return tuple(rows)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tape of one step.

    Attributes:
      tilings: by step id.
      rows: tape rows of one execution of the graph.
      slots, slot_rows: the ring.
    """

    tilings: dict[str, Tiling]
    rows: int
    slots: int
    slot_rows: int


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Chooses loads and the ring.

    Attributes:
      load_bytes: wanted bytes per load; 0 takes the target's, more where the core is the bound.
      ring_bytes: wanted bytes of the ring; 0 takes the target's.
      step: id of a matmul whose loads have a size of their own; empty for none.
      step_load_bytes: wanted bytes of its loads.
    """

    name: ClassVar[str] = "tile"
    load_bytes: int = 0
    ring_bytes: int = 0
    step: str = ""
    step_load_bytes: int = 0

    def apply(self, graph: StepGraph, target: Target, log: DecisionLog) -> Tiles:
        """Returns the loads of every matmul. Raises `TileError` for a K that no tile can hold."""
        wanted = self.load_bytes or _wanted_load_bytes(graph, target)
        segments = segments_of(graph.body)
        smallest = min(sum(_bytes(graph, step) for step in segment) for segment in segments)
        # A loop body that is smaller than a few loads would leave a ring of one or two slots.
        limited = max(ROW_TILE * ROW_BYTES, min(wanted, smallest // MIN_LOADS_PER_SEGMENT))
        sizes = self._load_sizes(graph, limited)
        tilings = {
            step.id: choose_tiling(graph, step, sizes[step.id] // ROW_BYTES)
            for step in graph.steps()
            if step.kind is StepKind.MATMUL
        }
        slot_rows = max(max(tiling.loads()) for tiling in tilings.values())
        slots = self._slots(segments, tilings, slot_rows, target)
        rows = _total(graph.body, MATMULS, lambda step: sum(tilings[step.id].loads()))
        because = self._why_loads(limited, wanted, target)
        log.choose("tile.load_bytes", passed=self.name, chosen=limited, because=because)
        self._record_ring(log, slots, slot_rows, target)
        self._record_loads(log, graph, tilings)
        return Tiles(tilings=tilings, rows=rows, slots=slots, slot_rows=slot_rows)

    def _load_sizes(self, graph: StepGraph, usual: int) -> dict[str, int]:
        """Wanted bytes per load of every matmul. Raises `PassSpecError` for a step that is none."""
        sizes = {step.id: usual for step in graph.steps() if step.kind is StepKind.MATMUL}
        if self.step:
            if self.step not in sizes:
                text = f"tile{{step={self.step},step_load_bytes={self.step_load_bytes}}}"
                problem = f"'{self.step}' is no matmul"
                raise PassSpecError(text=text, problem=problem, known=sizes)
            sizes[self.step] = max(ROW_TILE * ROW_BYTES, self.step_load_bytes)
        return sizes

    def _slots(
        self,
        segments: list[list[Step]],
        tilings: dict[str, Tiling],
        slot_rows: int,
        target: Target,
    ) -> int:
        """Ring slots: the wanted bytes, but no more loads ahead than any loop body has."""
        slot_bytes = slot_rows * ROW_BYTES
        wanted = ceil((self.ring_bytes or wanted_ring_bytes(target)) / slot_bytes) + IDLE_SLOTS
        fewest = min(sum(len(tilings[step.id].loads()) for step in segment) for segment in segments)
        return max(1, min(wanted, fewest))

    def _why_loads(self, chosen: int, wanted: int, target: Target) -> str:
        if chosen < wanted:
            return f"a share of the smallest loop body; {wanted} bytes were wanted"
        if self.load_bytes:
            return "asked for"
        if wanted > target.dma.load_target_bytes:
            return "larger than the target's load size: bound by the core, not by the memory"
        return "the target's load size"

    def _record_ring(self, log: DecisionLog, slots: int, slot_rows: int, target: Target) -> None:
        log.choose(
            "tile.ring",
            passed=self.name,
            chosen=f"{slots} slots of {slot_rows} rows",
            because=f"{slots * slot_rows * ROW_BYTES} bytes; the memory saturates with "
            f"{target.dma.saturation_bytes_in_flight} in flight, an exchange needs the rest",
            rejected={"deeper": "more loads ahead than the shortest loop body consumes"},
        )

    def _record_loads(self, log: DecisionLog, graph: StepGraph, tilings: dict[str, Tiling]) -> None:
        for step in graph.steps():
            if step.kind is StepKind.MATMUL:
                tiling = tilings[step.id]
                log.choose(
                    f"tile.{step.id}",
                    passed=self.name,
                    chosen=f"{len(tiling.loads())} loads of {tiling.loads()[0]} rows",
                    because=f"K = {tiling.K}: {tiling.blocks_per_step} blocks per load, "
                    f"{tiling.loads_per_step} loads per block",
                )


MIN_LOADS_PER_SEGMENT = 4
IDLE_SLOTS = 2  # one is being consumed and one has landed: neither is in flight
LARGER_FACTOR = 2  # loads are larger by this where the core is the bound
MOST_ROWS = 32  # of a step, above which its activations leave no room for larger loads
MATMULS = (StepKind.MATMUL,)
EXCHANGES = (StepKind.ALL_REDUCE, StepKind.ALL_GATHER)


def _wanted_load_bytes(graph: StepGraph, target: Target) -> int:
    """The target's load size, and larger loads where the core is the bound.

    It starts and awaits every load, so fewer loads save its time. With several rows per sequence
    every exchange takes longer, and the core does not keep up with the memory; nor does it where
    multiplying and waiting for exchanges takes longer than the tape.
    """
    local = graph.sharded.graph
    bound = local.rows_per_sequence > 1 or _core_us(graph, target) > _tape_us(graph, target)
    larger = bound and local.rows <= MOST_ROWS
    return target.dma.load_target_bytes * (LARGER_FACTOR if larger else 1)


def _tape_us(graph: StepGraph, target: Target) -> float:
    """The time that the memory needs for the tape."""
    size = _total(graph.body, MATMULS, lambda step: _bytes(graph, step))
    return size / target.hbm.sustained_bytes_per_us


def _core_us(graph: StepGraph, target: Target) -> float:
    """The least time that the core needs: the weights' pushes, and a wait for every exchange."""
    block = target.mxu.width * ROW_BYTES
    pushes = _total(graph.body, MATMULS, lambda step: _bytes(graph, step) // block)
    exchanges = 0
    if graph.sharded.ranks > 1:
        exchanges = _total(graph.body, EXCHANGES, lambda step: step.part is not Part.START)
    return pushes * target.mxu.push_us + exchanges * target.exchange.latency_us


def wanted_ring_bytes(target: Target) -> int:
    """Bytes to have in flight: enough to saturate the memory, and what arrives during an exchange.

    While the core waits for an exchange nothing is consumed; only a ring this deep keeps the tape
    moving.
    """
    exchange_us = target.exchange.latency_us + target.exchange.drain_us
    return target.dma.saturation_bytes_in_flight + int(
        exchange_us * target.hbm.sustained_bytes_per_us
    )


def choose_tiling(graph: StepGraph, step: Step, wanted_rows: int) -> Tiling:
    """The division of one matrix whose loads are nearest to `wanted_rows`.

    Whole blocks per load are preferred to divide the matrix evenly; a shorter last load is accepted
    when no even division comes near.
    """
    K, columns = matrix_shape(graph, step)
    if K % ROW_TILE:
        node = step.nodes[0]
        raise TileError(
            op=node.op.mnemonic,
            location=node.location,
            length=K,
            whole=graph.sharded.full.params[node.operands[1]].type.shape[1],
            multiple=ROW_TILE,
            param=node.operands[1],
            dimension=graph.sharded.full.params[node.operands[1]].type.axes[1].name,
        )
    blocks = -(-columns // TAPE_LANES)
    if wanted_rows * LARGEST_RATIO < K:
        pieces = min(_divisors(K // ROW_TILE), key=lambda n: _distance(K // n, wanted_rows))
        return Tiling(K=K, columns=columns, blocks=blocks, blocks_per_step=1, loads_per_step=pieces)
    even = min(_divisors(blocks), key=lambda n: _distance(K * n, wanted_rows))
    uneven = min(max(1, round(wanted_rows / K)), blocks)
    far = _distance(K * even, wanted_rows) > log2(LARGEST_RATIO)
    return Tiling(
        K=K,
        columns=columns,
        blocks=blocks,
        blocks_per_step=uneven if far else even,
        loads_per_step=1,
    )


def matrix_shape(graph: StepGraph, step: Step) -> tuple[int, int]:
    """K and N of the fused matrix of one rank."""
    params = graph.sharded.graph.params
    shapes = [params[node.operands[1]].type.shape for node in step.nodes]
    return shapes[0][1], sum(shape[0] for shape in shapes)


def segments_of(body: tuple[Step | StepLoop, ...]) -> list[list[Step]]:
    """Runs of matmuls that no loop border interrupts, in program order; empty ones left out."""
    segments: list[list[Step]] = [[]]
    for item in body:
        if isinstance(item, StepLoop):
            segments += [*segments_of(item.body), []]
        elif item.kind is StepKind.MATMUL:
            segments[-1].append(item)
    return [segment for segment in segments if segment]


def _bytes(graph: StepGraph, step: Step) -> int:
    K, columns = matrix_shape(graph, step)
    return K * -(-columns // TAPE_LANES) * ROW_BYTES


def _total(
    body: tuple[Step | StepLoop, ...], kinds: tuple[StepKind, ...], amount: Callable[[Step], int]
) -> int:
    """The sum over the steps of some kinds, loops counted."""
    total = 0
    for item in body:
        if isinstance(item, StepLoop):
            total += item.count * _total(item.body, kinds, amount)
        elif item.kind in kinds:
            total += amount(item)
    return total


def _distance(rows: int, wanted: int) -> float:
    return abs(log2(rows / wanted))


def _divisors(number: int) -> list[int]:
    """Ascending; found in pairs, so that a large number takes its square root of steps."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
