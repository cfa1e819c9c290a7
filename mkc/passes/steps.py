"""What the passes after sharding work on: the graph of one rank cut into steps.

A step is what becomes one phase of the kernel. Values between steps live in buffers; values that
are only another view of a value (a head axis split off, a part of a fused projection) cost nothing
and are `Alias`es.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from mkc.ir.graph import Carry
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.ops import MaskTokens
from mkc.ir.ops_mixing import ResidualBlocks
from mkc.ir.ops_mixing import StoreBlock
from mkc.ir.types import DType
from mkc.passes.sharding import ShardedGraph
from mkc.schedule.exchange_plan import Part

BLOCK_OPS = (ResidualBlocks, StoreBlock)


class StepKind(StrEnum):
    """What a step does."""

    EMBED = "embed"
    MATMUL = "matmul"
    NARROW_MATMUL = "narrow_matmul"
    VECTOR = "vector"
    DELTA_RULE = "delta_rule"
    ATTENTION = "attention"
    ALL_REDUCE = "all_reduce"
    ARGMAX = "argmax"
    KEPT_DELTA_RULE = "kept_delta_rule"
    ROWS_ATTENTION = "rows_attention"
    TAP = "tap"
    ALL_GATHER = "all_gather"
    TOP_K = "top_k"
    ACCEPT = "accept"
    SELECTOR_WALK = "selector_walk"
    MARKOV_WALK = "markov_walk"
    CUT_DRAFTS = "cut_drafts"
    SCALAR = "scalar"
    BLOCKS = "blocks"
    LATENT_ATTENTION = "latent_attention"
    ROUTE = "route"
    EXPERTS = "experts"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One phase to be.

    Attributes:
      id: stable id, `p00` onwards in program order.
      nodes: the graph nodes it covers; several for fused projections and vector chains.
      output: name of the value that a fused projection writes, holding all nodes' results; of the
        value that holds all taps.
      also: the same projections, node by node, of another value.
      also_output: what `output` is to `nodes`.
      part: of an exchange; its start and its end are steps of the same nodes.
    """

    id: str
    kind: StepKind
    nodes: tuple[Node, ...]
    output: str = ""
    also: tuple[Node, ...] = ()
    also_output: str = ""
    part: Part = Part.WHOLE

    @property
    def masks(self) -> str:
        """The input with masks of tokens that are applied to the logits first; empty for none."""
        first = self.nodes[0]
        return first.operands[1] if isinstance(first.op, MaskTokens) else ""

    @property
    def products(self) -> tuple[tuple[tuple[Node, ...], str], ...]:
        """For every left operand of a matmul the projections and the value that they write."""
        found = [(self.nodes, self.output)]
        if self.also:
            found.append((self.also, self.also_output))
        return tuple(
            (nodes, output if len(nodes) > 1 else nodes[0].results[0].name)
            for nodes, output in found
        )


@dataclass(frozen=True, kw_only=True)
class StepLoop:
    """`count` executions of `body`."""

    name: str
    count: int
    carries: tuple[Carry, ...]
    body: tuple[Step | StepLoop, ...]


@dataclass(frozen=True, kw_only=True)
class Alias:
    """Lanes `start` .. `start + width` of the base value's buffer."""

    base: str
    start: int
    width: int


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """A sharded graph cut into steps.

    Attributes:
      aliases: where every value that has no buffer of its own lies.
      widths: lanes of every base value.
      scalars: in a round, the values in scalar memory and the names of their arrays.
    """

    sharded: ShardedGraph
    body: tuple[Step | StepLoop, ...]
    aliases: dict[str, Alias]
    widths: dict[str, int]
    scalars: dict[str, str]

    def resolve(self, name: str) -> Alias:
        """The buffer lanes of a value."""
        return self.aliases.get(name) or Alias(base=name, start=0, width=self.widths[name])

    def steps(self) -> Iterator[Step]:
        """All steps in program order, loop bodies once."""
        yield from steps_of(self.body)


def steps_of(body: tuple[Step | StepLoop, ...]) -> Iterator[Step]:
    """All steps of a body in program order, loop bodies once."""
    for item in body:
        if isinstance(item, StepLoop):
            yield from steps_of(item.body)
        else:
            yield item


def lanes(shape: tuple[int, ...]) -> int:
    """Lanes of a value of shape [rows, ...] or of a vector."""
    count = 1
    for size in shape[1:] if len(shape) > 1 else shape:
        count *= size
    return count


def is_round(graph: Graph) -> bool:
    """Whether a graph is a round of a speculative scheme: it says how many tokens it emits."""
    return {"emitted", "count"} <= graph.outputs.keys()


def scalar_arrays(graph: Graph) -> dict[str, str]:
    """Values of a round that live in scalar memory -> the names of their arrays.

    How many blocks are stored is no address: masks are made of it, so it lies beside the blocks.
    """
    if not is_round(graph):
        return {}
    carried = [value for value in graph.inputs if value.name in graph.outputs]
    nodes = (one for one in graph.body.nodes() if not isinstance(one.op, BLOCK_OPS))
    values = [*carried, *(value for node in nodes for value in node.results)]
    return {
        value.name: f"s_{python_name(value.name)}"
        for value in values
        if value.type.dtype is DType.I32 and value.type.rank == 1
    }


def python_name(text: str) -> str:
    """`text` as a Python identifier."""
    return re.sub(r"\W+", "_", text).strip("_").lower()
