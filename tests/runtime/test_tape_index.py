"""Every weight of a graph is found in the packed operands, in every instance."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping

import numpy as np
import pytest

from mkc.ir.graph import Block
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.ops import Embed
from mkc.ir.ops import Linear
from mkc.passes.pipeline import Lowered
from mkc.runtime.pack import Packer
from mkc.runtime.shards import take_shard
from mkc.runtime.tape_index import BlockIndex
from mkc.runtime.tape_index import Projection
from mkc.runtime.tape_index import index_weights
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import MatmulPhase
from tests.goldens import CASES
from tests.kernel.harness import golden_subject
from tests.kernel.harness import lower
from tests.runtime.rounds_backends import LANE
from tests.runtime.rounds_backends import MINI
from tests.runtime.rounds_backends import lowered_round
from tests.runtime.rounds_backends import tensors_of


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
    check(lower(subject, ranks=ranks, batch=1), subject.weights)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [MINI, LANE])
def test_every_weight_of_a_round_is_found(name: str, ranks: int) -> None:
    """The LM head twice; keys and values of the drafter once, with two readers."""
    lowered = lowered_round(name, ranks=ranks, batch=1)
    check(lowered, tensors_of(name))
    index = index_weights(lowered.program)
    first, second = index.projections["lm_head.weight"]
    assert first.rows[0] < second.rows[0]
    drafter = index if name == LANE else index.inner[-1]  # one layer is no region
    (use,) = next(
        uses
        for key, uses in drafter.projections.items()
        if key.startswith("draft.") and key.endswith("k_proj.weight")
    )
    assert isinstance(use.phase, MatmulPhase)
    assert len(use.phase.also) == 1


def check(lowered: Lowered, weights: Mapping[str, np.ndarray]) -> None:
    """Every use of every weight has the bytes of the checkpoint, on the last rank."""
    ranks = lowered.program.ranks
    sharded, program = lowered.steps.sharded, lowered.program
    packer = Packer(program=program, sharded=sharded, load=weights.__getitem__)
    rank = ranks - 1
    arrays = {
        one.name: packer.operand(one.name, rank)
        for one in program.operands
        if one.role in ("tape", "page", "narrow")
    }
    found = set()
    tables = {one.param for one in program.operands if one.role == "table"}
    for node, index, count in blocks(sharded.full.body, index_weights(program), 1):
        if isinstance(node.op, Embed):
            assert index.tables[node.operands[1]] in {one.name for one in program.operands}
            continue
        for key in (one for one in node.operands if one in sharded.full.params):
            if key in tables:
                continue
            param = sharded.full.params[key]
            found.add(key)
            assert param.instances == count
            for instance, tensor in enumerate(param.tensor_names()):
                expected = take_shard(weights[tensor], param.type, sharded.params[key], rank)
                if isinstance(node.op, Linear):
                    uses = index.projections[key]
                    stored = [projection(one, arrays, instance) for one in uses]
                else:
                    stored = [vectors(index, arrays, key, instance).reshape(expected.shape)]
                for one in stored:
                    same = np.array_equal(one.astype(np.float32), expected.astype(np.float32))
                    assert same, tensor
    assert found == sharded.full.params.keys() - tables


def projection(use: Projection, arrays: dict[str, np.ndarray], instance: int) -> np.ndarray:
    """[columns, K]."""
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
    """A vector [n], several of them [.., n], or the taps of a convolution [n, taps]."""
    flat = arrays[index.page][instance].reshape(-1)
    rows = sorted(index.vectors[key], key=lambda row: row.index)
    parts = [flat[row.row * VECTOR_LANES :][: row.length] for row in rows]
    return np.stack(parts, axis=0 if rows[0].tap is None else -1)
