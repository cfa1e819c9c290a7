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
from mkc.ir.ops import Op
from mkc.ir.ops_spec import Accept
from mkc.ir.ops_spec import TopK


@dataclass(frozen=True, kw_only=True)
class AllGather(Op):
    """x [rows, n], columns of one rank -> [rows, ranks * n]: those of all ranks, in their order."""

    mnemonic: ClassVar[str] = "all_gather"
    ranks: int


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


RANK_OPS: tuple[type[Op], ...] = (AllGather, ShardedAccept, ShardedTopK)
MNEMONICS.update({op_type.mnemonic: op_type for op_type in RANK_OPS})


@INFER.register(AllGather)
def _all_gather(op: AllGather, operands: Types, states: Types) -> Types:
    (x,) = operands
    rows, columns = x.axes
    parts = tuple(replace(one, count=one.count * op.ranks) for one in columns.parts)
    return (replace(x, axes=(rows, replace(columns, parts=parts))),)


@INFER.register(ShardedTopK)
def _sharded_top_k(op: ShardedTopK, operands: Types, states: Types) -> Types:
    return _whole(op, TopK(k=op.k), operands, states)


@INFER.register(ShardedAccept)
def _sharded_accept(op: ShardedAccept, operands: Types, states: Types) -> Types:
    return _whole(op, Accept(rows=op.rows), operands, states)


def _whole(op: Op, whole: Op, operands: Types, states: Types) -> Types:
    infer = INFER.find(whole)
    assert infer is not None, f"{op.mnemonic}: no shape inference of {whole.mnemonic}"
    found: Any = infer(whole, operands, states)
    return tuple(found)
