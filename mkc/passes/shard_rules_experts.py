"""SHARD facets of compressed attention, residual blocks and mixtures of experts.

The residual stream and what was stored of it are whole on every rank; so are router logits, the
choice of experts, latent vectors and their cache. Heads and experts are divided.
"""

from __future__ import annotations

from dataclasses import replace

from mkc.ir.facets import SHARD
from mkc.ir.ops import Op
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.ops_experts import Route
from mkc.ir.ops_mixing import CacheForm
from mkc.ir.ops_mixing import LatentAttention
from mkc.ir.ops_mixing import MixBlocks
from mkc.ir.ops_mixing import ResidualBlocks
from mkc.ir.ops_mixing import ScaleHeads
from mkc.ir.ops_mixing import StoreBlock
from mkc.ir.types import DType
from mkc.passes.p10_shard import Rule
from mkc.passes.p10_shard import ShardContext
from mkc.passes.rank_ops import ShardedExpertMlp
from mkc.passes.rank_ops import ShardedScaleHeads
from mkc.passes.shard_rules import Operands
from mkc.passes.shard_rules import known
from mkc.passes.shard_rules_spec import everywhere
from mkc.passes.sharding import REPLICATED
from mkc.passes.sharding import Sharding

EVERYWHERE: tuple[type[Op], ...] = (MixBlocks, ResidualBlocks, Route, StoreBlock)
for _op_type in EVERYWHERE:
    SHARD.register(_op_type)(everywhere)


@SHARD.register(ScaleHeads)
def scale_heads(op: ScaleHeads, operands: Operands, context: ShardContext) -> Rule:
    """Every rank has all factors and takes those of its heads."""
    x = known(operands[0])
    own = None
    if x.axis is not None:
        own = ShardedScaleHeads(shards=x.shards, copies=x.copies)
    return Rule(operands=(x, REPLICATED), results=(x,), op=own)


@SHARD.register(LatentAttention)
def latent_attention(op: LatentAttention, operands: Operands, context: ShardContext) -> Rule:
    """Heads are divided, with their rows of `up`. A cache of latents has no heads: every rank keeps
    all of it, which is fewer bytes than keys and values of its heads, and no exchange.
    """
    q = known(operands[0])
    up = replace(q, axis=None if q.axis is None else 0)
    cache = REPLICATED if op.cache is CacheForm.LATENT else q
    return Rule(
        operands=(q, q, REPLICATED, REPLICATED, up, REPLICATED),
        states=(cache, cache),
        results=(q,),
    )


@SHARD.register(ExpertMlp)
def expert_mlp(op: ExpertMlp, operands: Operands, context: ShardContext) -> Rule:
    """Groups of ranks share the experts, the ranks of a group the width of each; what they compute
    is summed over all ranks."""
    whole = (REPLICATED,) * 3
    matrices = context.types[3:]
    if context.ranks == 1:
        return Rule(operands=(*whole, *(REPLICATED for _ in matrices)), results=(REPLICATED,))
    first = context.node.operands[3]
    groups = context.expert_groups.get(first)
    if groups is None:  # nothing divides: one expert, or one slice, for each rank says why
        context.divide_units(matrices[0], 0, first)
        context.divide_units(matrices[0], 1, first)
    assert groups is not None, f"{first}: no layout for {context.ranks} ranks"
    slices = context.ranks // groups
    per_matrix = 2 if matrices[0].dtype is DType.E2M1X2 else 1
    axes = [1] * (2 * per_matrix) + [2] * (len(matrices) - 2 * per_matrix)
    return Rule(
        operands=(*whole, *(_experts(groups, slices, axis) for axis in axes)),
        results=(Sharding(partial=True),),
        op=ShardedExpertMlp(gate_cap=op.gate_cap, up_cap=op.up_cap, groups=groups, slices=slices),
    )


def _experts(groups: int, slices: int, axis: int) -> Sharding:
    """Of a stack of experts' matrices whose width is `axis`."""
    width = Sharding(axis=axis, shards=slices)
    if groups == 1:
        return width
    inner = width if slices > 1 else None
    return Sharding(axis=0, shards=groups, copies=slices, inner=inner)
