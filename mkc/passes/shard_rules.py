"""SHARD facets of the built-in ops: how each op divides over the mesh."""

from __future__ import annotations

from dataclasses import replace

from mkc.ir import ops
from mkc.ir.facets import SHARD
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.passes.p10_shard import Rule
from mkc.passes.p10_shard import ShardContext
from mkc.passes.sharding import REPLICATED
from mkc.passes.sharding import Sharding

type Operands = tuple[Sharding | None, ...]  # None for a parameter, which takes what the rule says


def known(sharding: Sharding | None) -> Sharding:
    """The sharding of an operand that must be a value."""
    assert sharding is not None, "a parameter stands where the op needs a value"
    return sharding


@SHARD.register(ops.Embed)
def embed(op: ops.Embed, operands: Operands, context: ShardContext) -> Rule:
    """Every rank looks up whole rows in its own copy of the table."""
    return Rule(operands=(REPLICATED, REPLICATED), results=(REPLICATED,))


@SHARD.register(ops.Linear)
def linear(op: ops.Linear, operands: Operands, context: ShardContext) -> Rule:
    """Column parallel on a replicated input, row parallel (partial sums) on a divided one.

    Where that was chosen, the columns of all ranks, or of adjoining ones, are gathered. A
    projection to heads is divided by them, so that they stay on their rank: its input is whole
    unless it has heads itself.
    """
    x = known(operands[0])
    weight = context.types[1]
    name = context.node.operands[1]
    if context.ranks == 1:
        return Rule(operands=(REPLICATED, REPLICATED), results=(REPLICATED,))
    if group := context.gathered.get(name):
        divided = Sharding(
            axis=0, shards=group, copies=context.ranks // group, cyclic=group < context.ranks
        )
        return Rule(operands=(x, divided), results=(REPLICATED,), part=replace(divided, axis=1))
    if x.axis is None or (_has_heads(weight, 0) and not _has_heads(weight, 1)):
        divided = context.divide_units(weight, 0, name)
        result = divided if divided.axis is None else replace(divided, axis=1)
        return Rule(operands=(REPLICATED, divided), results=(result,))
    # Of ranks that hold the same units only the first contributes to the sum: see `Sharding.once`.
    return Rule(
        operands=(x, replace(x, axis=1, once=x.copies > 1)),
        results=(Sharding(partial=True),),
        op=replace(op, dtype=DType.F32),
    )


def _has_heads(weight: TensorType, axis: int) -> bool:
    return all(part.copyable for part in weight.axes[axis].parts)


def like_first(op: ops.Op, operands: Operands, context: ShardContext) -> Rule:
    """Results are divided as the first operand; the other operands are whole.

    A function of a parameter alone is divided by the parameter's units, like a projection's
    outputs.
    """
    x = operands[0]
    if x is None:
        x = context.divide_units(context.types[0], 0, context.node.operands[0])
    others = tuple(REPLICATED for _ in operands[1:])
    return Rule(operands=(x, *others), results=(x,) * len(context.node.results))


def within_last_axis(op: ops.Op, operands: Operands, context: ShardContext) -> Rule:
    """As `like_first`, for ops that mix the last axis, which must be whole."""
    if known(operands[0]).axis == context.types[0].rank - 1:
        operands = (REPLICATED, *operands[1:])
    return like_first(op, operands, context)


WITHIN_LAST_AXIS: tuple[type[ops.Op], ...] = (ops.RmsNorm, ops.L2Norm, ops.Slice, ops.Rotary)
LIKE_FIRST: tuple[type[ops.Op], ...] = (
    ops.Unary,
    ops.Scale,
    ops.Cast,
    ops.SplitHeads,
    ops.MergeHeads,
    ops.SplitParts,
)
for _op_type in WITHIN_LAST_AXIS:
    SHARD.register(_op_type)(within_last_axis)
for _op_type in LIKE_FIRST:
    SHARD.register(_op_type)(like_first)


@SHARD.register(ops.RotaryTable)
def rotary_table(op: ops.RotaryTable, operands: Operands, context: ShardContext) -> Rule:
    """Positions are known everywhere."""
    return Rule(operands=(REPLICATED,), results=(REPLICATED, REPLICATED))


@SHARD.register(ops.Binary)
def binary(op: ops.Binary, operands: Operands, context: ShardContext) -> Rule:
    """Both operands alike; a vector along the last axis is divided with it."""
    x = operands[0] if operands[0] is not None else known(operands[1])
    needed = []
    for type in context.types:
        aligned = x.axis is not None and type.rank < context.node.results[0].type.rank
        axis = None if x.axis is None else x.axis - (context.node.results[0].type.rank - type.rank)
        if not aligned:
            needed.append(x)
        elif axis is not None and axis >= 0:
            needed.append(replace(x, axis=axis))
        else:
            needed.append(REPLICATED)
    return Rule(operands=tuple(needed), results=(x,))


@SHARD.register(ops.CausalConv)
def causal_conv(op: ops.CausalConv, operands: Operands, context: ShardContext) -> Rule:
    """Channels are independent."""
    x = known(operands[0])
    channels = replace(x, axis=None if x.axis is None else 0)
    return Rule(operands=(x, channels), states=(x,), results=(x,))


@SHARD.register(ops.DeltaRule)
def delta_rule(op: ops.DeltaRule, operands: Operands, context: ShardContext) -> Rule:
    """Heads are independent; key heads are divided with their value heads."""
    x = known(operands[0])
    state = replace(x, axis=None if x.axis is None else 0)
    return Rule(operands=(x,) * len(operands), states=(state,), results=(x,))


@SHARD.register(ops.Attention)
def attention(op: ops.Attention, operands: Operands, context: ShardContext) -> Rule:
    """Query heads are divided; key heads too, or copied to the ranks whose queries read them."""
    q, k = known(operands[0]), known(operands[1])
    return Rule(operands=(q, k, k, REPLICATED), states=(k, k), results=(q,))


@SHARD.register(ops.MaskTokens)
def mask_tokens(op: ops.MaskTokens, operands: Operands, context: ShardContext) -> Rule:
    """The masks cover the columns of all ranks; each applies the bits of its own."""
    x = known(operands[0])
    ranks = 1 if x.axis is None else context.ranks
    return Rule(operands=(x, REPLICATED), results=(x,), op=replace(op, ranks=ranks))


@SHARD.register(ops.Argmax)
def argmax(op: ops.Argmax, operands: Operands, context: ShardContext) -> Rule:
    """A divided last axis needs the exchange of every rank's best."""
    x = known(operands[0])
    if x.axis is None:
        return Rule(operands=(x,), results=(REPLICATED,))
    return Rule(operands=(x,), results=(REPLICATED,), op=ops.ShardedArgmax(ranks=context.ranks))
