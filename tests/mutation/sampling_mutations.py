"""Mistakes in rounds that sample: the race, and what drafts were drawn from."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import replace

from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Receive
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Start
from mkc.schedule.verify.events import Wait
from tests.mutation.edits import Mutant
from tests.mutation.edits import dropping
from tests.mutation.edits import everywhere
from tests.mutation.edits import is_event
from tests.mutation.edits import replacing
from tests.mutation.edits import with_phases
from tests.mutation.registry import mutation

# the race


@mutation(
    "winners of a race are sent through the buffers of the exchange before it", "V602", "draws"
)
def race_shares_buffers(program: Program) -> Mutant:
    def shared(phase: Phase) -> Phase:
        if not isinstance(phase, AcceptPhase) or phase.sampling is None:
            return phase
        return replace(phase, sampling=replace(phase.sampling, race=phase.exchange))

    return everywhere(with_phases(program, shared))


@mutation("a race is counted by the semaphore of the exchange before it", "V603", "draws")
def race_shares_a_semaphore(program: Program) -> Mutant:
    phase = _accepting(program)
    assert phase.sampling is not None
    race, shared = (f"{phase.sampling.race}_sems", (1,)), (f"{phase.exchange}_sems", (1,))

    def counted(event: Event) -> Iterable[Event]:
        if isinstance(event, Send) and event.received == race:
            yield replace(event, received=shared)
        elif isinstance(event, Receive) and event.semaphore == race:
            yield replace(event, semaphore=shared)
        else:
            yield event

    return everywhere(program, replacing(lambda event: True, counted))


@mutation("a race is over before the other ranks' winners have arrived", "V606", "draws")
def race_not_awaited(program: Program) -> Mutant:
    phase = _accepting(program)
    assert phase.sampling is not None
    race = f"{phase.sampling.race}_sems"

    def of_race(event: Event) -> bool:
        return isinstance(event, Receive) and event.semaphore[0] == race

    return everywhere(program, dropping(of_race))


def _accepting(program: Program) -> AcceptPhase:
    return next(one for one in program.phases() if isinstance(one, AcceptPhase))


# what drafts were drawn from


@mutation("a round looks at candidates that the launch before hands on too early", "V201", "draw")
def carried_rows_not_awaited(program: Program) -> Mutant:
    return everywhere(program, dropping(is_event(Wait, "begin_sampled_rounds")))


@mutation("a launch does not fetch what its drafts were drawn from", "V203", "draw")
def carried_rows_not_fetched(program: Program) -> Mutant:
    return everywhere(program, dropping(_copies("begin_sampled_rounds")))


@mutation("what drafts were drawn from is not handed to the next launch", "V303", "draw")
def carried_rows_not_saved(program: Program) -> Mutant:
    return everywhere(program, dropping(_copies("end_sampled_rounds")))


@mutation("the launch ends while candidates are still on their way to HBM", "V101", "draws")
def carried_rows_not_drained(program: Program) -> Mutant:
    return everywhere(program, dropping(is_event(Wait, "end_sampled_rounds")))


@mutation("what drafts were drawn from does not go from round to round", "V504", "draw")
def carried_rows_forgotten(program: Program) -> Mutant:
    assert program.round is not None
    return everywhere(replace(program, round=replace(program.round, rows=())))


def _copies(routine: str) -> Callable[[Event], bool]:
    """A copy and the wait for it."""
    return lambda event: isinstance(event, Start | Wait) and event.routine == routine
