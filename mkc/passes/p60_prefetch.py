"""Pass 60: derives which load is started when a load has been consumed.

The ring has D slots; when load g has been consumed its slot takes load g + D. Loads follow one
another on the tape, so only the SIZE of load g + D has to be known, and it is known statically:
inside a run of matmuls from the run itself, across a loop border from the first loads behind it.
Where the two ways out of a loop begin with loads of different sizes the choice is a guard on the
loop counter. D is at most the number of loads of any run between loop borders, so one border is
crossed at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mkc.passes.p30_tile import Tiles
from mkc.passes.p30_tile import Tiling
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepKind
from mkc.passes.steps import StepLoop
from mkc.passes.steps import steps_of
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import ROUNDS
from mkc.schedule.program import Guard
from mkc.schedule.program import TileRun


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Loads between two loop borders.

    Attributes:
      loads: (step id, rows) in order.
      after: what may follow, as (loop that goes on, loops that have ended, segment or None).
    """

    first_step: str
    loads: tuple[tuple[str, int], ...]
    after: tuple[Successor, ...]


@dataclass(frozen=True, kw_only=True)
class Successor:
    """One way out of a segment; `first_step` names the segment behind it, empty at the end."""

    loop: str | None
    ended: tuple[str, ...]
    first_step: str


@dataclass(frozen=True, kw_only=True)
class Prefetched:
    """Runs of every matmul step, and the loads started before the first phase."""

    runs: dict[str, tuple[TileRun, ...]]
    prologue: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """Derives the refills for a ring of `slots` slots.

    With several rounds per launch the tape wraps: behind the last load of a round comes the first
    load of the next, until the last round.
    """

    name: ClassVar[str] = "prefetch"

    def apply(
        self, graph: StepGraph, tiles: Tiles, slots: int, rounds: int, log: DecisionLog
    ) -> Prefetched:
        """Returns the refills of every load, and the loads to start first."""
        segments = {one.first_step: one for one in _segments(graph.body, tiles, rounds)}
        refills: dict[str, list[tuple[Guard, ...]]] = {}
        for segment in segments.values():
            for index, (step, _) in enumerate(segment.loads):
                refills.setdefault(step, []).append(_refill(segments, segment, index + slots))
        runs = {step: _runs(refills[step], tiles.tilings[step].loads_per_step) for step in refills}
        runs = {step: _split_last(found, tiles.tilings[step]) for step, found in runs.items()}
        first = next(iter(segments.values()))
        guards = sum(len(one) > 1 for found in refills.values() for one in found)
        log.choose(
            "prefetch.refill",
            passed=self.name,
            chosen=f"{sum(len(found) for found in runs.values())} loops, {guards} guarded refills",
            because="refills of one size share a loop; a guard stands only where a loop may end "
            "and the next loads differ in size",
            rejected={"a loop or a guard for every load": "more code for the same copies"},
        )
        return Prefetched(runs=runs, prologue=tuple(rows for _, rows in first.loads[:slots]))


def _refill(segments: dict[str, Segment], segment: Segment, index: int) -> tuple[Guard, ...]:
    """Size of load `index` counted from the segment's first one."""
    if index < len(segment.loads):
        return (Guard(loop=None, ended=(), rows=segment.loads[index][1]),)
    beyond = index - len(segment.loads)
    guards = []
    for after in segment.after:
        rows = segments[after.first_step].loads[beyond][1] if after.first_step else None
        guards.append(Guard(loop=after.loop, ended=after.ended, rows=rows))
    if len({guard.rows for guard in guards}) == 1:
        return (Guard(loop=None, ended=(), rows=guards[0].rows),)
    return tuple(guards)


def _runs(refills: list[tuple[Guard, ...]], loads_per_step: int) -> tuple[TileRun, ...]:
    """Groups output steps whose refills are equal."""
    steps = [
        tuple(refills[at : at + loads_per_step]) for at in range(0, len(refills), loads_per_step)
    ]
    runs: list[TileRun] = []
    for index, refill in enumerate(steps):
        if runs and runs[-1].refill == refill:
            last = runs.pop()
            runs.append(TileRun(first=last.first, count=last.count + 1, refill=refill))
        else:
            runs.append(TileRun(first=index, count=1, refill=refill))
    return tuple(runs)


def _split_last(runs: tuple[TileRun, ...], tiling: Tiling) -> tuple[TileRun, ...]:
    """The last output step is a run of its own when it is shorter."""
    if tiling.blocks % tiling.blocks_per_step == 0 or runs[-1].count == 1:
        return runs
    last = runs[-1]
    return (
        *runs[:-1],
        TileRun(first=last.first, count=last.count - 1, refill=last.refill),
        TileRun(first=last.first + last.count - 1, count=1, refill=last.refill),
    )


def _segments(body: tuple[Step | StepLoop, ...], tiles: Tiles, rounds: int) -> list[Segment]:
    """All segments in program order."""
    found: list[Segment] = []
    end: tuple[Successor, ...] = (Successor(loop=None, ended=(), first_step=""),)
    if rounds > 1:
        first = next(step.id for step in steps_of(body) if step.kind is StepKind.MATMUL)
        end = (
            Successor(loop=ROUNDS, ended=(), first_step=first),
            Successor(loop=None, ended=(ROUNDS,), first_step=""),
        )
    _collect(body, end, tiles, found)
    return found


def _collect(
    body: tuple[Step | StepLoop, ...],
    behind: tuple[Successor, ...],
    tiles: Tiles,
    found: list[Segment],
) -> None:
    """Adds the segments of `body`; `behind` is what follows the body."""
    index = 0
    while index < len(body):
        item = body[index]
        if isinstance(item, StepLoop):
            after = _follow(body, index + 1, behind)
            again = _follow(item.body, 0, ())
            if again:
                own = (
                    (Successor(loop=item.name, ended=(), first_step=again[0].first_step),)
                    if item.count > 1
                    else ()
                )
                ended = tuple(
                    Successor(
                        loop=one.loop, ended=(item.name, *one.ended), first_step=one.first_step
                    )
                    for one in after
                )
                _collect(item.body, own + ended, tiles, found)
            index += 1
            continue
        stop = index
        while stop < len(body) and isinstance(body[stop], Step):
            stop += 1
        loads = tuple(
            (step.id, rows)
            for step in body[index:stop]
            if isinstance(step, Step) and step.kind is StepKind.MATMUL
            for rows in tiles.tilings[step.id].loads()
        )
        if loads:
            found.append(
                Segment(first_step=loads[0][0], loads=loads, after=_follow(body, stop, behind))
            )
        index = stop


def _follow(
    body: tuple[Step | StepLoop, ...], index: int, behind: tuple[Successor, ...]
) -> tuple[Successor, ...]:
    """The first loads at or after `body[index]`, else what is behind the body."""
    for step in steps_of(body[index:]):
        if step.kind is StepKind.MATMUL:
            return (Successor(loop=None, ended=(), first_step=step.id),)
    return behind
