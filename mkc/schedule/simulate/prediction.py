"""The prediction of a program: one simulation and its summary.

`predict` is what the report shows; `simulate` also keeps the events for pictures and explanations.
All times are predicted, from published figures of the target; nothing was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import asdict
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mkc.ir.routing import Routing
from mkc.schedule.program import Program
from mkc.schedule.simulate.analysis import Clips
from mkc.schedule.simulate.analysis import Exposed
from mkc.schedule.simulate.analysis import PathStep
from mkc.schedule.simulate.analysis import PhaseTime
from mkc.schedule.simulate.analysis import Window
from mkc.schedule.simulate.analysis import busy_by_engine
from mkc.schedule.simulate.analysis import by_part
from mkc.schedule.simulate.analysis import by_phase
from mkc.schedule.simulate.analysis import clipped
from mkc.schedule.simulate.analysis import core_us
from mkc.schedule.simulate.analysis import critical_path
from mkc.schedule.simulate.analysis import exposed
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.schedule.simulate.cost_parts import PhaseCost
from mkc.schedule.simulate.costs import phase_costs
from mkc.schedule.simulate.engine import Run
from mkc.schedule.simulate.engine import run
from mkc.schedule.simulate.events import MEMORY
from mkc.schedule.simulate.events import Event
from mkc.schedule.simulate.events import Kind
from mkc.schedule.simulate.events import event_document
from mkc.schedule.simulate.exchange_chains import ExchangeChains
from mkc.schedule.simulate.exchange_chains import exchange_chains
from mkc.schedule.simulate.machine import RankSkew
from mkc.schedule.simulate.translate import machine_program
from mkc.schedule.simulate.translate import rows_per_round
from mkc.targets import Target

ROUNDS = 3  # simulated: the first fills the ring, the last one does not refill it
PLACES = 3  # decimal places of times in JSON


class FloorPart(StrEnum):
    """What bytes between HBM and VMEM are."""

    TAPE = "tape"  # weights of matmuls
    EXPERTS = "experts"  # the chosen ones, on the rank that reads most
    SMALL_WEIGHTS = "small weights"  # vectors, and weights of narrow projections
    STATES = "states"  # recurrent and convolution states with what rounds keep, both ways
    CACHES = "caches"  # keys and values up to the position, and the new rows
    ROWS = "rows"  # of tables, and masks of tokens


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Predicted time of a round.

    Attributes:
      round_us: a round in the middle of a launch; the whole kernel when a launch has one or two.
      floor_us: the bytes of that round at the memory's sustained rate.
      floor_parts: floor_us by what the bytes are, see `FloorPart`.
      utilization: floor_us / round_us.
      core_us: the round without its waits for copies: how long the core alone would take.
      by_engine: busy time of the core's engines, its waits, the memory and the links.
      exposed: round_us - floor_us, by cause.
      exchanges: how often it waits for other ranks.
      critical_path: time of its parts.
      cost_source: share of the core's work whose time comes from machine code, from the pushes it
        holds at the target's rate, from the target file.
      position: of every sequence: how much of the caches is read.
      routing: what is assumed of the choice of experts; None without experts.
      rounds: rounds that were simulated.
      bytes: what the round moved between HBM and VMEM.
      launch_us: fixed cost of a launch, which its rounds share; not in round_us.
    """

    round_us: float
    floor_us: float
    floor_parts: dict[str, float]
    utilization: float
    core_us: float
    by_engine: dict[str, float]
    exposed: Exposed
    exchanges: ExchangeChains
    critical_path: dict[str, float]
    cost_source: dict[str, float]
    position: int
    routing: Routing | None
    rounds: int
    bytes: int
    launch_us: float

    def document(self) -> dict[str, Any]:
        """For report.json; times in us."""
        return {key: _rounded(value) for key, value in asdict(self).items()}


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A simulated launch.

    Attributes:
      window: the round that the prediction is about, on its slowest rank.
      path: the critical path of that round.
      costs: core time of phases by id.
    """

    prediction: Prediction
    run: Run
    window: Window
    path: tuple[PathStep, ...]
    costs: Mapping[str, PhaseCost]

    @property
    def phases(self) -> dict[str, PhaseTime]:
        """Core time of every phase in the window, by id."""
        return by_phase(clipped(self.run.events, self.window))

    @property
    def events(self) -> tuple[Event, ...]:
        return self.run.events

    def document(self) -> dict[str, Any]:
        """The round as JSON; the ids are stable for the same program and target.

        Events before the round are left out, so an id that names one of them leads nowhere.
        """
        ids = sorted({one.id for _, _, one in clipped(self.run.events, self.window)})
        return {
            "predicted": self.prediction.document(),
            "window": _rounded(asdict(self.window)),
            "symmetric": self.run.symmetric,
            "critical_path": [_rounded(asdict(one)) for one in self.path],
            "events": [event_document(self.run.events[one]) for one in ids],
        }


def simulate(
    program: Program,
    target: Target,
    *,
    cycles: Mapping[str, PhaseCycles] | None = None,
    position: int | None = None,
    skew: Sequence[RankSkew] = (),
    routing: Routing = Routing.UNIFORM,
    rounds: int = ROUNDS,
) -> Simulation:
    """Simulates a launch of all ranks.

    Args:
      cycles: machine code of the phases (`bundle_costs`); None estimates them from the target.
      position: of every sequence; None takes the middle of the context.
      skew: one per rank; empty when all are alike, and then one rank stands for all.
      routing: how rows choose experts.
      rounds: at most so many are simulated.
    """
    step = rows_per_round(program)
    rounds = min(rounds, program.rounds_per_launch, program.context // step)
    if position is None:
        position = min(program.context // 2, program.context - rounds * step)
    costs = phase_costs(program, target, cycles or {})
    machine = machine_program(program, costs, position=position, rounds=rounds, routing=routing)
    result = run(machine, target, skew)
    window = _window(result, rounds)
    path = critical_path(result, window)
    clips = clipped(result.events, window)
    moved = _bytes(clips)
    floor_us = moved / target.hbm.sustained_bytes_per_us
    prediction = Prediction(
        round_us=window.us,
        floor_us=floor_us,
        floor_parts=_floor_parts(clips, program, target),
        utilization=floor_us / window.us,
        core_us=core_us(clips, window),
        by_engine=busy_by_engine(clips),
        exposed=exposed(clips, window),
        exchanges=exchange_chains(result, window),
        critical_path={str(part): us for part, us in by_part(path).items()},
        cost_source=_cost_source(clips, costs),
        position=position,
        routing=routing if program.experts else None,
        rounds=rounds,
        bytes=round(moved),
        launch_us=target.launch.fixed_us,
    )
    return Simulation(prediction=prediction, run=result, window=window, path=path, costs=costs)


def predict(
    program: Program,
    target: Target,
    *,
    cycles: Mapping[str, PhaseCycles] | None = None,
    position: int | None = None,
    routing: Routing = Routing.UNIFORM,
) -> Prediction:
    """The summary of `simulate`, for reports."""
    return simulate(program, target, cycles=cycles, position=position, routing=routing).prediction


def _window(result: Run, rounds: int) -> Window:
    """The middle round of at least three, else everything, on the rank where it is longest."""
    if rounds < ROUNDS:
        ends = result.end_us
        slowest = max(range(len(ends)), key=lambda rank: ends[rank])
        return Window(rank=slowest, start_us=0.0, end_us=ends[slowest])
    windows = [
        Window(rank=rank, start_us=starts[1], end_us=starts[2])
        for rank, starts in enumerate(result.round_starts)
    ]
    return max(windows, key=lambda one: one.us)


def _bytes(clips: Clips) -> float:
    """Bytes that the memory moved."""
    return sum(
        one.bytes * (end - start) / one.us for start, end, one in clips if one.track == MEMORY
    )


def _floor_parts(clips: Clips, program: Program, target: Target) -> dict[str, float]:
    """Time of the bytes at the sustained rate, by what they are; parts without any left out."""
    sums: dict[FloorPart, float] = {}
    parts = _parts_by_name(program)
    for start, end, one in clips:
        if one.track == MEMORY:
            part = parts.get(one.semaphore.partition(" ")[0], FloorPart.ROWS)
            moved = one.bytes * (end - start) / one.us
            sums[part] = sums.get(part, 0.0) + moved / target.hbm.sustained_bytes_per_us
    return {str(part): sums[part] for part in FloorPart if part in sums}


def _parts_by_name(program: Program) -> dict[str, FloorPart]:
    """By the first word of the semaphores of their copies."""
    parts = {"tape": FloorPart.TAPE}
    for one in program.streams:
        parts[one.name] = FloorPart.STATES if one.writes_back else FloorPart.SMALL_WEIGHTS
    parts |= {one.name: FloorPart.EXPERTS for one in program.expert_rings}
    return {**parts, **{one.name: FloorPart.CACHES for one in program.caches}}


def _cost_source(clips: Clips, costs: Mapping[str, PhaseCost]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for start, end, event in clips:
        if event.kind is Kind.WORK:
            source = str(costs[event.phase].source)
            sums[source] = sums.get(source, 0.0) + end - start
    total = sum(sums.values())
    return {source: us / total for source, us in sorted(sums.items())}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, PLACES)
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return value
