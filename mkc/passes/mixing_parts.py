"""A mixture behind an exchange is computed in two parts; what is stored is known before it.

Of the vectors that `MixBlocks` weighs, only the stream comes out of the exchange. The scores and
the sum of the stored ones stand in front of it, where they can go on while its messages travel; the
stream joins them behind it, as a block of keys joins the others in a softmax that is computed in
pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from typing import ClassVar

from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.graph import Value
from mkc.ir.infer import Types
from mkc.ir.ops import AllReduce
from mkc.ir.ops import Binary
from mkc.ir.ops import Op
from mkc.ir.ops import SplitParts
from mkc.ir.ops_mixing import MixBlocks
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis
from mkc.passes.rank_ops import AllGather
from mkc.schedule.decisions import DecisionLog

PASS = "fuse"
EXCHANGES = (AllReduce, AllGather)
# What may stand between an exchange and the mixture of its result: nothing that takes long.
LIGHT = (Binary, SplitParts)


@dataclass(frozen=True, kw_only=True)
class MixStored(Op):
    """blocks [rows, slots, n], count i32 [rows], norm [n], projection [1, n]
    -> total f32 [rows, n], softmax f32 [rows, 2]: the part of `MixBlocks` without its stream.

    With the scores of the stored blocks: the largest one, -inf without blocks, and the sum of
    exp(score - largest); `total` is the sum of the blocks with these exponentials as weights.
    """

    mnemonic: ClassVar[str] = "mix_stored"
    eps: float
    period: int = 1


@dataclass(frozen=True, kw_only=True)
class MixStream(Op):
    """x [rows, n], total f32 [rows, n], softmax f32 [rows, 2], norm [n], projection [1, n]
    -> like x: `MixBlocks` of x and of the blocks that `MixStored` has summed.
    """

    mnemonic: ClassVar[str] = "mix_stream"
    eps: float


MNEMONICS.update({op_type.mnemonic: op_type for op_type in (MixStored, MixStream)})


@INFER.register(MixStored)
def _mix_stored(op: MixStored, operands: Types, states: Types) -> Types:
    rows, _, width = operands[0].axes
    return (
        TensorType(dtype=DType.F32, axes=(rows, width)),
        TensorType(dtype=DType.F32, axes=(rows, axis(2))),
    )


@INFER.register(MixStream)
def _mix_stream(op: MixStream, operands: Types, states: Types) -> Types:
    return (operands[0],)


def split_mixtures(graph: Graph, log: DecisionLog) -> Graph:
    """The graph of a rank with two parts of every mixture whose stream is made from what an
    exchange of the same block has brought, if the blocks that it reads were stored before.
    """
    return replace(graph, body=_block(graph.body, log))


def _block(block: Block, log: DecisionLog) -> Block:
    items: list[Node | Repeat] = [
        replace(item, body=_block(item.body, log)) if isinstance(item, Repeat) else item
        for item in block.items
    ]
    mixtures = [one for one in items if isinstance(one, Node) and isinstance(one.op, MixBlocks)]
    for mixture in mixtures:
        place = _exchange(items, mixture)
        if place is not None:
            stored, stream = _parts(mixture)
            items[items.index(mixture)] = stream
            items.insert(place, stored)
            log.choose(
                f"fuse.mixture.{mixture.results[0].name}",
                passed=PASS,
                chosen="stored vectors before the exchange, the stream behind it",
                because="the exchange brings nothing that the sum of the stored ones needs",
                rejected={"one sum behind the exchange": "nothing would go on during its messages"},
            )
    return Block(items=tuple(items))


def _exchange(items: Sequence[Node | Repeat], mixture: Node) -> int | None:
    """Place of the exchange that the stream waits for; None when the blocks change behind it."""
    places = {
        value.name: place
        for place, item in enumerate(items)
        if isinstance(item, Node)
        for value in item.results
    }
    blocks, count, stream = mixture.operands[:3]
    wanted, found = [stream], -1
    while wanted:
        place = places.get(wanted.pop(), -1)
        maker = items[place] if place >= 0 else None
        if isinstance(maker, Node) and isinstance(maker.op, EXCHANGES):
            found = max(found, place)
        elif isinstance(maker, Node) and isinstance(maker.op, LIGHT):
            wanted += maker.operands
    inner = any(isinstance(one, Repeat) for one in items[found + 1 : items.index(mixture)])
    known = max(places.get(blocks, -1), places.get(count, -1)) < found
    return found if found >= 0 and known and not inner else None


def _parts(mixture: Node) -> tuple[Node, Node]:
    assert isinstance(mixture.op, MixBlocks)
    blocks, count, stream, norm, projection = mixture.operands
    (result,) = mixture.results
    rows, width = result.type.axes
    total = Value(
        name=f"{result.name}.stored", type=TensorType(dtype=DType.F32, axes=(rows, width))
    )
    softmax = Value(
        name=f"{result.name}.softmax", type=TensorType(dtype=DType.F32, axes=(rows, axis(2)))
    )
    return (
        Node(
            op=MixStored(eps=mixture.op.eps, period=mixture.op.period),
            operands=(blocks, count, norm, projection),
            results=(total, softmax),
            location=mixture.location,
        ),
        Node(
            op=MixStream(eps=mixture.op.eps),
            operands=(stream, total.name, softmax.name, norm, projection),
            results=mixture.results,
            location=mixture.location,
        ),
    )
