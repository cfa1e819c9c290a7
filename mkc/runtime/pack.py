"""Weights of a checkpoint as the operands of a kernel: tape, pages, narrow weights, tables."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from mkc.ir.types import DType
from mkc.passes.sharding import ShardedGraph
from mkc.runtime.pack_experts import ExpertPacker
from mkc.runtime.shards import Array
from mkc.runtime.shards import take_shard
from mkc.schedule.expert_store import ExpertPlan
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Piece
from mkc.schedule.program import Program
from mkc.schedule.stream_plans import PageRow

type LoadTensor = Callable[[str], Array]  # checkpoint tensor name -> array

DTYPES = {
    DType.BF16: ml_dtypes.bfloat16,
    DType.F32: np.float32,
    DType.I32: np.int32,
    DType.E2M1X2: np.uint8,
    DType.E8M0: np.uint8,
}
# The same in the operands of a kernel, which takes bytes of codes and scales as signed ones.
OPERAND_DTYPES = DTYPES | {DType.E2M1X2: np.int8}


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Builds weight operands, one rank at a time.

    Attributes:
      load: reads a tensor of the checkpoint by name; called again for every rank.
    """

    program: Program
    sharded: ShardedGraph
    load: LoadTensor

    def operand(self, name: str, rank: int) -> Array:
        """The operand `name` (a tape, page, narrow, matrix, experts or table operand)."""
        operand = next(one for one in self.program.operands if one.name == name)
        build = {
            "tape": self._tape,
            "page": self._page,
            "narrow": self._narrow,
            "matrix": self._matrix,
            "experts": self._experts,
            "table": self._table,
        }[operand.role]
        array = build(name, rank)
        assert array.shape == operand.shape, f"{name}: {array.shape}, planned {operand.shape}"
        return array

    def _tensor(self, key: str, instance: int, rank: int) -> Array:
        param = self.sharded.full.params[key]
        full = self.load(param.tensor_name(instance))
        assert full.shape == param.type.shape, f"{key}: {full.shape}, expected {param.type.shape}"
        return take_shard(full, param.type, self.sharded.params[key], rank)

    def _rows(self, pieces: tuple[Piece, ...], instance: int, rank: int) -> Array:
        """The fused weight [N, K] of one instance in bf16."""
        tensors = [self._tensor(piece.param, instance, rank) for piece in pieces]
        return np.concatenate(tensors, axis=0).astype(ml_dtypes.bfloat16)

    def _tape(self, name: str, rank: int) -> Array:
        shape = next(one.shape for one in self.program.operands if one.name == name)
        tape = np.empty(shape, ml_dtypes.bfloat16)
        start = 0
        for phase, instance in executions(self.program.body):
            if isinstance(phase, MatmulPhase):
                matrix = tape_matrix(self._rows(phase.pieces, instance, rank), phase.blocks)
                tape[start : start + matrix.shape[0]] = matrix
                start += matrix.shape[0]
        assert start == shape[0], f"{name}: {start} rows packed, {shape[0]} planned"
        return tape

    def _narrow(self, name: str, rank: int) -> Array:
        items = next(one.shape[0] for one in self.program.operands if one.name == name)
        return np.stack([self.narrow_item(name, instance, rank) for instance in range(items)])

    def narrow_item(self, name: str, instance: int, rank: int) -> Array:
        """One item of a narrow operand: the fused weight rows, lane block by lane block."""
        shape = next(one.shape for one in self.program.operands if one.name == name)
        phase = narrow_phase(self.program, name)
        rows = shape[1] * TAPE_LANES // phase.K
        weight = self._rows(phase.pieces, instance, rank)
        padded = np.zeros((rows, phase.K), weight.dtype)
        padded[: weight.shape[0]] = weight
        blocks = padded.reshape(rows, phase.K // TAPE_LANES, TAPE_LANES).transpose(1, 0, 2)
        return np.ascontiguousarray(blocks).reshape(shape[1:])

    def _matrix(self, name: str, rank: int) -> Array:
        items = next(one.shape[0] for one in self.program.operands if one.name == name)
        return np.stack([self.matrix_item(name, instance, rank) for instance in range(items)])

    def matrix_item(self, name: str, instance: int, rank: int) -> Array:
        """One item of a matrix operand: a weight as the checkpoint has it."""
        operand = next(one for one in self.program.operands if one.name == name)
        return self._tensor(operand.param, instance, rank).astype(ml_dtypes.bfloat16)

    def _experts(self, name: str, rank: int) -> Array:
        items = next(one.shape[0] for one in self.program.operands if one.name == name)
        return np.stack([self.expert_item(name, entry, rank) for entry in range(items)])

    def expert_item(self, name: str, entry: int, rank: int) -> Array:
        """One entry of an operand of experts."""
        plan = expert_plan(self.program, name)
        ring = next(one for one in self.program.expert_rings if one.name == plan.ring)
        packer = ExpertPacker(plan=plan, held=ring.slice, sharded=self.sharded, load=self.load)
        return packer.entry(name, entry, rank)

    def _page(self, name: str, rank: int) -> Array:
        items = next(one.shape[0] for one in self.program.operands if one.name == name)
        return np.stack([self.page_item(name, instance, rank) for instance in range(items)])

    def page_item(self, name: str, instance: int, rank: int) -> Array:
        """One item of a page operand, f32: the small vectors of one execution of a block."""
        stream = next(one for one in self.program.streams if one.array == name)
        item = np.zeros(stream.item_shape, np.float32)
        flat = item.reshape(-1)
        for row in self.program.pages[stream.name]:
            start = row.row * VECTOR_LANES
            flat[start : start + row.length] = self._vector(row, instance, rank)
        return item

    def _vector(self, row: PageRow, instance: int, rank: int) -> Array:
        if not row.param:
            return np.asarray(row.constant, np.float32)
        tensor = self._tensor(row.param, instance, rank)
        found = tensor[row.index] if row.tap is None else tensor[:, 0, row.tap]
        return found.astype(np.float32)

    def _table(self, name: str, rank: int) -> Array:
        operand = next(one for one in self.program.operands if one.name == name)
        full = self.load(self.sharded.full.params[operand.param].tensor_name(0))
        table = np.zeros(operand.shape, ml_dtypes.bfloat16)
        table[: full.shape[0]] = full
        return table


def expert_plan(program: Program, name: str) -> ExpertPlan:
    """The mixture that an operand of experts belongs to."""
    return next(one for one in program.experts if name in (one.gate_up_array, one.down_array))


def narrow_phase(program: Program, name: str) -> NarrowMatmulPhase:
    """The matmul that reads a narrow operand."""
    stream = next(one for one in program.streams if one.array == name)
    return next(
        one
        for one in program.phases()
        if isinstance(one, NarrowMatmulPhase) and one.stream == stream.name
    )


def tape_matrix(weight: Array, blocks: int) -> Array:
    """A weight [N, K] as tape rows [blocks * K, 256]: column blocks of weight^T, zero padded."""
    columns, K = weight.shape
    padded = np.zeros((blocks * TAPE_LANES, K), weight.dtype)
    padded[:columns] = weight
    return padded.reshape(blocks, TAPE_LANES, K).transpose(0, 2, 1).reshape(-1, TAPE_LANES)


def executions(body: tuple[Phase | Loop, ...]) -> Iterator[tuple[Phase, int]]:
    """Every execution of every phase in order, with the number of its earlier executions."""
    counts: dict[str, int] = {}
    for phase in _run(body):
        counts[phase.id] = counts.get(phase.id, -1) + 1
        yield phase, counts[phase.id]


def _run(body: tuple[Phase | Loop, ...]) -> Iterator[Phase]:
    for item in body:
        if isinstance(item, Loop):
            for _ in range(item.count):
                yield from _run(item.body)
        else:
            yield item
