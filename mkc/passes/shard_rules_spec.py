"""SHARD facets of the operations of speculative rounds.

What a drafter shows and reads is whole on every rank; so are token ids, positions and counts.
"""

from __future__ import annotations

from dataclasses import replace

from mkc.ir import ops_markov
from mkc.ir import ops_spec
from mkc.ir.facets import SHARD
from mkc.ir.ops import Op
from mkc.passes.p10_shard import Rule
from mkc.passes.p10_shard import ShardContext
from mkc.passes.rank_ops import ShardedAccept
from mkc.passes.rank_ops import ShardedMarkovWalk
from mkc.passes.rank_ops import ShardedTopK
from mkc.passes.shard_rules import Operands
from mkc.passes.shard_rules import known
from mkc.passes.sharding import REPLICATED


def everywhere(op: Op, operands: Operands, context: ShardContext) -> Rule:
    """All operands and results are whole on every rank, and the states too."""
    return Rule(
        operands=(REPLICATED,) * len(operands),
        states=(REPLICATED,) * len(context.state_types),
        results=(REPLICATED,) * len(context.node.results),
    )


EVERYWHERE: tuple[type[Op], ...] = (
    ops_markov.CutDrafts,
    ops_spec.BlockTokens,
    ops_spec.DynamicConv,
    ops_spec.KeptPositions,
    ops_spec.NextPositions,
    ops_spec.ReadTaps,
    ops_spec.SelectorWalk,
    ops_spec.Tap,
)
for _op_type in EVERYWHERE:
    SHARD.register(_op_type)(everywhere)


@SHARD.register(ops_spec.KeptConv)
def kept_conv(op: ops_spec.KeptConv, operands: Operands, context: ShardContext) -> Rule:
    """Channels are independent."""
    x = known(operands[0])
    channels = replace(x, axis=None if x.axis is None else 0)
    return Rule(operands=(x, channels, REPLICATED), states=(x, x), results=(x,))


@SHARD.register(ops_spec.KeptDeltaRule)
def kept_delta_rule(op: ops_spec.KeptDeltaRule, operands: Operands, context: ShardContext) -> Rule:
    """Heads are independent; key heads are divided with their value heads."""
    x = known(operands[0])
    state = replace(x, axis=None if x.axis is None else 0)
    return Rule(
        operands=(*(x,) * (len(operands) - 1), REPLICATED), states=(state, x, x, x), results=(x,)
    )


@SHARD.register(ops_spec.BlockAttention)
def block_attention(op: ops_spec.BlockAttention, operands: Operands, context: ShardContext) -> Rule:
    """As plain attention; what enters the cache is divided like the keys of the block."""
    q, k = known(operands[0]), known(operands[1])
    return Rule(operands=(q, k, k, REPLICATED, k, k, REPLICATED), states=(k, k), results=(q,))


@SHARD.register(ops_spec.CacheAppend)
def cache_append(op: ops_spec.CacheAppend, operands: Operands, context: ShardContext) -> Rule:
    """A cache is divided like the keys that enter it."""
    k = known(operands[0])
    return Rule(operands=(k, k, REPLICATED), states=(k, k), results=())


@SHARD.register(ops_spec.TopK)
def top_k(op: ops_spec.TopK, operands: Operands, context: ShardContext) -> Rule:
    """A divided last axis needs the exchange of every rank's best."""
    x = known(operands[0])
    divided = None if x.axis is None else ShardedTopK(k=op.k, ranks=context.ranks)
    return Rule(operands=(x,), results=(REPLICATED, REPLICATED), op=divided)


@SHARD.register(ops_spec.Accept)
def accept(op: ops_spec.Accept, operands: Operands, context: ShardContext) -> Rule:
    """Greedily only the largest logit of each row counts, whose exchange is that of an argmax."""
    x = known(operands[0])
    divided = None if x.axis is None else ShardedAccept(rows=op.rows, ranks=context.ranks)
    others = (REPLICATED,) * (len(operands) - 1)
    return Rule(operands=(x, *others), results=(REPLICATED,) * 3, op=divided)


@SHARD.register(ops_markov.MarkovWalk)
def markov_walk(op: ops_markov.MarkovWalk, operands: Operands, context: ShardContext) -> Rule:
    """Successors are divided like the logits that they correct; whose row comes next, every rank
    learns from an exchange for each draft."""
    logits = known(operands[0])
    successor = replace(logits, axis=None if logits.axis is None else 0)
    divided = None
    if logits.axis is not None:
        divided = ShardedMarkovWalk(rows=op.rows, ranks=context.ranks)
    whole = (REPLICATED,) * 4
    return Rule(
        operands=(logits, REPLICATED, successor, *whole), results=(REPLICATED,) * 2, op=divided
    )
