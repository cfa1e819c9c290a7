"""Every weight of a graph is found in the packed operands, in every instance."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mkc.ir.graph import Block
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.ops import Embed
from mkc.ir.ops import Linear
from mkc.runtime.pack import Packer
from mkc.runtime.shards import take_shard
from mkc.runtime.tape_index import BlockIndex
from mkc.runtime.tape_index import index_weights
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import MatmulPhase
from tests.goldens import CASES
from tests.kernel.harness import golden_subject
from tests.kernel.harness import lower


def blocks(block: Block, index: BlockIndex, count: int) -> Iterator[tuple[Node, BlockIndex, int]]:
    """Every node with the index of its block and how often the block runs."""
    regions = [item for item in block.items if isinstance(item, Repeat)]
    assert len(regions) == len(index.inner)
    for item in block.items:
        if isinstance(item, Node):
            yield item, index, count
    for region, inner in zip(regions, index.inner, strict=True):
        yield from blocks(region.body, inner, count * region.count)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_found(name: str, ranks: int) -> None:
    subject = golden_subject(name)
    lowered = lower(subject, ranks=ranks, batch=1)
    sharded, program = lowered.steps.sharded, lowered.program
    packer = Packer(program=program, sharded=sharded, load=lambda one: subject.weights[one])
    rank = ranks - 1
    arrays = {
        one.name: packer.operand(one.name, rank)
        for one in program.operands
        if one.role in ("tape", "page", "narrow")
    }
    found = set()
    for node, index, count in blocks(sharded.full.body, index_weights(program), 1):
        if isinstance(node.op, Embed):
            assert index.tables[node.operands[1]] in {one.name for one in program.operands}
            continue
        for key in (one for one in node.operands if one in sharded.full.params):
            param = sharded.full.params[key]
            found.add(key)
            assert param.instances == count
            for instance, tensor in enumerate(param.tensor_names()):
                full = subject.weights[tensor]
                expected = take_shard(full, param.type, sharded.params[key], rank)
                if isinstance(node.op, Linear):
                    stored = projection(index, arrays, key, instance)
                else:
                    stored = vectors(index, arrays, key, instance).reshape(expected.shape)
                assert np.array_equal(stored.astype(np.float32), expected.astype(np.float32)), (
                    tensor
                )
    tables = {node.operands[1] for node in sharded.full.body.nodes() if isinstance(node.op, Embed)}
    assert found == sharded.full.params.keys() - tables


def projection(
    index: BlockIndex, arrays: dict[str, np.ndarray], key: str, instance: int
) -> np.ndarray:
    """[columns, K]."""
    (use,) = index.projections[key]
    K, piece = use.phase.K, use.piece
    if isinstance(use.phase, MatmulPhase):
        first = use.rows[instance]
        assert first % use.granule == K % use.granule == len(arrays["tape"]) % use.granule == 0
        rows = arrays["tape"][first : first + use.phase.tape_rows]
        matrix = rows.reshape(-1, K, TAPE_LANES).transpose(0, 2, 1).reshape(-1, K)
    else:
        item = arrays[use.array][instance].reshape(K // TAPE_LANES, -1, TAPE_LANES)
        matrix = item.transpose(1, 0, 2).reshape(-1, K)
    return matrix[piece.column : piece.column + piece.width]


def vectors(
    index: BlockIndex, arrays: dict[str, np.ndarray], key: str, instance: int
) -> np.ndarray:
    """A vector [n], or the taps of a convolution [n, taps]."""
    flat = arrays[index.page][instance].reshape(-1)
    rows = index.vectors[key]
    parts = [flat[row.row * VECTOR_LANES :][: row.length] for row in rows]
    return parts[0] if rows[0].tap is None else np.stack(parts, axis=-1)
