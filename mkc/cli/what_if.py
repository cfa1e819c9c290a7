"""What other choices would give: a plan's graph lowered with other options, and simulated.

Phase times of all are those of the target file, also of the plan itself, so that they compare:
machine code is there for what was chosen only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from functools import partial

from mkc.driver import lower_graph
from mkc.errors import MkcError
from mkc.errors import PlanDamagedError
from mkc.ir.graph import Graph
from mkc.ir.text import parse
from mkc.passes.p40_collectives import ONE_SHOT
from mkc.passes.p40_collectives import TWO_PHASE
from mkc.plan.folder import PlanFolder
from mkc.schedule.decisions import Decision
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import Program
from mkc.schedule.simulate import predict

GRAPH = "graph.txt"
ROW_BYTES = 2 * TAPE_LANES
RING = re.compile(r"tile\..*|residency\.ring_slots")


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Other options, and what the plan would be with them.

    Attributes:
      passes: as for `mkc compile --passes`; empty for what was chosen.
      round_us: predicted time of a step or round, None where it cannot be made.
      problem: why it cannot.
    """

    passes: str
    round_us: float | None
    problem: str = ""


class WhatIf:
    """Answers for one plan; each answer is computed once."""

    def __init__(self, folder: PlanFolder) -> None:
        """Raises `PlanDamagedError` when the graph beside the plan is not that of the plan."""
        self.folder = folder
        self._graph = _read_graph(folder)
        self._answer = cache(partial(_lowered, self._graph, folder))
        lowered = self._answer("")
        if lowered != folder.program:
            raise PlanDamagedError(
                path=folder.path / GRAPH, problem="it is not the graph that the plan was made from"
            )
        self._time = cache(self._predict)

    def alternatives(self, decision: Decision) -> tuple[Alternative, ...]:
        """What was chosen first, then the options that choose otherwise; empty without any."""
        options = list(_options(decision, self.folder.program))
        return tuple(self._time(one) for one in ("", *options)) if options else ()

    def _predict(self, passes: str) -> Alternative:
        try:
            program = self._answer(passes)
        except MkcError as error:
            return Alternative(passes=passes, round_us=None, problem=error.message)
        time = predict(program, self.folder.target).round_us
        return Alternative(passes=passes, round_us=round(time, 1))


def _read_graph(folder: PlanFolder) -> Graph:
    path = folder.path / GRAPH
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanDamagedError(path=path, problem=f"it cannot be read: {error}") from None


def _lowered(graph: Graph, folder: PlanFolder, passes: str) -> Program:
    """The graph with the plan's options, but for those that `passes` names."""
    program = folder.program
    text = ",".join(part for part in (str(folder.plan["pipeline"]), passes) if part)
    return lower_graph(
        graph,
        folder.target,
        tp=program.ranks,
        passes=text,
        logits=program.logits is not None,
        rounds_per_launch=program.rounds_per_launch,
    ).program


def _options(decision: Decision, program: Program) -> Iterator[str]:
    """Options that would choose otherwise."""
    if RING.fullmatch(decision.id):
        load = program.tape.slot_rows * ROW_BYTES
        ring = load * program.tape.slots
        yield from (f"tile{{load_bytes={size}}}" for size in (load // 4, load // 2, load * 2))
        yield from (f"tile{{ring_bytes={size}}}" for size in (ring // 2, ring * 2))
    for cache_stream in program.caches:
        if decision.id == f"residency.{cache_stream.name}":
            tile = cache_stream.tile
            yield from (f"residency{{cache_tile={size}}}" for size in (tile // 2, tile * 2))
    if decision.id.startswith("fuse.narrow."):
        yield "fuse{narrow_columns=0}"
    if decision.id.startswith("collectives."):
        yield from (f"collectives{{algorithm={one}}}" for one in (ONE_SHOT, TWO_PHASE))
