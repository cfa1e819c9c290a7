"""Cost of `mkc.ir.ops_markov`; see `mkc.ir.cost`."""

from __future__ import annotations

from mkc.ir.cost import Cost
from mkc.ir.cost import Types
from mkc.ir.cost import blocks
from mkc.ir.facets import COST
from mkc.ir.ops_markov import CutDrafts
from mkc.ir.ops_markov import MarkovWalk


@COST.register(MarkovWalk)
def _markov_walk(op: MarkovWalk, operands: Types, states: Types, results: Types) -> Cost:
    logits, predecessor, successor, _, hidden, head, _ = operands
    rows, vocab = logits.shape
    rank = predecessor.shape[1]
    steps = op.rows - 1
    drafts = rows // op.rows * steps
    # Every step of the walk needs the whole table of successors, and a row of predecessors for
    # each sequence.
    row_bytes = predecessor.bytes // vocab
    return Cost(
        weight_bytes=steps * successor.bytes + drafts * row_bytes + head.bytes,
        mxu_pushes=steps * blocks(rank, vocab),
        vector_elements=drafts * (2 * vocab + 2 * (hidden.shape[1] + rank)),
        flops=2 * drafts * (rank * vocab + hidden.shape[1] + rank),
    )


@COST.register(CutDrafts)
def _cut_drafts(op: CutDrafts, operands: Types, states: Types, results: Types) -> Cost:
    # A few scalars.
    return Cost()
