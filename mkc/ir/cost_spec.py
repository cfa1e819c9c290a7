"""Cost of the operations of speculative rounds; see `mkc.ir.cost`."""

from __future__ import annotations

from mkc.ir.cost import Cost
from mkc.ir.cost import Types
from mkc.ir.cost import blocks
from mkc.ir.facets import COST
from mkc.ir.ops import Activation
from mkc.ir.ops_spec import Accept
from mkc.ir.ops_spec import BlockAttention
from mkc.ir.ops_spec import BlockTokens
from mkc.ir.ops_spec import CacheAppend
from mkc.ir.ops_spec import DynamicConv
from mkc.ir.ops_spec import KeptConv
from mkc.ir.ops_spec import KeptDeltaRule
from mkc.ir.ops_spec import KeptPositions
from mkc.ir.ops_spec import NextPositions
from mkc.ir.ops_spec import ReadTaps
from mkc.ir.ops_spec import SelectorWalk
from mkc.ir.ops_spec import Tap
from mkc.ir.ops_spec import TopK


def _bytes(types: Types) -> int:
    return sum(one.bytes for one in types)


@COST.register(Tap)
@COST.register(ReadTaps)
@COST.register(KeptPositions)
@COST.register(NextPositions)
@COST.register(BlockTokens)
def _no_work(op: Tap, operands: Types, states: Types, results: Types) -> Cost:
    # Copies within the chip's memory and a few scalars.
    return Cost()


@COST.register(KeptConv)
def _kept_conv(op: KeptConv, operands: Types, states: Types, results: Types) -> Cost:
    u = operands[0]
    operations = 2 * op.taps + (op.activation is not Activation.NONE)
    return Cost(
        state_read_bytes=_bytes(states),
        state_write_bytes=_bytes(states),
        vector_elements=operations * u.elements,
        flops=2 * op.taps * u.elements,
    )


@COST.register(KeptDeltaRule)
def _kept_delta_rule(op: KeptDeltaRule, operands: Types, states: Types, results: Types) -> Cost:
    key, value = operands[1], operands[2]
    rows, heads, dv = value.shape
    dk = key.shape[-1]
    batch = states[0].shape[0]
    pairs = rows * (rows // batch)
    state = batch * heads * dk * dv
    # Three products with the state (commit, keys, queries) and two with pairs of rows.
    return Cost(
        state_read_bytes=_bytes(states),
        state_write_bytes=_bytes(states),
        mxu_pushes=batch * heads * 2 * blocks(dk, dv),
        vector_elements=2 * state + pairs * heads * (dk + 2 * dv),
        flops=2 * heads * (3 * rows * dk * dv + pairs * (dk + dv)),
    )


@COST.register(DynamicConv)
def _dynamic_conv(op: DynamicConv, operands: Types, states: Types, results: Types) -> Cost:
    x, base = operands[0], operands[2]
    taps = base.shape[1]
    return Cost(vector_elements=3 * taps * x.elements, flops=2 * taps * x.elements)


@COST.register(CacheAppend)
def _cache_append(op: CacheAppend, operands: Types, states: Types, results: Types) -> Cost:
    return Cost(state_write_bytes=_bytes(operands[:2]))


@COST.register(BlockAttention)
def _block_attention(op: BlockAttention, operands: Types, states: Types, results: Types) -> Cost:
    q, k, v = operands[:3]
    rows, query_heads, dim = q.shape
    batch, context, kv_heads, _ = states[0].shape
    block = rows // batch
    # No row sees more of the cache than the window before the block.
    read = context if op.window is None else min(context, op.window)
    scores = rows * query_heads * (read + block)
    pushes = batch * kv_heads * (blocks(dim, read + block) + blocks(read + block, dim))
    return Cost(
        state_read_bytes=_bytes(states) // context * read,
        state_write_bytes=k.bytes + v.bytes,
        mxu_pushes=pushes,
        vector_elements=4 * scores,
        flops=4 * scores * dim,
    )


@COST.register(TopK)
def _top_k(op: TopK, operands: Types, states: Types, results: Types) -> Cost:
    # One pass over the row for each element that is taken.
    return Cost(vector_elements=op.k * operands[0].elements)


@COST.register(SelectorWalk)
def _selector_walk(op: SelectorWalk, operands: Types, states: Types, results: Types) -> Cost:
    rows, count = operands[0].shape
    successor = operands[4]
    row_bytes = successor.bytes // successor.shape[0]
    # One row of the first codebook, `count` rows of the second.
    return Cost(
        weight_bytes=rows * (1 + count) * row_bytes,
        vector_elements=3 * rows * count * successor.shape[1],
        flops=2 * rows * count * successor.shape[1],
    )


@COST.register(Accept)
def _accept(op: Accept, operands: Types, states: Types, results: Types) -> Cost:
    return Cost(vector_elements=operands[0].elements)
