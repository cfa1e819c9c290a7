"""The record of a traced model: every op of every layer, before layers are folded.

Values are numbers here; names come when the graph is built. Small classes with slots: a model of
640 layers records tens of thousands of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field

from mkc.ir.graph import Location
from mkc.ir.graph import StateKind
from mkc.ir.ops import Op
from mkc.ir.types import TensorType


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedParam:
    """A use of a parameter: `pattern` with `{index}`, and the layer number of every instance."""

    pattern: str
    type: TensorType
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedState:
    """A use of a state, as for parameters."""

    pattern: str
    kind: StateKind
    type: TensorType
    indices: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedNode:
    """One op with value numbers or parameters as operands; `results` are value numbers."""

    op: Op
    operands: tuple[int | TracedParam, ...]
    states: tuple[TracedState, ...]
    results: tuple[int, ...]
    types: tuple[TensorType, ...]
    location: Location | None

    def reads(self) -> Iterator[int]:
        """The values among the operands."""
        for operand in self.operands:
            if isinstance(operand, int):
                yield operand


type Segment = list[TracedNode]  # what one iteration of a loop over layers recorded


@dataclass(kw_only=True, slots=True)
class TracedLoop:
    """A loop over layers: one segment per iteration."""

    name: str
    location: Location | None
    segments: list[Segment] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class TracedCarry:
    """As `mkc.ir.graph.Carry`, with value numbers."""

    initial: int
    argument: int
    yielded: int
    result: int
    type: TensorType


@dataclass(kw_only=True, slots=True)
class TracedRepeat:
    """A folded run of segments."""

    name: str
    count: int
    carries: list[TracedCarry]
    body: list[TracedNode | TracedRepeat]
    location: Location | None
