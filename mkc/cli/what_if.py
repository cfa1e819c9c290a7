"""What other choices would give: a plan's graph lowered with other options, and simulated.

Phase times of all are those of the target file, also of the plan itself, so that they compare:
machine code is there for what was chosen only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from mkc.driver import lower_graph
from mkc.errors import MkcError
from mkc.errors import PlanDamagedError
from mkc.ir.graph import Graph
from mkc.ir.text import parse
from mkc.passes.pipeline import Lowered
from mkc.plan.folder import PlanFolder
from mkc.schedule.decisions import Decision
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Program
from mkc.schedule.simulate import predict

GRAPH = "graph.txt"
ROW_BYTES = 2 * TAPE_LANES
RING = ("tile.load_bytes", "tile.ring", "residency.ring_slots", "prefetch.refill")
RESERVE = re.compile(r"(\d+) bytes left to the compiler")
SHARDS = re.compile(r"(\d+) shards, each on \d+ ranks")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `mkc compile` that differ from the plan's; none for the plan itself.

    Attributes:
      passes: as for `--passes`.
      tp: as for `--tp`, None for the plan's.
    """

    passes: str = ""
    tp: int | None = None

    @property
    def arguments(self) -> tuple[str, ...]:
        """For the command line."""
        passes = ("--passes", self.passes) if self.passes else ()
        return passes if self.tp is None else (*passes, "--tp", str(self.tp))


AS_CHOSEN = Options()


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Other options, and what the plan would be with them.

    Attributes:
      round_us: predicted time of a step or round, None where it cannot be made.
      problem: why it cannot.
      same: the options give the plan that there is.
    """

    options: Options
    round_us: float | None
    problem: str = ""
    same: bool = False


class WhatIf:
    """Answers for one plan; each answer is computed once."""

    def __init__(self, folder: PlanFolder) -> None:
        """Raises `PlanDamagedError` when the graph beside the plan is not that of the plan."""
        self.folder = folder
        self._graph = _read_graph(folder)
        self._alternative = cache(self._simulated)
        if self.lowered(AS_CHOSEN).program != folder.program:
            raise PlanDamagedError(
                path=folder.path / GRAPH, problem="it is not the graph that the plan was made from"
            )

    def alternatives(self, decision: Decision) -> tuple[Alternative, ...]:
        """What was chosen first, then the options that choose otherwise; empty without any."""
        options = list(_options(decision, self.folder))
        return tuple(map(self._alternative, (AS_CHOSEN, *options))) if options else ()

    def lowered(self, options: Options) -> Lowered:
        """The graph with the plan's options, but for those that `options` names."""
        program = self.folder.program
        ranks = program.ranks if options.tp is None else options.tp
        planned = str(self.folder.plan["pipeline"]).replace(
            f"shard{{ranks={program.ranks}", f"shard{{ranks={ranks}"
        )
        return lower_graph(
            self._graph,
            self.folder.target,
            tp=ranks,
            passes=",".join(filter(None, (planned, options.passes))),
            logits=program.logits is not None,
            rounds_per_launch=program.rounds_per_launch,
        )

    def _simulated(self, options: Options) -> Alternative:
        try:
            program = self.lowered(options).program
        except MkcError as error:
            problem = error.message.splitlines()[0]
            return Alternative(options=options, round_us=None, problem=problem)
        time = predict(program, self.folder.target).round_us
        same = program == self.folder.program
        return Alternative(options=options, round_us=round(time, 1), same=same)


def _read_graph(folder: PlanFolder) -> Graph:
    path = folder.path / GRAPH
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanDamagedError(path=path, problem=f"it cannot be read: {error}") from None


def _options(decision: Decision, folder: PlanFolder) -> Iterator[Options]:
    """Options that would choose otherwise."""
    for ranks in _ranks(decision, folder):
        yield Options(tp=ranks)
    for passes in _passes(decision, folder.program):
        yield Options(passes=passes)


def _ranks(decision: Decision, folder: PlanFolder) -> Iterator[int]:
    """Meshes on the plan's devices: half and double, or the one whose shards need no copies."""
    assert folder.target.topology is not None
    ranks = folder.program.ranks
    if decision.id == "shard.ranks":
        sizes = (ranks // 2, 2 * ranks)
        yield from (size for size in sizes if 1 <= size <= folder.target.topology.devices)
    if decision.id.startswith("shard.copies.") and (found := SHARDS.match(decision.chosen)):
        yield int(found[1])


def _passes(decision: Decision, program: Program) -> Iterator[str]:
    pass_name, _, subject = decision.id.partition(".")
    if decision.id in RING:
        load = program.tape.slot_rows * ROW_BYTES
        ring = load * program.tape.slots
        yield from (f"tile{{load_bytes={size}}}" for size in (load // 4, load // 2, load * 2))
        yield from (f"tile{{ring_bytes={size}}}" for size in (ring // 2, ring * 2))
    if pass_name == "residency":
        yield from _residency(decision, subject, program)
    for phase in program.phases():
        if decision.id == f"tile.{phase.id}" and isinstance(phase, MatmulPhase):
            load = phase.loads()[0] * ROW_BYTES
            for size in (load // 2, load * 2):
                yield f"tile{{step={phase.id},step_load_bytes={size}}}"
    if pass_name == "fuse":
        narrow = decision.id.startswith("fuse.narrow.")
        yield "fuse{narrow_columns=0}" if narrow else "fuse{overlap=False}"
    if pass_name == "collectives":
        for other in decision.rejected:
            yield f"collectives{{algorithm={other}}}"


def _residency(decision: Decision, subject: str, program: Program) -> Iterator[str]:
    for one in program.caches:
        if one.name == subject:
            tiles = (one.tile // 2, 2 * one.tile)
            yield from (f"residency{{cache_tile={size}}}" for size in tiles)
    for stream in program.streams:
        if stream.name == subject:
            slots = (max(2, stream.slots // 2), 2 * stream.slots)
            yield from (f"residency{{state_slots={count}}}" for count in slots)
    if found := RESERVE.match(decision.chosen):
        reserve = int(found[1])
        yield from (f"residency{{reserve_bytes={size}}}" for size in (reserve // 2, 2 * reserve))
