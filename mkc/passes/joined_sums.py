"""Sums over ranks that do not wait for each other become one exchange.

An exchange costs little more for more columns, but much for every phase that waits for messages. A
layer whose two branches are divided by their inner units has two sums; the second branch is
computed first, in front of what ends the first branch, and both sums travel together.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import replace

from mkc.ir.graph import Block
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.graph import Value
from mkc.ir.ops import AllReduce
from mkc.ir.ops import SplitParts
from mkc.ir.types import Axis
from mkc.ir.types import DType
from mkc.passes.rank_ops import JoinParts
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import VECTOR_LANES

PASS = "shard"

type Items = list[Node | Repeat]


def join_sums(block: Block, log: DecisionLog) -> Block:
    """The block with neighbouring sums joined where neither needs the other."""
    items: Items = [
        replace(item, body=join_sums(item.body, log)) if isinstance(item, Repeat) else item
        for item in block.items
    ]
    place = 0
    while (pair := _next_pair(items, place)) is not None:
        first, second = pair
        if (joined := _joined(items, first, second)) is None:
            place = first + 1
            continue
        one, other = items[first], items[second]
        assert isinstance(one, Node) and isinstance(other, Node)
        log.choose(
            f"shard.joined.{one.results[0].name}",
            passed=PASS,
            chosen=f"one exchange with the sum {other.results[0].name}",
            because="neither needs the other, and each exchange waits for its messages",
            rejected={"an exchange for each": "as many messages again, one after the other"},
        )
        items = joined
    return replace(block, items=tuple(items))


def _next_pair(items: Sequence[Node | Repeat], start: int) -> tuple[int, int] | None:
    """Places of the next sum from `start` on and of the one behind it, with no region between."""
    first = None
    for place in range(start, len(items)):
        item = items[place]
        if isinstance(item, Repeat):
            first = None
        elif isinstance(item.op, AllReduce):
            if first is not None:
                return first, place
            first = place
    return None


def _joined(items: Sequence[Node | Repeat], first: int, second: int) -> Items | None:
    """The items with both sums in one; None when that is not possible."""
    one, other = items[first], items[second]
    between = [item for item in items[first + 1 : second] if isinstance(item, Node)]
    assert isinstance(one, Node) and isinstance(other, Node)
    if not (_is_plain(one) and _is_plain(other) and one.op == other.op):
        return None
    later = _dependent(between, one.results[0].name)
    if other.operands[0] in {value.name for node in later for value in node.results}:
        return None
    earlier = [node for node in between if node not in later]
    if _states(earlier) & _states(later):
        return None
    maker = next(
        place
        for place, item in enumerate(items)
        if isinstance(item, Node) and one.operands[0] in {each.name for each in item.results}
    )
    return [
        *items[:maker],
        *earlier,
        *items[maker:first],
        *_together(one, other),
        *later,
        *items[second + 1 :],
    ]


def _is_plain(node: Node) -> bool:
    """One row of whole registers, so that the parts lie side by side without a gap."""
    axis = node.results[0].type.axes[-1]
    return len(axis.parts) == 1 and axis.size % VECTOR_LANES == 0 and not axis.parts[0].copyable


def _dependent(nodes: Iterable[Node], name: str) -> list[Node]:
    """Those that need a value, directly or not, in their order."""
    names, found = {name}, []
    for node in nodes:
        if names & set(node.operands):
            found.append(node)
            names |= {value.name for value in node.results}
    return found


def _states(nodes: Iterable[Node]) -> set[str]:
    return {key for node in nodes for key in node.states}


def _together(one: Node, other: Node) -> tuple[Node, Node, Node]:
    """Both partial sums side by side, their sum, and its two parts."""
    values = one.results[0], other.results[0]
    parts = tuple(part for value in values for part in value.type.axes[-1].parts)
    both = replace(values[0].type, axes=(values[0].type.axes[0], Axis(parts=parts)))
    name = f"{values[0].name}.and.{values[1].name}"
    partial = Value(name=f"{name}.partial", type=replace(both, dtype=DType.F32))
    total = Value(name=name, type=both)
    return (
        Node(
            op=JoinParts(),
            operands=(one.operands[0], other.operands[0]),
            results=(partial,),
            location=one.location,
        ),
        Node(op=one.op, operands=(partial.name,), results=(total,), location=one.location),
        Node(op=SplitParts(), operands=(name,), results=values, location=one.location),
    )
