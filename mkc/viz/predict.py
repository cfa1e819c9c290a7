"""From a plan folder to what its pictures are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mkc.plan.folder import PlanFolder
from mkc.plan.phases import phase_rows
from mkc.schedule.simulate.events import Event
from mkc.schedule.simulate.prediction import Simulation
from mkc.schedule.simulate.prediction import simulate
from mkc.viz.source import Subject


def subject_of(folder: PlanFolder) -> Subject:
    """Simulates a plan, with the machine code's times where the plan has them."""
    simulation = simulate(folder.program, folder.target, cycles=folder.cycles)
    prediction = simulation.prediction
    return Subject(
        folder=folder,
        rows=phase_rows(folder),
        events=tuple(_round(simulation)),
        critical=frozenset(step.event for step in simulation.path),
        rank=simulation.window.rank,
        position=prediction.position,
        round_us=prediction.round_us,
        floor_us=prediction.floor_us,
    )


def _round(simulation: Simulation) -> Iterator[Event]:
    """Events of all simulated ranks in the predicted round, cut to it, from its start on."""
    start, end = simulation.window.start_us, simulation.window.end_us
    for one in simulation.events:
        if one.end_us >= start and one.start_us <= end:
            yield replace(
                one,
                start_us=max(one.start_us, start) - start,
                end_us=min(one.end_us, end) - start,
                done_us=one.done_us - start,
            )
