"""What a simulation says about a round: where its time went, and what it was waiting for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from mkc.schedule.simulate.engine import Run
from mkc.schedule.simulate.events import CORE
from mkc.schedule.simulate.events import MEMORY
from mkc.schedule.simulate.events import Event
from mkc.schedule.simulate.events import Kind
from mkc.schedule.simulate.machine import Engine
from mkc.schedule.simulate.machine import Stall

EPSILON_US = 1e-6


class Part(StrEnum):
    """What a stretch of the critical path is."""

    STREAM = "stream"  # the memory moved bytes
    LATENCY = "latency"  # bytes on their way after the last one was served or sent
    LINK = "link"  # a message was sent
    COMPUTE = "compute"  # the core computed, or its matrix unit drained
    CONTROL = "control"  # the core issued copies or ran loops


@dataclass(frozen=True, slots=True, kw_only=True)
class PathStep:
    """A stretch of the critical path: `event` explains the time from `start_us` to `end_us`."""

    event: int
    part: Part
    start_us: float
    end_us: float

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


@dataclass(frozen=True, kw_only=True)
class Exposed:
    """Time for which the memory of a rank stood still, by what its core did meanwhile.

    Together with the time in which the memory moved bytes this is the whole time.

    Attributes:
      collective: waited for other ranks' messages.
      dma: waited for a copy on its way (latency), because too few bytes were in flight.
      compute: computed, while no load was left to serve.
      fixed: barriers, control, starting copies; also whatever comes before and after the core's
        work.
    """

    collective: float
    dma: float
    compute: float
    fixed: float

    @property
    def total(self) -> float:
        return self.collective + self.dma + self.compute + self.fixed


@dataclass(frozen=True, kw_only=True)
class Window:
    """A stretch of time on one rank."""

    rank: int
    start_us: float
    end_us: float

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


def critical_path(run: Run, window: Window) -> tuple[PathStep, ...]:
    """What the core waited for, back from the end of a window to its start, in order of time.

    The steps adjoin and cover the window.
    """
    events = run.events
    ends = [
        one
        for one in events
        if one.rank == window.rank
        and one.track == CORE
        and one.start_us < window.end_us - EPSILON_US
    ]
    steps: list[PathStep] = []
    now, event = window.end_us, ends[-1]
    while now > window.start_us + EPSILON_US:
        if event.kind is Kind.WAIT and event.stall not in (None, Stall.DRAIN):
            event = events[event.after]
            continue
        if now > event.end_us + EPSILON_US and event.kind in (Kind.COPY, Kind.MESSAGE):
            steps.append(_step(event, Part.LATENCY, event.end_us, now, window))
            now = event.end_us
        if now > max(event.start_us, window.start_us):
            steps.append(_step(event, _part(event), event.start_us, now, window))
            now = event.start_us
        if event.after < 0:
            break
        event = events[event.after]
    return tuple(reversed(steps))


def _step(event: Event, part: Part, start_us: float, end_us: float, window: Window) -> PathStep:
    return PathStep(
        event=event.id, part=part, start_us=max(start_us, window.start_us), end_us=end_us
    )


def _part(event: Event) -> Part:
    match event.kind:
        case Kind.COPY:
            return Part.STREAM
        case Kind.MESSAGE:
            return Part.LINK
        case Kind.ISSUE:
            return Part.CONTROL
        case Kind.WAIT:
            return Part.COMPUTE if event.stall is Stall.DRAIN else Part.CONTROL
        case Kind.WORK:
            return Part.CONTROL if event.engine is Engine.CONTROL else Part.COMPUTE


def by_part(path: Iterable[PathStep]) -> dict[Part, float]:
    """Time of each part of a critical path."""
    sums = dict.fromkeys(Part, 0.0)
    for step in path:
        sums[step.part] += step.us
    return sums


type Clips = list[tuple[float, float, Event]]
"""Events of a window with their times cut to it, in order of start."""


def clipped(events: Iterable[Event], window: Window) -> Clips:
    """Events of the window's rank with their times cut to it, in order of start."""
    found = [
        (max(one.start_us, window.start_us), min(one.end_us, window.end_us), one)
        for one in events
        if one.rank == window.rank and one.end_us > window.start_us and one.start_us < window.end_us
    ]
    return sorted(found, key=lambda item: (item[0], item[2].id))


def busy_by_engine(clips: Clips) -> dict[str, float]:
    """Busy time in a window: of the core by engine, its waits, the memory and every link class."""
    sums: dict[str, float] = defaultdict(float)
    for start, end, event in clips:
        sums[str(_engine(event))] += end - start
    return dict(sorted(sums.items()))


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """Where the core's time in a phase went, over all executions in a window.

    Attributes:
      work_us: computed, drained the matrix unit, started copies and messages.
      wait_us: by what it waited for.
    """

    work_us: float
    wait_us: dict[Stall, float]

    @property
    def us(self) -> float:
        return self.work_us + sum(self.wait_us.values())


def by_phase(clips: Clips) -> dict[str, PhaseTime]:
    """Core time of every phase by id, in program order."""
    work: dict[str, float] = {}
    waits: dict[str, dict[Stall, float]] = {}
    for start, end, event in clips:
        if event.track != CORE:
            continue
        work.setdefault(event.phase, 0.0)
        waited = waits.setdefault(event.phase, {})
        if event.kind is Kind.WAIT and event.stall not in (None, Stall.DRAIN):
            waited[event.stall] = waited.get(event.stall, 0.0) + end - start
        else:
            work[event.phase] += end - start
    return {phase: PhaseTime(work_us=work[phase], wait_us=waits[phase]) for phase in work}


def core_us(clips: Clips, window: Window) -> float:
    """A window without the time in which the core waited for copies."""
    copies = (Stall.TAPE, Stall.COPY)
    return window.us - sum(end - start for start, end, one in clips if one.stall in copies)


def _engine(event: Event) -> str:
    if event.track != CORE:
        return event.track
    if event.kind is Kind.WAIT:
        return Engine.MATRIX if event.stall is Stall.DRAIN else "wait"
    return event.engine or Engine.CONTROL


def exposed(clips: Clips, window: Window) -> Exposed:
    """Attributes the memory's idle time in a window to what the core did."""
    busy = [(start, end) for start, end, one in clips if one.track == MEMORY]
    core = [(start, end, one) for start, end, one in clips if one.track == CORE]
    sums = {"collective": 0.0, "dma": 0.0, "compute": 0.0, "fixed": 0.0}
    place = 0
    for idle_start, idle_end in _gaps(busy, window):
        explained = 0.0
        while place < len(core) and core[place][1] <= idle_start:
            place += 1
        index = place
        while index < len(core) and core[index][0] < idle_end:
            start, end, event = core[index]
            us = max(0.0, min(end, idle_end) - max(start, idle_start))
            sums[_cause(event)] += us
            explained += us
            index += 1
        sums["fixed"] += idle_end - idle_start - explained
    return Exposed(**sums)


def _cause(event: Event) -> str:
    match event.stall:
        case Stall.EXCHANGE:
            return "collective"
        case Stall.TAPE | Stall.COPY:
            return "dma"
        case Stall.BARRIER:
            return "fixed"
        case Stall.DRAIN:
            return "compute"
    return "compute" if event.engine in (Engine.MATRIX, Engine.VECTOR) else "fixed"


def _gaps(busy: list[tuple[float, float]], window: Window) -> list[tuple[float, float]]:
    """The stretches of a window that no interval covers; intervals are in order and disjoint."""
    gaps, now = [], window.start_us
    for start, end in busy:
        if start > now:
            gaps.append((now, start))
        now = max(now, end)
    if window.end_us > now:
        gaps.append((now, window.end_us))
    return gaps
