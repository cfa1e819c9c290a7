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
from mkc.ir.graph import Node
from mkc.passes.sharding import ShardedGraph


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


@dataclass(frozen=True, kw_only=True)
class Step:
    """One phase to be.

    Attributes:
      id: stable id, `p00` onwards in program order.
      nodes: the graph nodes it covers; several for fused projections and vector chains.
      output: name of the value that a fused projection writes, holding all nodes' results.
    """

    id: str
    kind: StepKind
    nodes: tuple[Node, ...]
    output: str = ""


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
    """

    sharded: ShardedGraph
    body: tuple[Step | StepLoop, ...]
    aliases: dict[str, Alias]
    widths: dict[str, int]

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


def python_name(text: str) -> str:
    """`text` as a Python identifier."""
    return re.sub(r"\W+", "_", text).strip("_").lower()
