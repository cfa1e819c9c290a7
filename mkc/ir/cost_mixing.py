"""Cost of `mkc.ir.ops_mixing`; see `mkc.ir.cost`."""

from __future__ import annotations

from mkc.ir.cost import Cost
from mkc.ir.cost import Types
from mkc.ir.cost import blocks
from mkc.ir.facets import COST
from mkc.ir.ops_mixing import CacheForm
from mkc.ir.ops_mixing import LatentAttention
from mkc.ir.ops_mixing import MixBlocks
from mkc.ir.ops_mixing import ResidualBlocks
from mkc.ir.ops_mixing import ScaleHeads
from mkc.ir.ops_mixing import StoreBlock


@COST.register(LatentAttention)
def _latent_attention(op: LatentAttention, operands: Types, states: Types, results: Types) -> Cost:
    q, _, latent, shared_k, up, _ = operands
    rows, heads, dim = q.shape
    rank, shared, value_dim = latent.shape[1], shared_k.shape[1], results[0].shape[2]
    batch, context = states[0].shape[:2]
    scores = rows * heads * context
    read = sum(one.bytes for one in states)
    written = sum(one.bytes for one in states) // (batch * context) * rows
    if op.cache is CacheForm.LATENT:
        # Of each head: key half into the query, value half behind the sum. Of each sequence: the
        # cache, once for all heads.
        pushes = heads * (blocks(dim, rank) + blocks(rank, value_dim))
        pushes += batch * (blocks(rank + shared, context) + blocks(context, rank))
        folds = rows * heads * rank * (dim + value_dim)
        flops = 2 * (folds + scores * (2 * rank + shared))
    else:
        pushes = blocks(rank, up.shape[0])
        pushes += batch * heads * (blocks(dim + shared, context) + blocks(context, value_dim))
        flops = 2 * (rows * rank * up.shape[0] + scores * (dim + shared + value_dim))
    return Cost(
        state_read_bytes=read,
        state_write_bytes=written,
        mxu_pushes=pushes,
        vector_elements=4 * scores,  # scale, maximum, exponential, sum
        flops=flops,
    )


@COST.register(ScaleHeads)
def _scale_heads(op: ScaleHeads, operands: Types, states: Types, results: Types) -> Cost:
    return Cost(vector_elements=operands[0].elements)


@COST.register(ResidualBlocks)
@COST.register(StoreBlock)
def _no_work(op: StoreBlock, operands: Types, states: Types, results: Types) -> Cost:
    # Room, and a copy within the chip's memory.
    return Cost()


@COST.register(MixBlocks)
def _mix_blocks(op: MixBlocks, operands: Types, states: Types, results: Types) -> Cost:
    mixed, _, x = operands[:3]
    # As if all slots were in use. Square, sum; product with the weights of the score, sum; weight,
    # sum.
    return Cost(vector_elements=6 * (mixed.elements + x.elements))
