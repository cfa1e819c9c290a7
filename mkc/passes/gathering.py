"""Which weights with a whole operand and a whole result are divided all the same.

A projection whose result every rank needs as a whole is either on every rank, or divided by its
output columns, and an exchange gathers them: fewer bytes, one exchange more, the same bits. The
rows of one sequence decide, so that weights are packed alike for every batch.
"""

from __future__ import annotations

from mkc.ir import ops
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import TAPE_LANES
from mkc.targets import Target

PASS = "shard"
WHOLE = "every rank has the whole weight"
GATHERED = "divided by output columns, an exchange gathers them"


def choose_gathered(
    graph: Graph, whole: frozenset[str], ranks: int, target: Target, log: DecisionLog
) -> frozenset[str]:
    """Of the parameters `whole` on every rank, those that are cheaper divided and gathered."""
    readers: dict[str, list[Node]] = {}
    for node in graph.body.nodes():
        for name in node.operands:
            if name in whole:
                readers.setdefault(name, []).append(node)
    return frozenset(
        key
        for key in sorted(whole)
        if _divides(graph.params[key].type, readers[key], ranks)
        and _is_cheaper(graph, key, ranks, target, log)
    )


def _divides(weight: TensorType, readers: list[Node], ranks: int) -> bool:
    """Every rank gets as many columns, side by side, and they travel in bf16."""
    if not all(
        isinstance(node.op, ops.Linear) and node.results[0].type.dtype is DType.BF16
        for node in readers
    ):
        return False
    rows = weight.axes[0]
    return len(rows.parts) == 1 and rows.parts[0].count % ranks == 0


def _is_cheaper(graph: Graph, key: str, ranks: int, target: Target, log: DecisionLog) -> bool:
    columns, K = graph.params[key].type.shape
    share = columns // ranks
    whole_us = _stream_us(K, columns, target)
    sent = (ranks - 1) * graph.rows_per_sequence * share * DType.BF16.bytes
    gathered_us = _stream_us(K, share, target) + target.exchange_us(sent)
    costs = {WHOLE: whole_us, GATHERED: gathered_us}
    chosen, other = sorted(costs, key=lambda name: costs[name])
    log.choose(
        f"shard.whole.{key}",
        passed=PASS,
        chosen=f"{chosen}, predicted {costs[chosen]:.2f} us",
        because="its result meets a value that every rank has as a whole",
        rejected={other: f"predicted {costs[other]:.2f} us"},
    )
    return gathered_us < whole_us


def _stream_us(K: int, columns: int, target: Target) -> float:
    """Time to stream a matrix, whose last block of columns is padded."""
    blocks = -(-columns // TAPE_LANES)
    return K * blocks * TAPE_LANES * DType.BF16.bytes / target.hbm.sustained_bytes_per_us
