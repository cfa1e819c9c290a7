"""Weights that two projections of one block read are read once, where the order allows it.

A drafter projects the rows that it remembers and the rows of its block with the same key and value
weights. The earlier projection, and what depends on it, moves behind the later one; the two then
become one matmul with two left operands.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace

from mkc.ir import ops
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat

type Items = list[Node | Repeat]


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """A graph in a new order, and the weights that are read once for two projections."""

    graph: Graph
    params: frozenset[str]


def share_weights(graph: Graph) -> Sharing:
    """Moves projections of the same weights together, block by block."""
    shared: set[str] = set()
    body = _block(graph.body, shared)
    return Sharing(graph=replace(graph, body=body), params=frozenset(shared))


def _block(block: Block, shared: set[str]) -> Block:
    items: Items = [
        replace(item, body=_block(item.body, shared)) if isinstance(item, Repeat) else item
        for item in block.items
    ]
    readers: dict[str, list[Node]] = {}
    for item in items:
        if isinstance(item, Node) and isinstance(item.op, ops.Linear):
            readers.setdefault(item.operands[1], []).append(item)
    for param, nodes in readers.items():
        if len(nodes) == 2 and nodes[0].op == nodes[1].op:
            moved = _together(items, *nodes)
            if moved is not None:
                items = moved
                shared.add(param)
    return Block(items=tuple(items))


def _together(items: Items, first: Node, second: Node) -> Items | None:
    """`first`, and what depends on it, behind `second`; None when `second` depends on it too."""
    start, stop = items.index(first), items.index(second)
    moved, left = [first], []
    for item in items[start + 1 : stop + 1]:
        if isinstance(item, Repeat):
            return None
        if not _depends(item, moved):
            left.append(item)
        elif item is second:
            return None
        else:
            moved.append(item)
    return [*items[:start], *left, *moved, *items[stop + 1 :]]


def _depends(node: Node, earlier: list[Node]) -> bool:
    """By a value, or by the order in which a state is read and written."""
    return any(
        not set(node.states).isdisjoint(one.states)
        or any(value.name in node.operands for value in one.results)
        for one in earlier
    )
