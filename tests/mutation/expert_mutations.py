"""Mistakes in mixtures of experts: which matrices come when, and into which slot."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import replace

from mkc.schedule.expert_store import ExpertRing
from mkc.schedule.program import Program
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Start
from mkc.schedule.verify.events import Wait
from tests.mutation.edits import Mutant
from tests.mutation.edits import Test
from tests.mutation.edits import dropping
from tests.mutation.edits import everywhere
from tests.mutation.edits import replacing
from tests.mutation.registry import mutation

SUBJECT = "experts"


def _ring(program: Program) -> ExpertRing:
    (ring,) = program.expert_rings
    return ring


def _loads(program: Program, *parts: str) -> Test:
    """Whether an event is a load of an expert's matrices: `gate_up`, `down` or both."""
    goals = {f"{_ring(program).name}_{part}" for part in parts or ("gate_up", "down")}
    return lambda event: isinstance(event, Start) and event.target.array in goals


def _is_refill(program: Program) -> Test:
    return lambda event: _loads(program)(event) and event.routine == "expert_mlp"


def _exchanged(place: Place) -> Place:
    """Entries, or slots, 2 n and 2 n + 1 change places."""
    (at,) = place.index
    return replace(place, index=(at ^ 1,))


def _changed(test: Test, change: Callable[[Start], Start]) -> Callable[[Program], Mutant]:
    def one(event: Event) -> Iterable[Event]:
        assert isinstance(event, Start)
        yield change(event)

    return lambda program: everywhere(program, replacing(test, one))


@mutation("an expert's weights go to the slot of another one", "V202", SUBJECT)
def expert_in_the_wrong_slot(program: Program) -> Mutant:
    """Their arrival is counted in that slot, too."""

    def moved(event: Start) -> Start:
        target = _exchanged(event.target)
        return replace(event, target=target, semaphore=(event.semaphore[0], target.index))

    return _changed(_loads(program), moved)(program)


@mutation("experts are computed in another order than they are loaded", "V202", SUBJECT)
def experts_in_another_order(program: Program) -> Mutant:
    def other(event: Start) -> Start:
        return replace(event, source=_exchanged(event.source))

    return _changed(_loads(program), other)(program)


@mutation("an expert's second matrix is that of another one", "V202", SUBJECT)
def half_of_another_expert(program: Program) -> Mutant:
    def other(event: Start) -> Start:
        return replace(event, source=_exchanged(event.source))

    return _changed(_loads(program, "down"), other)(program)


@mutation("an expert is loaded that no row has chosen", "V202", SUBJECT)
def expert_that_no_row_chose(program: Program) -> Mutant:
    """In place of the first one: the last one of the rank."""
    last = program.experts[0].local - 1

    def first(event: Event) -> bool:
        return _loads(program)(event) and isinstance(event, Start) and event.source.index == (0,)

    def other(event: Start) -> Start:
        return replace(event, source=replace(event.source, index=(last,)))

    return _changed(first, other)(program)


@mutation("an expert is computed before its weights have arrived", "V201", SUBJECT)
def expert_not_waited_for(program: Program) -> Mutant:
    arrived = f"{_ring(program).name}_arrived"

    def wait(event: Event) -> bool:
        return isinstance(event, Wait) and event.semaphore == (arrived, (0,))

    return everywhere(program, dropping(wait))


@mutation("a slot is refilled before its expert has been computed", "V201", SUBJECT)
def expert_refilled_too_early(program: Program) -> Mutant:
    """The reads of a slot move behind its refill."""
    ring = _ring(program)
    goals = {f"{ring.name}_{part}" for part in ("gate_up", "down")}

    def late(rank: int, event: Event) -> Iterable[Event]:
        if isinstance(event, Read) and event.place.array in goals:
            return
        yield event
        if _is_refill(program)(event) and isinstance(event, Start):
            (entry,) = event.source.index
            before = replace(event.source, index=(entry - ring.slots,))
            yield Read(phase=event.phase, routine=event.routine, place=event.target, data=before)

    return everywhere(program, late)


@mutation("experts are loaded before it is known which were chosen", "V201", SUBJECT)
def choice_not_waited_for(program: Program) -> Mutant:
    semaphore = f"{_ring(program).name}_sem"

    def wait(event: Event) -> bool:
        return isinstance(event, Wait) and event.semaphore[0] == semaphore

    return everywhere(program, dropping(wait))


@mutation("a slot is not refilled with the next expert", "V102", SUBJECT)
def expert_not_loaded(program: Program) -> Mutant:
    return everywhere(program, dropping(_is_refill(program)))
