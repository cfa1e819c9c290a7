"""Mistakes in rounds of a speculative scheme: acceptance, commit, taps, caches, the walk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import ScalarPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.round_phases import TopKPhase
from mkc.schedule.scalars import RoundPlan
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Receive
from mkc.schedule.verify.events import Send
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

# what is accepted, committed and handed on


@mutation("the next round commits another number of rows than were accepted", "V504", "drafts")
def kept_from_elsewhere(program: Program) -> Mutant:
    plan = _plan(program)
    return everywhere(_carrying(program, plan.kept, _last(program)))


@mutation("the next round begins at the accepted rows, not behind them", "V504", "drafts")
def positions_not_moved(program: Program) -> Mutant:
    remembered = _drafting(program).remembered
    assert remembered is not None
    return everywhere(_carrying(program, _plan(program).positions, remembered.positions))


@mutation("a recurrent layer commits what this round accepts, before it is known", "V504", "drafts")
def kept_of_this_round(program: Program) -> Mutant:
    def early(phase: Phase) -> Phase:
        if not isinstance(phase, KeptDeltaRulePhase):
            return phase
        return replace(phase, kept=_plan(program).count)

    return everywhere(with_phases(program, early))


def _plan(program: Program) -> RoundPlan:
    assert program.round is not None
    return program.round


def _carrying(program: Program, target: str, source: str) -> Program:
    plan = _plan(program)
    carried = tuple(
        replace(one, source=source) if one.target == target else one for one in plan.carried
    )
    return replace(program, round=replace(plan, carried=carried))


def _last(program: Program) -> str:
    """The newest token, which is as long as the counts."""
    scalars = {one.name for one in program.scalars if one.size == program.batch}
    plan = _plan(program)
    return min(scalars - {plan.count, plan.kept})


def _drafting(program: Program) -> RowsAttentionPhase:
    return next(
        one
        for one in program.phases()
        if isinstance(one, RowsAttentionPhase) and one.remembered is not None
    )


# kept rows


@mutation("kept rows of another sequence are committed", "V202", "drafts")
def kept_rows_of_another_sequence(program: Program) -> Mutant:
    arrays = {one.array for one in program.streams if one.name == "state_k"}

    def other(event: Event) -> Iterable[Event]:
        assert isinstance(event, Start)
        yield replace(event, source=replace(event.source, index=(event.source.index[0] ^ 1,)))

    def fetch(event: Event) -> bool:
        return isinstance(event, Start) and event.source.array in arrays

    return everywhere(program, replacing(fetch, other))


@mutation("kept rows are fetched before the round before has written them back", "V401", "drafts")
def kept_rows_not_drained(program: Program) -> Mutant:
    def drain(event: Event) -> bool:
        return (
            is_event(Wait, "stream_drain")(event)
            and isinstance(event, Wait)
            and event.semaphore[0] == "state_u_written"
        )

    return everywhere(program, dropping(drain))


@mutation("a state is written back, what it kept of the rows is not", "V303", "drafts", "draft")
def kept_rows_not_written(program: Program) -> Mutant:
    arrays = {one.array for one in program.streams if one.name == "state_decay"}

    def back(event: Event) -> bool:
        return isinstance(event, Start) and event.target.array in arrays

    return everywhere(program, dropping(back))


# caches


@mutation("rejected rows enter the drafter's cache", "V505", "drafts", "draft")
def rejected_rows_remembered(program: Program) -> Mutant:
    def everything(phase: Phase) -> Phase:
        if not isinstance(phase, RowsAttentionPhase) or phase.remembered is None:
            return phase
        all_rows = replace(phase.remembered, positions=_plan(program).positions)
        return replace(phase, remembered=all_rows)

    return everywhere(with_phases(program, everything))


@mutation("accepted rows enter the drafter's cache where the next ones belong", "V505", "drafts")
def remembered_too_late(program: Program) -> Mutant:
    def late(phase: Phase) -> Phase:
        if not isinstance(phase, RowsAttentionPhase) or phase.remembered is None:
            return phase
        return replace(phase, first=phase.positions)

    return everywhere(with_phases(program, late))


@mutation("the second block of new cache rows is not written", "V303", "drafts", "draft")
def second_block_left_out(program: Program) -> Mutant:
    def second(event: Event) -> bool:
        return (
            is_event(Start, "rows_append")(event)
            and isinstance(event, Start)
            and event.source.first > 0
        )

    return everywhere(program, dropping(second))


@mutation("new cache rows take the place of ones that are still being written", "V301", "drafts")
def rows_wait_dropped(program: Program) -> Mutant:
    return everywhere(program, dropping(is_event(Wait, "rows_append")))


@mutation("new cache rows go to another sequence", "V403", "drafts")
def rows_of_another_sequence(program: Program) -> Mutant:
    def other(event: Event) -> Iterable[Event]:
        assert isinstance(event, Start)
        layer, sequence = event.target.index
        yield replace(event, target=replace(event.target, index=(layer, 1 - sequence)))

    return everywhere(program, replacing(is_event(Start, "rows_append"), other))


@mutation("a round fetches tiles whose new rows are still on their way", "V401", "drafts")
def rows_drain_dropped(program: Program) -> Mutant:
    return everywhere(program, dropping(is_event(Wait, "rows_drain")))


@mutation(
    "rows that lie before the new ones in their block come from another tile", "V202", "draft"
)
def old_rows_of_another_tile(program: Program) -> Mutant:
    def shifted(event: Event) -> Iterable[Event]:
        assert isinstance(event, Read)
        assert event.data is not None
        yield replace(event, data=replace(event.data, first=event.data.first + 16))

    def old(event: Event) -> bool:
        return (
            is_event(Read, "rows_append")(event)
            and isinstance(event, Read)
            and event.data is not None
        )

    return everywhere(program, replacing(old, shifted))


# taps


@mutation("two layers show themselves in one place", "V506", "drafts", "draft")
def taps_share_a_place(program: Program) -> Mutant:
    return everywhere(with_phases(program, lambda one: _moved_taps(one, 0)))


@mutation("what a drafter reads of a layer was never stored", "V203", "draft")
def tap_left_out(program: Program) -> Mutant:
    unread = max(place for one in _taps(program) for place in one.places)
    return everywhere(with_phases(program, lambda one: _moved_taps(one, unread)))


def _taps(program: Program) -> list[TapPhase]:
    return [one for one in program.phases() if isinstance(one, TapPhase)]


def _moved_taps(phase: Phase, place: int) -> Phase:
    """Every place of a tap phase replaced by one."""
    if not isinstance(phase, TapPhase):
        return phase
    return replace(phase, places=(place,) * len(phase.places))


# products of two operands, exchanges


@mutation("weights are applied to one of two operands only", "V202", "drafts", "draft")
def second_product_left_out(program: Program) -> Mutant:
    def alone(phase: Phase) -> Phase:
        return replace(phase, also=()) if isinstance(phase, MatmulPhase) else phase

    return everywhere(with_phases(program, alone))


@mutation("gathers that follow one another share a receive buffer", "V602", "gathers")
def gathers_without_parity(program: Program) -> Mutant:
    first = next(one for one in program.phases() if isinstance(one, AllGatherPhase))

    def first_buffer(phase: Phase) -> Phase:
        if not isinstance(phase, AllGatherPhase):
            return phase
        return replace(phase, exchange=first.exchange)

    return everywhere(with_phases(program, first_buffer))


@mutation("the top-k exchange is counted by the semaphore of the sum before it", "V603", "drafts")
def top_k_shares_a_semaphore(program: Program) -> Mutant:
    phases = list(program.phases())
    at = next(number for number, one in enumerate(phases) if isinstance(one, TopKPhase))
    before = next(one for one in reversed(phases[:at]) if hasattr(one, "partial"))
    semaphore = (f"{before.exchange}_sems", (1,))

    def shared(event: Event) -> Iterable[Event]:
        if isinstance(event, Send):
            yield replace(event, received=semaphore)
        elif isinstance(event, Receive):
            yield replace(event, semaphore=semaphore)

    def of_top_k(event: Event) -> bool:
        return isinstance(event, Send | Receive) and event.phase == phases[at].id

    return everywhere(program, replacing(of_top_k, shared))


# scalars and the walk


@mutation("the walk begins before the candidates are known", "V203", "draft")
def walk_too_early(program: Program) -> Mutant:
    def early(body: tuple[Phase | Loop, ...]) -> tuple[Phase | Loop, ...]:
        found = [one for one in body if isinstance(one, SelectorWalkPhase)]
        rest = tuple(one for one in body if not isinstance(one, SelectorWalkPhase))
        at = next((n for n, one in enumerate(rest) if isinstance(one, ScalarPhase)), 0)
        return (*rest[: at + 1], *found, *rest[at + 1 :])

    return everywhere(with_bodies(program, early))


@mutation("the walk reads the row of a choice before it has arrived", "V201", "drafts", "draft")
def choice_not_awaited(program: Program) -> Mutant:
    def previous(event: Event) -> bool:
        return is_event(Wait, "selector_walk")(event) and event.semaphore[1] == (1,)  # type: ignore[attr-defined]

    return everywhere(program, dropping(previous))


@mutation("candidates of a row take the place of those of the row before", "V302", "drafts")
def candidates_without_parity(program: Program) -> Mutant:
    def first_half(event: Event) -> Iterable[Event]:
        assert isinstance(event, Start)
        yield replace(event, target=replace(event.target, index=(0,)))

    def candidates(event: Event) -> bool:
        return (
            is_event(Start, "selector_walk")(event)
            and isinstance(event, Start)
            and event.target.array.endswith("_candidates")
        )

    return everywhere(program, replacing(candidates, first_half))


@mutation("a phase names scalars that are not there", "V805", "drafts")
def scalars_removed(program: Program) -> Mutant:
    return everywhere(replace(program, scalars=program.scalars[:-1]))
