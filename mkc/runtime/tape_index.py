"""Where the weights of a graph lie in the operands of its kernel.

A program mirrors the blocks of its graph: a loop for every repeat region, in order. Within a block
a projection is found by the key of its weight, a small vector in the page of the block. Which
instance of a stacked weight is meant is the number of earlier executions of the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from mkc.runtime.pack import executions
from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_store import ExpertPlan
from mkc.schedule.expert_store import ExpertSlice
from mkc.schedule.mixing_phases import LatentAttentionPhase
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Piece
from mkc.schedule.program import Program
from mkc.schedule.program import StreamWaitPhase
from mkc.schedule.stream_plans import PageRow


@dataclass(frozen=True, kw_only=True)
class Projection:
    """The fused matrix that a weight is part of.

    Attributes:
      rows: first tape row of every execution; empty for a narrow matmul.
      granule: every execution's first row and the matrix's K are multiples of it, as is the tape.
      array: the operand that holds the matrix.
      piece: the weight's columns.
    """

    phase: MatmulPhase | NarrowMatmulPhase
    rows: tuple[int, ...]
    granule: int
    array: str
    piece: Piece


@dataclass(frozen=True, kw_only=True)
class ExpertUse:
    """A mixture of experts.

    Attributes:
      plan: where its matrices lie.
      held: what an entry of them is.
    """

    plan: ExpertPlan
    held: ExpertSlice


@dataclass(frozen=True, kw_only=True)
class BlockIndex:
    """The weights of one block, regions left out.

    Attributes:
      projections: weight key -> its uses in program order.
      tables: weight key -> operand.
      page: operand with the small vectors, one item per execution; empty without vectors.
      vectors: parameter key -> its rows in an item; one for each tap of a convolution weight.
      matrices: weight key -> operand that has it as the checkpoint does, an item per execution.
      experts: keys of the matrices of a mixture -> where they lie.
      inner: the repeat regions in order.
    """

    projections: dict[str, tuple[Projection, ...]]
    tables: dict[str, str]
    page: str
    vectors: dict[str, tuple[PageRow, ...]]
    matrices: dict[str, str]
    experts: dict[tuple[str, ...], ExpertUse]
    inner: tuple[BlockIndex, ...]


def tape_rows(program: Program) -> dict[str, tuple[int, ...]]:
    """First tape row of every execution of every matmul, by phase id."""
    found: dict[str, list[int]] = {}
    row = 0
    for phase, _ in executions(program.body):
        if isinstance(phase, MatmulPhase):
            found.setdefault(phase.id, []).append(row)
            row += phase.tape_rows
    assert row == program.tape.rows, f"{row} tape rows, planned {program.tape.rows}"
    return {key: tuple(rows) for key, rows in found.items()}


def index_weights(program: Program) -> BlockIndex:
    """The index of the top block."""
    return _block(program, program.body, tape_rows(program))


def _block(
    program: Program, body: tuple[Phase | Loop, ...], rows: dict[str, tuple[int, ...]]
) -> BlockIndex:
    arrays = {stream.name: stream.array for stream in program.streams}
    projections: dict[str, tuple[Projection, ...]] = {}
    tables: dict[str, str] = {}
    matrices: dict[str, str] = {}
    experts: dict[tuple[str, ...], ExpertUse] = {}
    page = ""
    for phase in body:
        if isinstance(phase, MatmulPhase | NarrowMatmulPhase):
            array = "tape" if isinstance(phase, MatmulPhase) else arrays[phase.stream]
            first = rows.get(phase.id, ())
            granule = gcd(phase.K, program.tape.rows, *first)
            for piece in phase.pieces:
                use = Projection(phase=phase, rows=first, granule=granule, array=array, piece=piece)
                projections[piece.param] = (*projections.get(piece.param, ()), use)
        elif isinstance(phase, EmbedPhase):
            tables[phase.param] = phase.table
        elif isinstance(phase, LatentAttentionPhase):
            operand = next(one for one in program.operands if one.name == arrays[phase.up])
            matrices[operand.param] = operand.name
        elif isinstance(phase, ExpertsPhase):
            mixture = _experts(program, phase.experts)
            experts[mixture.plan.params] = mixture
        elif isinstance(phase, StreamWaitPhase) and phase.stream in program.pages:
            assert not page, f"a block with two pages, {page} and {phase.stream}"
            page = phase.stream
    vectors: dict[str, tuple[PageRow, ...]] = {}
    for row in program.pages[page] if page else ():
        vectors[row.param] = (*vectors.get(row.param, ()), row)
    return BlockIndex(
        projections=projections,
        tables=tables,
        page=arrays[page] if page else "",
        vectors=vectors,
        matrices=matrices,
        experts=experts,
        inner=tuple(_block(program, one.body, rows) for one in body if isinstance(one, Loop)),
    )


def _experts(program: Program, name: str) -> ExpertUse:
    plan = next(one for one in program.experts if one.name == name)
    ring = next(one for one in program.expert_rings if one.name == plan.ring)
    return ExpertUse(plan=plan, held=ring.slice)
