"""Rewrites a graph for the other cache of latent attention: what a planner chooses between.

A latent cache is small and the same for all heads, and every step folds a projection into query and
output; an expanded one is read without that work. `mkc.ir.cost` counts both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mkc.ir.cost import value_types
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.ops_mixing import CacheForm
from mkc.ir.ops_mixing import LatentAttention
from mkc.ir.types import Axis
from mkc.ir.types import Part
from mkc.ir.types import TensorType
from mkc.ir.types import axis


def with_cache_form(graph: Graph, form: CacheForm) -> Graph:
    """`graph` with every cache of latent attention in `form`; what was in a cache is not kept."""
    types = value_types(graph) | {key: one.type for key, one in graph.params.items()}
    states = dict(graph.states)

    def changed(block: Block) -> Block:
        return Block(items=tuple(item_of(one) for one in block.items))

    def item_of(item: Node | Repeat) -> Node | Repeat:
        if isinstance(item, Repeat):
            return replace(item, body=changed(item.body))
        if not isinstance(item.op, LatentAttention):
            return item
        for key, one in zip(
            item.states, cache_types(item, types, graph.context, form), strict=True
        ):
            states[key] = replace(states[key], type=one)
        return replace(item, op=replace(item.op, cache=form))

    body = changed(graph.body)
    return replace(graph, body=body, states=states)


def cache_types(
    node: Node, types: Mapping[str, TensorType], context: int, form: CacheForm
) -> tuple[TensorType, TensorType]:
    """Types of the two caches of a latent attention.

    Args:
      types: of the values and parameters of its graph.
    """
    q, _, latent, shared_k = (types[name] for name in node.operands[:4])
    rank, shared = latent.shape[1], shared_k.shape[1]
    value_dim = node.results[0].type.shape[2]
    sizes = {CacheForm.LATENT: (rank, shared), CacheForm.EXPANDED: (q.shape[2] + shared, value_dim)}
    heads = Part(count=1 if form is CacheForm.LATENT else q.shape[1], copyable=True)
    first, second = (
        TensorType(
            dtype=latent.dtype,
            axes=(axis(context), Axis(parts=(heads,), name="heads"), axis(size)),
        )
        for size in sizes[form]
    )
    return first, second
