"""Phases whose executions differ by how many of them came before in the same step or round."""

from __future__ import annotations

from mkc.schedule.mixing_phases import StoreBlockPhase
from mkc.schedule.program import Phase
from mkc.schedule.round_phases import TapPhase

COUNTED = (StoreBlockPhase, TapPhase)


def places(phase: Phase, first: int, amount: int) -> tuple[int | None, ...]:
    """Where executions first .. first + amount store; None for those that store nothing.

    Fewer than `amount` where a phase has no such execution; empty for phases that do not count.
    """
    match phase:
        case TapPhase():
            return phase.places[first : first + amount]
        case StoreBlockPhase():
            return tuple(map(phase.place, range(first, first + amount)))
        case _:
            return ()
