"""The arrays of a kernel: its operands, and what it allocates for a program.

The names and shapes are those of the generated kernel; `tests/schedule/verify` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from mkc.ir.types import DType
from mkc.schedule.exchange_plan import ExchangePlan
from mkc.schedule.exchange_plan import exchange_buffers
from mkc.schedule.expert_store import CHOSEN_ROWS
from mkc.schedule.expert_store import ExpertRing
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import Operand
from mkc.schedule.program import Program
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.verify.events import Place

BLOCK_ROWS = 16  # bf16 rows of a memory tile: the smallest block of rows that a copy may move
VECTOR_ROWS = 8  # of a register
NEW_BLOCKS = 2  # of so many rows, which the rows of a round may touch in a cache
SAMPLING_ROLES = frozenset({"temperature", "top_k", "top_p", "min_p", "seed", "forced"})
SCALAR_ROLES = SAMPLING_ROLES | {"tokens", "positions", "kept", "rounds", "budgets", "stop_ids"}
SCALAR_BYTES = 4
WALK_SEMAPHORES = 4  # ids, the row of the choice before, and candidates of rows in turn
BUDGETS = "s_budgets"  # tokens that every sequence may still emit, in rounds of a scheme
ROUND_SCALARS = ("round_tokens", "round_positions")  # what goes round inside a launch


@dataclass(frozen=True, kw_only=True)
class Array:
    """An array in HBM or VMEM, cut into the units that copies and phases use.

    Attributes:
      shape: as it is allocated.
      blocks: leading dimensions that an index chooses from.
      units: rows, lanes or 1 of one block.
      axis: the dimension of `shape` that the units count.
      on_chip: in VMEM, or in SMEM where it is `scalar`.
      writable: the kernel may write it.
      saved: what the kernel fetches from it and changes must go back to the same place.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType
    blocks: tuple[int, ...] = ()
    units: int = 1
    axis: int = 0
    on_chip: bool = True
    scalar: bool = False
    writable: bool = True
    saved: bool = False

    @cached_property
    def unit_bytes(self) -> int:
        return prod(self.shape) * self.dtype.bytes // (prod(self.blocks) * self.units)

    def has(self, place: Place) -> bool:
        """The place lies inside."""
        blocks = self.blocks
        if len(place.index) != len(blocks) or place.first < 0:
            return False
        for one, size in zip(place.index, blocks, strict=True):
            if not 0 <= one < size:
                return False
        return place.first + place.count <= self.units


@dataclass(frozen=True, kw_only=True)
class Semaphores:
    """An array of DMA semaphores."""

    name: str
    shape: tuple[int, ...]


def arrays_of(program: Program) -> dict[str, Array]:
    """All arrays that copies and phases name, by name."""
    found = [_operand(one) for one in program.operands if one.role not in SCALAR_ROLES]
    tape = program.tape
    found.append(
        Array(
            name="tape_ring",
            shape=(tape.slots, tape.slot_rows, TAPE_LANES),
            dtype=DType.BF16,
            blocks=(tape.slots,),
            units=tape.slot_rows,
            axis=1,
        )
    )
    for stream in program.streams:
        found.append(
            Array(
                name=f"{stream.name}_ring",
                shape=(stream.slots, *stream.item_shape),
                dtype=stream.dtype,
                blocks=(stream.slots,),
            )
        )
    for cache in program.caches:
        blocks = NEW_BLOCKS if cache.by_rows else 1
        for part, width in zip(("key", "value"), cache.widths, strict=True):
            ring = (cache.slots, cache.tile, width)
            new = (cache.batch, blocks * BLOCK_ROWS, width)
            for suffix, shape in (("ring", ring), ("new", new)):
                found.append(
                    Array(
                        name=f"{cache.name}_{part}_{suffix}",
                        shape=shape,
                        dtype=DType.BF16,
                        blocks=shape[:1],
                        units=shape[1],
                        axis=1,
                    )
                )
    for experts in program.expert_rings:
        found += _expert_arrays(experts)
    for plan in program.exchanges:
        found += exchange_arrays(plan, program.ranks)
    for buffer in program.buffers:
        found.append(
            Array(
                name=buffer.region,
                shape=(buffer.shape[0], buffer.region_lanes),
                dtype=buffer.dtype,
                units=buffer.region_lanes,
                axis=1,
            )
        )
    for phase in program.phases():
        if isinstance(phase, EmbedPhase):
            rows = (program.rows, BLOCK_ROWS, phase.output.width)
            found.append(
                Array(
                    name=f"{phase.table.removeprefix('table_')}_blocks",
                    shape=rows,
                    dtype=DType.BF16,
                    blocks=rows[:1],
                    units=BLOCK_ROWS,
                    axis=1,
                )
            )
        elif isinstance(phase, SelectorWalkPhase):
            found += _walk_arrays(program, phase)
        elif isinstance(phase, MarkovWalkPhase):
            found += _markov_arrays(program, phase)
    found += [
        Array(name=f"{one.name}_block", shape=one.shape, dtype=one.dtype)
        for one in program.operands
        if one.role == "token_masks"
    ]
    return {one.name: one for one in [*found, *_carried_rows(program), *_logits(program)]}


def _carried_rows(program: Program) -> list[Array]:
    """Where rows that go from round to round are, inside a launch."""
    if program.round is None:
        return []
    operands = {one.name: one for one in program.operands}
    pairs = [(one.array, operands[one.target]) for one in program.round.rows]
    return [Array(name=name, shape=one.shape, dtype=one.dtype) for name, one in pairs]


def _walk_arrays(program: Program, phase: SelectorWalkPhase) -> list[Array]:
    """Ids of candidates among the scalars, the rows of tables that they ask for."""
    candidates = (2, program.batch * phase.k * BLOCK_ROWS, phase.rank)
    previous = (program.batch, BLOCK_ROWS, phase.rank)
    return [
        Array(
            name=f"{phase.id}_candidate_ids",
            shape=(program.padded_rows, VECTOR_LANES),
            dtype=DType.I32,
            scalar=True,
        ),
        *(
            Array(
                name=f"{phase.id}_{name}",
                shape=shape,
                dtype=DType.BF16,
                blocks=shape[:1],
                units=shape[1],
                axis=1,
            )
            for name, shape in (("previous", previous), ("candidates", candidates))
        ),
    ]


def _markov_arrays(program: Program, phase: MarkovWalkPhase) -> list[Array]:
    """Rows of the table of the tokens before, and the corrected logits of one row of the walk."""
    height = -(-program.batch // VECTOR_ROWS) * VECTOR_ROWS
    previous = (program.batch, BLOCK_ROWS, phase.rank)
    return [
        Array(
            name=f"{phase.id}_previous",
            shape=previous,
            dtype=DType.BF16,
            blocks=previous[:1],
            units=BLOCK_ROWS,
            axis=1,
        ),
        Array(name=f"{phase.id}_scores", shape=(height, phase.logits.width), dtype=DType.F32),
    ]


def _expert_arrays(ring: ExpertRing) -> list[Array]:
    """Slots of matrices; what is known of the choice, in VMEM and among the scalars."""
    slots = {"gate_up", "down"}
    return [
        *(
            Array(
                name=f"{ring.name}_{suffix}",
                shape=shape,
                dtype=dtype,
                blocks=shape[:1] if suffix in slots else (),
            )
            for suffix, shape, dtype in ring.arrays()
        ),
        Array(
            name=f"{ring.name}_chosen",
            shape=(CHOSEN_ROWS, ring.places),
            dtype=DType.I32,
            scalar=True,
        ),
    ]


def _operand(operand: Operand) -> Array:
    """Tapes and tables are rows, caches are blocks of rows, streams are items, masks are whole."""
    blocks, units = operand.shape[:1], 1
    if operand.role in ("tape", "table"):
        blocks, units = (), operand.shape[0]
    elif operand.role in ("token_masks", "carried"):
        blocks = ()
    elif operand.role == "cache":
        blocks, units = operand.shape[:2], operand.shape[2]
    return Array(
        name=operand.name,
        shape=operand.shape,
        dtype=operand.dtype,
        blocks=blocks,
        units=units,
        axis=len(blocks),
        on_chip=False,
        writable=operand.updated,
        saved=operand.updated,
    )


def exchange_arrays(plan: ExchangePlan, ranks: int) -> list[Array]:
    """Send and receive buffers; a receive buffer has a block for everyone who writes into it."""
    # Columns of these travel separately.
    divided: tuple[str, ...] = {"two_level": ("send",), "two_phase": ("parts",)}.get(plan.kind, ())
    if plan.kind == "two_level" and plan.scattered:
        divided = ("send", "total")
    return [
        Array(
            name=f"{plan.name}_{suffix}",
            shape=shape,
            dtype=dtype,
            blocks=shape[:-2],
            units=shape[-1] if suffix in divided else 1,
            axis=1 if suffix in divided else 0,
        )
        for suffix, shape, dtype in exchange_buffers(plan, ranks)
    ]


def receive_arrays(program: Program) -> frozenset[str]:
    """Names of the arrays that other ranks write."""
    return frozenset(
        one.name
        for plan in program.exchanges
        for one in exchange_arrays(plan, program.ranks)
        if one.blocks and one.name != f"{plan.name}_send"
    )


def _logits(program: Program) -> list[Array]:
    if program.logits is None:
        return []
    buffer = next(one for one in program.buffers if one.name == program.logits.buffer)
    rows, lanes = buffer.shape
    shape = (rows, lanes)
    return [Array(name="logits", shape=shape, dtype=DType.F32, units=lanes, axis=1, on_chip=False)]


def semaphores_of(program: Program) -> dict[str, Semaphores]:
    """All DMA semaphores, by name."""
    shapes: dict[str, tuple[int, ...]] = {"tape_sems": (program.tape.slots,)}
    for stream in program.streams:
        shapes[f"{stream.name}_arrived"] = (stream.slots,)
        if stream.writes_back:
            shapes[f"{stream.name}_written"] = (stream.slots,)
    for cache in program.caches:
        shapes[f"{cache.name}_arrived"] = (2, cache.slots)
        shapes[f"{cache.name}_written"] = (2, cache.batch)
    for ring in program.expert_rings:
        shapes[f"{ring.name}_arrived"] = (ring.slots,)
        shapes[f"{ring.name}_sem"] = (1,)
    for plan in program.exchanges:
        shapes[f"{plan.name}_sems"] = (plan.semaphores,)
    for phase in program.phases():
        if isinstance(phase, EmbedPhase):
            shapes[f"{phase.table.removeprefix('table_')}_sem"] = (1,)
        elif isinstance(phase, SelectorWalkPhase):
            shapes[f"{phase.id}_sems"] = (WALK_SEMAPHORES,)
        elif isinstance(phase, MarkovWalkPhase):
            shapes[f"{phase.id}_sems"] = (1,)
    for operand in program.operands:
        if operand.role == "token_masks":
            shapes[f"{operand.name}_sem"] = (1,)
    if program.round is not None and program.round.forced:
        shapes["rows_sem"] = (1,)
    if program.logits is not None:
        shapes["logits_sem"] = (1,)
    return {name: Semaphores(name=name, shape=shape) for name, shape in shapes.items()}


def scalars_of(program: Program) -> dict[str, int]:
    """Scalars in SMEM, by name: arguments, results and what the kernel keeps there."""
    counts = {one.name: prod(one.shape) for one in program.operands if one.role in SCALAR_ROLES}
    rounds, batch, rows = program.rounds_per_launch, program.batch, program.rows
    if program.round is not None:
        counts |= {"emitted": rounds * rows, "counts": rounds * batch, "drafts": rounds * batch}
        counts |= {"ran": 1, "tokens_out": rows, "positions_out": rows, "kept_out": batch}
        counts |= {one.name: one.size for one in program.scalars}
        counts[BUDGETS] = batch
        if program.round.forced:
            counts[program.round.forced] = rows
    elif rounds > 1:
        counts["emitted"] = rounds * batch
        counts["count"] = 1
        counts |= dict.fromkeys(ROUND_SCALARS, batch)
    else:
        counts["next_token"] = batch
    counts |= {f"{cache.name}_awake": cache.batch for cache in program.caches}
    counts |= {one.name: prod(one.shape) for one in arrays_of(program).values() if one.scalar}
    return counts
