"""Packed weights read back: every operand holds the checkpoint, divided over the ranks.

The tape is read as prefill reads it, `[blocks, K, 256]` per matrix with an einsum, and what all
ranks compute together is compared with the whole matrix of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.ir.types import TensorType
from mkc.ir.types import axis
from mkc.passes.pipeline import Lowered
from mkc.passes.streams import rotary_frequencies
from mkc.runtime.pack import Packer
from mkc.runtime.pack import tape_matrix
from mkc.runtime.shards import join_shards
from mkc.runtime.shards import take_shard
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Piece
from tests.generate_weights import weights
from tests.goldens import golden_case
from tests.passes.lowering import dense_graph
from tests.passes.lowering import lowered
from tests.passes.machine import unrolled

type Array = NDArray[Any]

ROWS = 3
CASES = [
    *((name, ranks) for name in ("qwen38_mini", "qwen38_lane") for ranks in (1, 2, 8)),
    ("dense", 2),
]


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Operands of all ranks, and the checkpoint they were packed from."""

    lowered: Lowered
    checkpoint: Mapping[str, Array]
    ranks: int

    def operand(self, name: str, rank: int) -> Array:
        return packer(self).operand(name, rank)

    def tensor(self, key: str, instance: int) -> Array:
        """A whole tensor of the checkpoint, in f32."""
        param = self.lowered.steps.sharded.full.params[key]
        return np.asarray(self.checkpoint[param.tensor_names()[instance]], np.float32)


def packer(packed: Packed) -> Packer:
    return Packer(
        program=packed.lowered.program,
        sharded=packed.lowered.steps.sharded,
        load=lambda name: packed.checkpoint[name],
    )


@cache
def pack(name: str, ranks: int) -> Packed:
    checkpoint = weights(dense_graph(), 1) if name == "dense" else golden_case(name).weights()
    return Packed(lowered=lowered(name, ranks), checkpoint=checkpoint, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix on the tape: tape rows `first` .. `first + blocks * K`."""

    phase: MatmulPhase
    instance: int
    first: int

    def product(self, x: Array, tape: Array) -> Array:
        """x [rows, K] times the matrix, padding included."""
        K, blocks = self.phase.K, self.phase.blocks
        rows = np.asarray(tape[self.first : self.first + K * blocks], np.float32)
        result = np.einsum("rk,bkn->rbn", x, rows.reshape(blocks, K, 256))
        return result.reshape(len(x), blocks * 256)


def matrices(one: Lowered) -> Iterator[Matrix]:
    """All matrices in the order in which the program consumes them."""
    first = 0
    executed: dict[str, int] = {}
    for phase in unrolled(one.program.body):
        if isinstance(phase, MatmulPhase):
            instance = executed.get(phase.id, 0)
            executed[phase.id] = instance + 1
            yield Matrix(phase=phase, instance=instance, first=first)
            first += phase.K * phase.blocks
    assert first == one.program.tape.rows


def together(packed: Packed, piece: Piece, x: Array, products: list[Array]) -> Array:
    """What the ranks' products are together: joined columns, or a sum.

    Args:
      products: one per rank, of the rank's share of x with its share of the weight.
    """
    sharded = packed.lowered.steps.sharded
    sharding = sharded.params[piece.param]
    out = sharded.full.params[piece.param].type.axes[0]
    parts = [one[:, piece.column : piece.column + piece.width] for one in products]
    if sharding.axis == 1:
        return np.sum(parts, axis=0)
    result = TensorType(dtype=sharded.full.params[piece.param].type.dtype, axes=(axis(ROWS), out))
    return join_shards(parts, result, replace(sharding, axis=1 if sharding.axis == 0 else None))


def share(packed: Packed, piece: Piece, x: Array, rank: int) -> Array:
    """The rank's share of the input: all of it, or the units that its weight rows belong to."""
    sharded = packed.lowered.steps.sharded
    sharding = sharded.params[piece.param]
    if sharding.axis != 1:
        return x
    type_ = sharded.full.params[piece.param].type
    whole = TensorType(dtype=type_.dtype, axes=(axis(ROWS), type_.axes[1]))
    return np.asarray(take_shard(x, whole, replace(sharding, once=False), rank))


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_tape_computes_every_projection(name: str, ranks: int) -> None:
    packed = pack(name, ranks)
    tapes = [packed.operand("tape", rank) for rank in range(ranks)]
    rng = np.random.default_rng(0)
    checked = 0
    for matrix in matrices(packed.lowered):
        for piece in matrix.phase.pieces:
            weight = packed.tensor(piece.param, matrix.instance)
            x = rng.integers(-2, 3, (ROWS, weight.shape[1])).astype(np.float32)
            products = [
                matrix.product(share(packed, piece, x, rank), tapes[rank]) for rank in range(ranks)
            ]
            found = together(packed, piece, x, products)
            np.testing.assert_allclose(found, x @ weight.T, rtol=1e-4, atol=1e-5)
            checked += 1
        padding = products[0][:, matrix.phase.columns :]
        assert not padding.any(), "columns behind the last one are zero"
    assert checked > 8


@pytest.mark.parametrize(("name", "ranks"), [one for one in CASES if one[0] == "qwen38_lane"])
def test_narrow_weights_compute_their_projections(name: str, ranks: int) -> None:
    """Rows of an item: K / 256 blocks of lanes, in each of them all outputs, padded to 16."""
    packed = pack(name, ranks)
    program = packed.lowered.program
    phases = [one for one in program.phases() if isinstance(one, NarrowMatmulPhase)]
    assert phases
    rng = np.random.default_rng(0)
    for phase in phases:
        stream = next(one for one in program.streams if one.name == phase.stream)
        operands = [packed.operand(stream.array, rank) for rank in range(ranks)]
        for instance in range(stream.items):
            for piece in phase.pieces:
                weight = packed.tensor(piece.param, instance)
                x = rng.integers(-2, 3, (ROWS, phase.K)).astype(np.float32)
                products = []
                for operand in operands:
                    blocks = np.asarray(operand[instance], np.float32)
                    blocks = blocks.reshape(phase.K // 256, -1, 256)
                    lanes = x.reshape(ROWS, phase.K // 256, 256)
                    products.append(np.einsum("rbl,bnl->rn", lanes, blocks))
                found = together(packed, piece, x, products)
                np.testing.assert_allclose(found, x @ weight.T, rtol=1e-4, atol=1e-5)
                assert not products[0][:, phase.columns :].any()


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_pages_hold_the_vectors_they_say(name: str, ranks: int) -> None:
    packed = pack(name, ranks)
    program, sharded = packed.lowered.program, packed.lowered.steps.sharded
    for stream_name, rows in program.pages.items():
        stream = next(one for one in program.streams if one.name == stream_name)
        items = [packed.operand(stream.array, rank) for rank in range(ranks)]
        assert items[0].shape == (stream.items, *stream.item_shape)
        for row in rows:
            for instance in range(stream.items):
                found = [item[instance].ravel()[row.row * 128 :][: row.length] for item in items]
                if row.constant:
                    assert all(one.tolist() == list(row.constant) for one in found)
                    continue
                type_ = sharded.full.params[row.param].type
                vector = TensorType(dtype=type_.dtype, axes=(type_.axes[0],))
                whole = packed.tensor(row.param, instance)
                wanted = whole if row.tap is None else whole[:, 0, row.tap]
                joined = join_shards(found, vector, sharded.params[row.param])
                np.testing.assert_array_equal(joined, wanted)


def test_rotary_frequencies_are_on_a_page() -> None:
    """theta^(-2 i / dim), as f32 computes it."""
    one = pack("dense", 2)
    (table,) = [
        node.op
        for node in one.lowered.steps.sharded.graph.body.nodes()
        if node.op.mnemonic == "rotary_table"
    ]
    (row,) = [row for rows in one.lowered.program.pages.values() for row in rows if row.constant]
    assert row.constant == rotary_frequencies(table)  # type: ignore[arg-type]
    exact = 500_000.0 ** (-np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(row.constant, exact, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen38_mini", "dense"])
def test_the_embedding_table_is_whole_on_every_rank(name: str) -> None:
    packed = pack(name, 2)
    (phase,) = [one for one in packed.lowered.program.phases() if isinstance(one, EmbedPhase)]
    full = packed.tensor(phase.param, 0)
    for rank in range(2):
        table = np.asarray(packed.operand(phase.table, rank), np.float32)
        assert len(table) % 16 == 0, "a row is read with its memory tile"
        np.testing.assert_array_equal(table[: len(full)], full)
        assert not table[len(full) :].any()


def test_a_tape_matrix_is_the_transposed_weight_block_by_block() -> None:
    """Row k of block b holds weight[256 b .. 256 b + 256, k]."""
    weight = np.arange(300 * 4, dtype=np.float32).reshape(300, 4)
    rows = tape_matrix(weight, 2)
    assert rows.shape == (2 * 4, 256)
    assert rows[1].tolist() == weight[:256, 1].tolist()
    assert rows[4 + 3].tolist() == [*weight[256:, 3].tolist(), *[0.0] * (512 - 300)]


def test_a_tensor_of_another_shape_is_refused() -> None:
    packed = pack("dense", 1)
    wrong = {name: value[:1] for name, value in packed.checkpoint.items()}
    with pytest.raises(AssertionError, match="expected"):
        replace(packed, checkpoint=wrong).operand("tape", 0)
