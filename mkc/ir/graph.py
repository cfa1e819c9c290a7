"""The op graph of one decode step: nodes in program order, repeat regions, parameters and states.

Names are strings and unique within a graph: values `%name`, parameters and states by their key. A
`Repeat` runs its body `count` times; parameters and states used in it are stacked, one instance per
execution, in execution order (outer iterations first).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING

from mkc.ir.types import TensorType

if TYPE_CHECKING:
    from mkc.ir.ops import Op


@dataclass(frozen=True, kw_only=True)
class Location:
    """A place in the author's file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class StateKind(StrEnum):
    """What a state means over time; decides its layout, reads and writes."""

    KV_CACHE = "kv_cache"  # [context, heads, dim], appended at the position of each row
    RECURRENT = "recurrent"  # [...], read and rewritten by every step
    CONV = "conv"  # [taps - 1, channels], the newest inputs, oldest first
    KEPT = "kept"  # [rows per sequence, ...], of the rows of the last step, to commit some later
    TAP = "tap"  # [...] for each token row; lives within one step


MEMBER = "{member}"


@dataclass(frozen=True, kw_only=True)
class Param:
    """A weight. `pattern` is the checkpoint name with `{index}` where the layer number stands.

    A parameter with `{member}` in its pattern, such as the same matrix of all experts, is stored as
    one tensor for each entry of its first axis.

    Attributes:
      key: unique name in the graph.
      pattern: checkpoint tensor name; `{index}` is replaced by each entry of `indices`, `{member}`
        by the number along the first axis.
      type: type of one instance, axes as stored in the checkpoint ([out, in] for projections).
      indices: layer number of every instance in execution order; empty outside repeat regions.
    """

    key: str
    pattern: str
    type: TensorType
    indices: tuple[int, ...] = ()

    @property
    def instances(self) -> int:
        return max(1, len(self.indices))

    @property
    def is_stacked(self) -> bool:
        """Whether the checkpoint has a tensor for each entry of the first axis."""
        return MEMBER in self.pattern

    @property
    def tensor_type(self) -> TensorType:
        """Type of one checkpoint tensor."""
        return replace(self.type, axes=self.type.axes[1:]) if self.is_stacked else self.type

    def tensor_names(self) -> tuple[str, ...]:
        """Checkpoint tensor names: one per instance, or the members of each instance in order."""
        members = range(self.type.shape[0]) if self.is_stacked else (0,)
        instances = range(self.instances)
        return tuple(self.tensor_name(one, member) for one in instances for member in members)

    def tensor_name(self, instance: int, member: int = 0) -> str:
        """Checkpoint tensor name of one instance, and of one member where they are stacked."""
        name = self.pattern
        if self.indices:
            name = name.replace("{index}", str(self.indices[instance]))
        return name.replace(MEMBER, str(member)) if self.is_stacked else name


@dataclass(frozen=True, kw_only=True)
class State:
    """Memory that lives from step to step.

    Attributes:
      key: unique name in the graph.
      pattern: readable name with `{index}` for the layer number.
      kind: meaning over time.
      type: shape and dtype for ONE sequence of ONE layer.
      indices: as for `Param`.
    """

    key: str
    pattern: str
    kind: StateKind
    type: TensorType
    indices: tuple[int, ...] = ()

    @property
    def instances(self) -> int:
        return max(1, len(self.indices))


@dataclass(frozen=True, kw_only=True)
class Value:
    """A named intermediate result."""

    name: str
    type: TensorType


@dataclass(frozen=True, kw_only=True)
class Node:
    """One operation. Operands are names of values or keys of parameters, in the op's order.

    Attributes:
      op: the operation and its attributes.
      operands: value names and parameter keys.
      states: keys of the states it reads and writes, in the op's order.
      results: the values it defines.
      location: the author's line that created it.
    """

    op: Op
    operands: tuple[str, ...]
    states: tuple[str, ...] = ()
    results: tuple[Value, ...]
    location: Location | None = None


@dataclass(frozen=True, kw_only=True)
class Carry:
    """A value that goes round a repeat region.

    Attributes:
      initial: name, outside, of the value that enters the first iteration.
      argument: the value the body reads.
      yielded: name, inside, of the value that the next iteration (or the outside) gets.
      result: the value, outside, after the last iteration.
    """

    initial: str
    argument: Value
    yielded: str
    result: Value


@dataclass(frozen=True, kw_only=True)
class Repeat:
    """`count` executions of `body`. Values of the outside may be read by name."""

    name: str
    count: int
    carries: tuple[Carry, ...]
    body: Block
    location: Location | None = None


@dataclass(frozen=True, kw_only=True)
class Block:
    """Nodes and regions in program order."""

    items: tuple[Node | Repeat, ...]

    def nodes(self) -> Iterator[Node]:
        """All nodes, regions included, in program order."""
        for item in self.items:
            if isinstance(item, Repeat):
                yield from item.body.nodes()
            else:
                yield item


@dataclass(frozen=True, kw_only=True)
class Graph:
    """One step of a model.

    Attributes:
      name: model name.
      rows: token rows per step (batch for plain decoding), all rows of a sequence side by side.
      batch: sequences; `rows` is a multiple of it.
      context: positions a cache holds.
      inputs: step inputs: `tokens` i32 [rows] and `positions` i32 [rows]. A row with a negative
        position is padding, which changes no state; it stands behind its sequence's other rows,
        whose positions are consecutive. A round of a speculative scheme has more inputs, each with
        one entry per row or per sequence.
      params, states: by key, in order of first use.
      body: the operations.
      outputs: output name (`next_token`, `logits`) -> value name.
    """

    name: str
    rows: int
    batch: int
    context: int
    inputs: tuple[Value, ...]
    params: dict[str, Param]
    states: dict[str, State]
    body: Block
    outputs: dict[str, str]
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def rows_per_sequence(self) -> int:
        return self.rows // self.batch
