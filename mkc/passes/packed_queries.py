"""Queries of latent attention are read where their projection leaves them.

An author cuts each head of a projection in two: the query that meets the head's key, and the one
that meets the shared key. The kernel takes the projection as a whole, so the two cuts are no work.
"""

from __future__ import annotations

from dataclasses import replace

from mkc.errors import UnsupportedGraphError
from mkc.ir import ops
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.ops_mixing import CacheForm
from mkc.ir.ops_mixing import LatentAttention
from mkc.passes.rank_ops import PackedLatentAttention


def pack_queries(graph: Graph) -> Graph:
    """The graph of a rank with `PackedLatentAttention`. Raises `UnsupportedGraphError`."""
    return replace(graph, body=_block(graph.body))


def _block(block: Block) -> Block:
    items = [
        replace(item, body=_block(item.body)) if isinstance(item, Repeat) else item
        for item in block.items
    ]
    nodes = [one for one in items if isinstance(one, Node)]
    makers = {value.name: node for node in nodes for value in node.results}
    unused: set[str] = set()
    for place, item in enumerate(items):
        if isinstance(item, Node) and isinstance(item.op, LatentAttention):
            items[place], cuts = _packed(item, makers)
            unused |= cuts
    read = {name for node in Block(items=tuple(items)).nodes() for name in node.operands}
    return Block(
        items=tuple(
            item
            for item in items
            if isinstance(item, Repeat)
            or not item.results
            or item.results[0].name not in unused - read
        )
    )


def _packed(node: Node, makers: dict[str, Node]) -> tuple[Node, set[str]]:
    """The node with its whole projection, and the names of the two cuts."""
    assert isinstance(node.op, LatentAttention)
    if node.op.cache is not CacheForm.LATENT:
        raise UnsupportedGraphError(
            op=node.op.mnemonic,
            location=node.location,
            problem=f"its cache is {node.op.cache}; the kernel reads a cache of latents",
            hint="Leave the graph as it is traced, with latent caches",
        )
    cuts = [makers.get(name) for name in node.operands[:2]]
    places = []
    for cut in cuts:
        if cut is not None and isinstance(cut.op, ops.Slice):
            places.append((cut.operands[0], cut.op.start, cut.op.size))
    if len(places) == 2:
        (first, start, size), (second, behind, shared) = places
        whole = makers[first].results[0].type.shape[-1]
        if first == second and (start, behind) == (0, size) and size + shared == whole:
            op = PackedLatentAttention(
                scale=node.op.scale, cache=node.op.cache, key_dim=size, shared_dim=shared
            )
            operands = (first, *node.operands[2:])
            return replace(node, op=op, operands=operands), set(node.operands[:2])
    raise UnsupportedGraphError(
        op=node.op.mnemonic,
        location=node.location,
        problem="its two queries are not the two halves of every head of one projection, which is "
        "how the kernel reads them",
        hint="Slice both from one projection, and change neither before the attention",
    )
