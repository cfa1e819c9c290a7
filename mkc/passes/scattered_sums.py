"""Of sums that only meet gathered columns, every rank gets its own columns alone.

    z = f(all_gather(x), all_reduce(y))  becomes  z = all_gather(f(x, own columns of the sum))

for an elementwise f, when nothing else reads the gather or the sum. Every element is the same, to
the bit, but the sum need not travel to ranks that do not gather it, and f is computed once in a
group. It is done where the sum travels with another one that every rank needs whole, as its last
part: the exchange is there anyway and becomes shorter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import replace

from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.graph import Value
from mkc.ir.ops import AllReduce
from mkc.ir.ops import Binary
from mkc.ir.ops import SplitParts
from mkc.ir.types import Axis
from mkc.ir.types import TensorType
from mkc.passes.rank_ops import AllGather
from mkc.passes.rank_ops import JoinParts
from mkc.passes.rank_ops import ScatteredSum
from mkc.passes.sharding import divide
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import VECTOR_LANES

PASS = "shard"

type Items = list[Node | Repeat]


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    """A binary node of a gather's result and a sum's.

    Attributes:
      sum: two sums in one; `summed` is the last part of it.
      split: takes them apart.
    """

    node: Node
    gather: Node
    sum: Node
    split: Node
    summed: Value


def scatter_sums(graph: Graph, ranks: int, log: DecisionLog) -> Graph:
    """The graph of one rank with sums scattered where only gathered columns meet them."""
    reads = Counter(name for node in graph.body.nodes() for name in node.operands)
    reads.update(graph.outputs.values())
    reads.update(name for repeat in _repeats(graph.body) for name in _yielded(repeat))
    return replace(graph, body=_scattered(graph.body, reads, ranks, log))


def _repeats(block: Block) -> Iterable[Repeat]:
    for item in block.items:
        if isinstance(item, Repeat):
            yield item
            yield from _repeats(item.body)


def _yielded(repeat: Repeat) -> Iterable[str]:
    for carry in repeat.carries:
        yield from (carry.initial, carry.yielded)


def _scattered(block: Block, reads: Counter[str], ranks: int, log: DecisionLog) -> Block:
    items: Items = [
        replace(item, body=_scattered(item.body, reads, ranks, log))
        if isinstance(item, Repeat)
        else item
        for item in block.items
    ]
    makers = {
        value.name: item for item in items if isinstance(item, Node) for value in item.results
    }
    for item in tuple(items):
        found = _meeting(item, makers, reads) if isinstance(item, Node) else None
        if found is None or not _divides(found, ranks):
            continue
        log.choose(
            f"shard.scattered.{found.summed.name}",
            passed=PASS,
            chosen="every rank gets its own columns of the sum, and gathers what they end in",
            because=f"{found.node.results[0].name} alone needs it, beside gathered columns",
            rejected={"the whole sum on every rank": "more bytes in the messages of the sum"},
        )
        items = _rewritten(items, found)
    return replace(block, items=tuple(items))


def _meeting(node: Node, makers: dict[str, Node], reads: Counter[str]) -> _Meeting | None:
    """What a node brings together; None unless it is a gather and a sum nobody else reads."""
    if not isinstance(node.op, Binary) or any(reads[name] != 1 for name in node.operands):
        return None
    sources = [makers.get(name) for name in node.operands]
    gathers = [one for one in sources if one is not None and isinstance(one.op, AllGather)]
    others = [one for one in sources if one is not None and one not in gathers]
    if len(gathers) != 1 or len(others) != 1 or len(gathers[0].results) != 1:
        return None
    (gather,), (split,) = gathers, others
    name = next(one for one in node.operands if one != gather.results[0].name)
    total = makers.get(split.operands[0])
    if not isinstance(split.op, SplitParts) or split.results[-1].name != name or total is None:
        return None
    joined = makers.get(total.operands[0])
    if type(total.op) is not AllReduce or reads[split.operands[0]] != 1:
        return None
    if joined is None or not isinstance(joined.op, JoinParts) or len(split.results) != 2:
        return None
    return _Meeting(node=node, gather=gather, sum=total, split=split, summed=split.results[-1])


def _divides(found: _Meeting, ranks: int) -> bool:
    """There are several groups, and a rank's columns are whole registers of plain elements."""
    assert isinstance(found.gather.op, AllGather)
    group = found.gather.op.ranks
    axes = [value.type.axes[-1] for value in (found.summed, *found.gather.results)]
    if group >= ranks or not all(len(one.parts) == 1 for one in axes):
        return False
    whole = found.sum.results[0].type.shape[-1] - found.summed.type.shape[-1]
    return axes[0].same_layout(axes[1]) and (
        axes[0].parts[0].count % group == 0
        and axes[0].size % (group * VECTOR_LANES) == 0
        and whole % VECTOR_LANES == 0
    )


def _rewritten(items: Items, found: _Meeting) -> Items:
    """The items with the sum scattered and the gather behind the node."""
    gather, node, total = found.gather, found.node, found.sum
    assert isinstance(gather.op, AllGather) and isinstance(total.op, AllReduce)
    group = gather.op.ranks
    own = Value(name=f"{found.summed.name}.part", type=_share(found.summed.type, group))
    part = Value(name=f"{node.results[0].name}.part", type=_share(node.results[0].type, group))
    op = ScatteredSum(
        ranks=total.op.ranks,
        dtype=total.op.dtype,
        group=group,
        columns=found.summed.type.shape[-1],
    )
    both = total.results[0]
    axes = (*both.type.axes[:-1], _last_divided(both.type, group))
    both = replace(both, type=replace(both.type, axes=axes))
    changed: dict[int, Items] = {
        id(total): [replace(total, op=op, results=(both,))],
        id(found.split): [replace(found.split, results=(found.split.results[0], own))],
    }
    names = {found.summed.name: own.name, gather.results[0].name: gather.operands[0]}
    operands = tuple(names[name] for name in node.operands)
    changed[id(gather)] = []
    changed[id(node)] = [
        replace(node, operands=operands, results=(part,)),
        replace(gather, operands=(part.name,), results=node.results),
    ]
    return [one for item in items for one in changed.get(id(item), [item])]


def _share(type: TensorType, group: int) -> TensorType:
    *others, last = type.axes
    return replace(type, axes=(*others, divide(last, group)))


def _last_divided(type: TensorType, group: int) -> Axis:
    """The joined columns, the last part of them divided."""
    last = type.axes[-1]
    *whole, part = last.parts
    return replace(last, parts=(*whole, replace(part, count=part.count // group)))
