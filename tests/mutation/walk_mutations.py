"""Mistakes in rounds whose drafter walks over the whole vocabulary: its table, its exchanges, the
cut of a block."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import replace

from mkc.schedule.program import Loop
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import CutDraftsPhase
from mkc.schedule.round_phases import MarkovWalkPhase
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Receive
from mkc.schedule.verify.events import Start
from mkc.schedule.verify.events import Wait
from tests.mutation.edits import Mutant
from tests.mutation.edits import dropping
from tests.mutation.edits import everywhere
from tests.mutation.edits import is_event
from tests.mutation.edits import replacing
from tests.mutation.edits import with_bodies
from tests.mutation.edits import with_phases
from tests.mutation.registry import mutation

ROUTINE = "markov_walk"


@mutation("a draft is corrected by a row of the table that has not arrived", "V201", "walk")
def row_not_awaited(program: Program) -> Mutant:
    return everywhere(program, dropping(is_event(Wait, ROUTINE)))


@mutation("rows of the table for two sequences go to the same place", "V302", "walk")
def rows_in_one_place(program: Program) -> Mutant:
    def first(event: Event) -> Iterable[Event]:
        assert isinstance(event, Start)
        yield replace(event, target=replace(event.target, index=(0,)))

    return everywhere(program, replacing(is_event(Start, ROUTINE), first))


@mutation("a draft is chosen before the best ones of other ranks have arrived", "V606", "walk")
def choices_not_awaited(program: Program) -> Mutant:
    return everywhere(program, dropping(is_event(Receive, phase=_walk(program).id)))


@mutation("the choices of all rows are exchanged through one buffer", "V602", "walk")
def choices_without_parity(program: Program) -> Mutant:
    def first(phase: MarkovWalkPhase) -> Phase:
        return replace(phase, exchanges=phase.exchanges[:1])

    return everywhere(with_phases(program, _changed(first)))


@mutation("a block is cut before it is known how sure its drafts are", "V202", "walk")
def cut_too_early(program: Program) -> Mutant:
    def early(body: tuple[Phase | Loop, ...]) -> tuple[Phase | Loop, ...]:
        cuts = tuple(one for one in body if isinstance(one, CutDraftsPhase))
        rest = tuple(one for one in body if not isinstance(one, CutDraftsPhase))
        at = next((n for n, one in enumerate(rest) if isinstance(one, MarkovWalkPhase)), 0)
        return (*rest[:at], *cuts, *rest[at:])

    return everywhere(with_bodies(program, early))


def _walk(program: Program) -> MarkovWalkPhase:
    return next(one for one in program.phases() if isinstance(one, MarkovWalkPhase))


def _changed(change: Callable[[MarkovWalkPhase], Phase]) -> Callable[[Phase], Phase]:
    return lambda phase: change(phase) if isinstance(phase, MarkovWalkPhase) else phase
