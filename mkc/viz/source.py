"""What pictures are made of: a plan, its phases and its prediction."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mkc.plan.folder import PlanFolder
from mkc.plan.phases import PhaseRow
from mkc.schedule.simulate.events import CORE
from mkc.schedule.simulate.events import Event

HEADING = ("model", "scheme", "target", "ranks", "batch", "context")


@dataclass(frozen=True)
class Subject:
    """A plan with its prediction.

    Attributes:
      events: of all simulated ranks in one step, by id; times from its start.
      critical: ids of the events that decide how long the step takes.
      rank: whose step it is, the slowest one.
      position: of every sequence: how much of the caches is read.
      round_us, floor_us: predicted time of the step, and the least that its bytes take.
    """

    folder: PlanFolder
    rows: tuple[PhaseRow, ...]
    events: tuple[Event, ...]
    critical: frozenset[int]
    rank: int
    position: int
    round_us: float
    floor_us: float

    @property
    def heading(self) -> dict[str, Any]:
        """What was compiled, for the head of every document."""
        heading = {key: self.folder.report[key] for key in HEADING}
        return {**heading, "unit": self.folder.unit, "position": self.position}

    @cached_property
    def kernel_lines(self) -> dict[str, int]:
        """Phase id -> line of kernel.py, for the phases that have one."""
        return {one.id: one.kernel_line for one in self.rows if one.kernel_line}

    @cached_property
    def phase_us(self) -> dict[str, float]:
        """Phase id -> predicted time of the core in it per step, waits included."""
        times: dict[str, float] = defaultdict(float)
        for one in self.events:
            if one.rank == self.rank and one.track == CORE:
                times[one.phase] += one.us
        return dict(times)
