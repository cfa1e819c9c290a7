"""Ops that sharding puts into the graph of one rank; no author writes them.

They have shape inference only: the graph of one rank is checked and lowered, not evaluated.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace
from typing import Any
from typing import ClassVar

from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.infer import Types
from mkc.ir.ops import AllReduce
from mkc.ir.ops import Op
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.ops_markov import MarkovWalk
from mkc.ir.ops_mixing import LatentAttention
from mkc.ir.ops_mixing import ScaleHeads
from mkc.ir.ops_spec import Accept
from mkc.ir.ops_spec import TopK
from mkc.ir.types import DType
from mkc.ir.types import TensorType


@dataclass(frozen=True, kw_only=True)
class AllGather(Op):
    """x [rows, n], columns of one rank -> [rows, ranks * n]: those of all ranks, in their order.

    Several operands travel together and have a result each.

    Attributes:
      ranks: so many adjoining ranks gather among themselves; all of them, or a group.
    """

    mnemonic: ClassVar[str] = "all_gather"
    ranks: int


@dataclass(frozen=True, kw_only=True)
class JoinParts(Op):
    """x [rows, n], y [rows, m] -> [rows, n + m], one part of the columns for each."""

    mnemonic: ClassVar[str] = "join_parts"


@dataclass(frozen=True, kw_only=True)
class ScatteredSum(AllReduce):
    """x f32 [rows, m + n] -> [rows, m + n / group]: of n columns of the sum a rank gets its own.

    Attributes:
      group: so many adjoining ranks get all of them, one behind the other.
      columns: n, the last ones of x.
    """

    mnemonic: ClassVar[str] = "scattered_sum"
    group: int
    columns: int


@dataclass(frozen=True, kw_only=True)
class ShardedTopK(TopK):
    """`TopK` of a row whose elements are divided over the ranks; every rank has the result."""

    mnemonic: ClassVar[str] = "sharded_top_k"
    ranks: int


@dataclass(frozen=True, kw_only=True)
class ShardedAccept(Accept):
    """`Accept` of logits whose columns are divided over the ranks."""

    mnemonic: ClassVar[str] = "sharded_accept"
    ranks: int


@dataclass(frozen=True, kw_only=True)
class ShardedMarkovWalk(MarkovWalk):
    """`MarkovWalk` of logits and successors whose vocabulary is divided over the ranks."""

    mnemonic: ClassVar[str] = "sharded_markov_walk"
    ranks: int


@dataclass(frozen=True, kw_only=True)
class ShardedScaleHeads(ScaleHeads):
    """`ScaleHeads` of the heads of one rank with the factors of all heads.

    Attributes:
      shards, copies: rank r has the heads of shard r // copies.
    """

    mnemonic: ClassVar[str] = "sharded_scale_heads"
    shards: int
    copies: int


@dataclass(frozen=True, kw_only=True)
class ShardedExpertMlp(ExpertMlp):
    """The part of `ExpertMlp` that one rank's experts, and its slice of each, contribute, in f32.

    The outputs of an expert are sums over ranks and therefore not rounded. `ids` are numbers among
    the experts of all groups; rank r has those of group r // slices.
    """

    mnemonic: ClassVar[str] = "sharded_expert_mlp"
    groups: int
    slices: int


@dataclass(frozen=True, kw_only=True)
class PackedLatentAttention(LatentAttention):
    """`LatentAttention` of q [rows, heads, d + s]: of every head its query, then its shared query.

    Attributes:
      key_dim, shared_dim: d and s.
    """

    mnemonic: ClassVar[str] = "packed_latent_attention"
    key_dim: int
    shared_dim: int


RANK_OPS: tuple[type[Op], ...] = (
    AllGather,
    JoinParts,
    PackedLatentAttention,
    ScatteredSum,
    ShardedAccept,
    ShardedExpertMlp,
    ShardedMarkovWalk,
    ShardedScaleHeads,
    ShardedTopK,
)
MNEMONICS.update({op_type.mnemonic: op_type for op_type in RANK_OPS})


@INFER.register(AllGather)
def _all_gather(op: AllGather, operands: Types, states: Types) -> Types:
    found = []
    for x in operands:
        rows, columns = x.axes
        parts = tuple(replace(one, count=one.count * op.ranks) for one in columns.parts)
        found.append(replace(x, axes=(rows, replace(columns, parts=parts))))
    return tuple(found)


@INFER.register(JoinParts)
def _join_parts(op: JoinParts, operands: Types, states: Types) -> Types:
    first = operands[0]
    parts = tuple(part for x in operands for part in x.axes[1].parts)
    return (replace(first, axes=(first.axes[0], replace(first.axes[1], parts=parts))),)


@INFER.register(ScatteredSum)
def _scattered_sum(op: ScatteredSum, operands: Types, states: Types) -> Types:
    (x,) = operands
    rows, columns = x.axes
    *whole, last = columns.parts
    assert last.size == op.columns and last.count % op.group == 0, f"{op}: {last} is not divided"
    parts = (*whole, replace(last, count=last.count // op.group))
    return (TensorType(dtype=op.dtype, axes=(rows, replace(columns, parts=parts))),)


@INFER.register(ShardedTopK)
def _sharded_top_k(op: ShardedTopK, operands: Types, states: Types) -> Types:
    return _whole(op, TopK(k=op.k), operands, states)


@INFER.register(ShardedAccept)
def _sharded_accept(op: ShardedAccept, operands: Types, states: Types) -> Types:
    return _whole(op, Accept(rows=op.rows), operands, states)


@INFER.register(ShardedMarkovWalk)
def _sharded_markov_walk(op: ShardedMarkovWalk, operands: Types, states: Types) -> Types:
    logits, predecessor, successor, tokens, *_ = operands
    assert predecessor.shape[0] == op.ranks * logits.shape[1], f"{op}: {predecessor} is not whole"
    assert successor.shape[0] == logits.shape[1], f"{op}: {successor} is not of one rank"
    return (tokens, TensorType(dtype=DType.F32, axes=logits.axes[:1]))


@INFER.register(ShardedScaleHeads)
def _sharded_scale_heads(op: ShardedScaleHeads, operands: Types, states: Types) -> Types:
    x, factor = operands
    assert factor.shape[0] == x.shape[1] * op.shards, f"{op}: {factor.shape[0]} factors"
    return (x,)


@INFER.register(ShardedExpertMlp)
def _sharded_expert_mlp(op: ShardedExpertMlp, operands: Types, states: Types) -> Types:
    (x,) = _whole(op, ExpertMlp(gate_cap=op.gate_cap, up_cap=op.up_cap), operands, states)
    return (replace(x, dtype=DType.F32),)


def _whole(op: Op, whole: Op, operands: Types, states: Types) -> Types:
    infer = INFER.find(whole)
    assert infer is not None, f"{op.mnemonic}: no shape inference of {whole.mnemonic}"
    found: Any = infer(whole, operands, states)
    return tuple(found)
