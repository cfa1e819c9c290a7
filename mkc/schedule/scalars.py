"""Scalar memory of a round, and how rounds follow one another.

Token ids, positions and counts live in scalar memory: they decide addresses. Phases name such an
array by the name of its `ScalarArray`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkc.schedule.program import View


@dataclass(frozen=True, kw_only=True)
class ScalarArray:
    """An i32 array in scalar memory that holds one value of the graph.

    Attributes:
      name: Python name in the generated kernel.
      value: of the graph; the inputs of a round are such values too.
      size: entries, one for each row or for each sequence.
    """

    name: str
    value: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Carried:
    """What the next round gets: array `source` becomes array `target`, an input of the graph."""

    target: str
    source: str


@dataclass(frozen=True, kw_only=True)
class CarriedRows:
    """What the next round gets as rows in VMEM: `source` replaces the rows of operand `target`.

    Sequences that emit nothing keep theirs. Rows are as wide as a vector register; the first lanes
    count.
    """

    target: str
    source: View

    @property
    def array(self) -> str:
        """Name of the VMEM array."""
        return f"{self.target}_rows"


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """How the rounds of a speculative scheme follow one another in a launch.

    Attributes:
      rows_per_sequence: T; row t of sequence s is row s * T + t.
      tokens, positions, kept: arrays of the inputs. A sequence whose first position is negative
        is idle.
      emitted, count: arrays of what a round emits [rows] and how many of it count [batch].
      carried: in the order of the graph's inputs.
      rows: what else is carried by rounds that sample.
      forced: array [rows] of what a sequence has to emit in the first round of a launch, -1 behind
        it; empty for rounds that do not sample.
    """

    rows_per_sequence: int
    tokens: str
    positions: str
    kept: str
    emitted: str
    count: str
    carried: tuple[Carried, ...]
    rows: tuple[CarriedRows, ...] = ()
    forced: str = ""
