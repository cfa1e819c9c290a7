"""Mistakes in sizes that belong together, and in one iteration of many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import Guard
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import NarrowMatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.program import TileRun
from mkc.schedule.program import VectorPhase
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Wait
from tests.mutation.edits import Mutant
from tests.mutation.edits import everywhere
from tests.mutation.edits import replacing
from tests.mutation.edits import with_one
from tests.mutation.edits import with_phases
from tests.mutation.registry import mutation


def in_first(program: Program, kind: type[Phase], change: Callable[[Phase], Phase]) -> Mutant:
    """The first phase of a kind, changed."""
    phase = next(one for one in program.phases() if isinstance(one, kind))
    return everywhere(with_phases(program, lambda one: change(one) if one.id == phase.id else one))


# one iteration


@mutation(
    "only the first load of a matmul is followed by one of another size", "V103", "two", "one"
)
def first_refill_of_another_size(program: Program) -> Mutant:
    return everywhere(with_one_refill(program, first=True))


@mutation("only the last load of a matmul is followed by one of another size", "V103", "two", "one")
def last_refill_of_another_size(program: Program) -> Mutant:
    return everywhere(with_one_refill(program, first=False))


def with_one_refill(program: Program, *, first: bool) -> Program:
    """One step of the longest run gets a run of its own, which asks for half of the rows."""
    matmuls = [one for one in program.phases() if isinstance(one, MatmulPhase)]
    runs = [(run.count, one.id, at) for one in matmuls for at, run in enumerate(one.runs)]
    _, changed, at = max(one for one in runs if halves(matmuls, one[1], one[2]))

    def split(phase: Phase) -> Phase:
        if not isinstance(phase, MatmulPhase) or phase.id != changed:
            return phase
        run = phase.runs[at]
        middle = run.first + (1 if first else run.count - 1)
        parts = (
            replace(run, count=middle - run.first),
            replace(run, first=middle, count=run.first + run.count - middle),
        )
        wrong = 0 if first else 1
        spoiled = [half(one) if number == wrong else one for number, one in enumerate(parts)]
        kept = [one for one in spoiled if one.count]
        return replace(phase, runs=(*phase.runs[:at], *kept, *phase.runs[at + 1 :]))

    return with_phases(program, split)


def halves(matmuls: list[MatmulPhase], name: str, at: int) -> bool:
    """The run starts loads that can be halved."""
    run = next(one for one in matmuls if one.id == name).runs[at]
    return all(guard.rows for guards in run.refill for guard in guards)


def half(run: TileRun) -> TileRun:
    def smaller(guard: Guard) -> Guard:
        return replace(guard, rows=guard.rows // 2 if guard.rows else None)

    return replace(run, refill=tuple(tuple(map(smaller, guards)) for guards in run.refill))


# what belongs together


@mutation("an exchange uses the buffers of another one", "V805", "two", "eight")
def buffers_of_another_exchange(program: Program) -> Mutant:
    other = next(one.name for one in program.exchanges if one.kind == "argmax")
    return in_first(program, AllReducePhase, lambda one: replace(one, exchange=other))


@mutation("an exchange has buffers for half of what it sends", "V804", "two", "eight")
def half_an_exchange(program: Program) -> Mutant:
    plan = next(one for one in program.exchanges if one.kind == "one_shot")
    plans = with_one(
        program.exchanges, lambda one: one.name == plan.name, columns=plan.columns // 2
    )
    return everywhere(replace(program, exchanges=plans))


@mutation("a sum is taken of half of the lanes", "V803", "two", "eight")
def half_a_sum(program: Program) -> Mutant:
    def less(phase: Phase) -> Phase:
        assert isinstance(phase, AllReducePhase)
        return replace(phase, partial=replace(phase.partial, width=phase.partial.width // 2))

    return in_first(program, AllReducePhase, less)


@mutation("a narrow matmul contracts more lanes than its operand has", "V803", "two", "one")
def more_than_the_operand(program: Program) -> Mutant:
    def less(phase: Phase) -> Phase:
        assert isinstance(phase, NarrowMatmulPhase)
        return replace(phase, left=replace(phase.left, width=phase.left.width // 2))

    return in_first(program, NarrowMatmulPhase, less)


@mutation("attention takes a query of fewer heads", "V803", "two", "dense")
def fewer_heads(program: Program) -> Mutant:
    def less(phase: Phase) -> Phase:
        assert isinstance(phase, AttentionPhase)
        return replace(phase, q=replace(phase.q, width=phase.q.width // 2))

    return in_first(program, AttentionPhase, less)


@mutation("two small vectors share a row of their page", "V804", "two", "dense")
def vectors_share_a_row(program: Program) -> Mutant:
    name, vectors = next(pair for pair in program.pages.items() if len(pair[1]) > 1)
    moved = (vectors[0], replace(vectors[1], row=vectors[0].row), *vectors[2:])
    return everywhere(replace(program, pages={**program.pages, name: moved}))


@mutation("a ring has no slots", "V804", "two", "drafts")
def no_slots(program: Program) -> Mutant:
    streams = with_one(program.streams, lambda one: True, slots=0)
    return everywhere(replace(program, streams=streams))


@mutation("a cache is fetched, and no phase attends to it", "V501", "two", "drafts")
def attention_left_out(program: Program) -> Mutant:
    kinds = AttentionPhase | RowsAttentionPhase
    cache = next(one.cache for one in program.phases() if isinstance(one, kinds))

    def without(phase: Phase) -> Phase | None:
        return None if isinstance(phase, kinds) and phase.cache == cache else phase

    return everywhere(with_phases(program, without))


@mutation("a refill has no case", "V502", "two", "drafts")
def refill_without_a_case(program: Program) -> Mutant:
    def empty(phase: Phase) -> Phase:
        assert isinstance(phase, MatmulPhase)
        run, *others = phase.runs
        return replace(phase, runs=(replace(run, refill=((),) * len(run.refill)), *others))

    return in_first(program, MatmulPhase, empty)


@mutation("a kernel is not given the positions", "V805", "two", "drafts")
def no_positions(program: Program) -> Mutant:
    operands = tuple(one for one in program.operands if one.role != "positions")
    return everywhere(replace(program, operands=operands))


@mutation("an array of scalars is half as long as what a phase puts there", "V804", "drafts")
def short_scalars(program: Program) -> Mutant:
    phase = next(one for one in program.phases() if isinstance(one, AcceptPhase))
    scalars = with_one(program.scalars, lambda one: one.name == phase.emitted, size=program.batch)
    return everywhere(replace(program, scalars=scalars))


@mutation("a round reports other scalars than those that were accepted", "V504", "drafts", "draft")
def other_scalars_reported(program: Program) -> Mutant:
    assert program.round is not None
    plan = replace(program.round, emitted=program.round.tokens)
    return everywhere(replace(program, round=plan))


@mutation("a layer stores its result among the taps", "V506", "drafts", "draft")
def result_among_the_taps(program: Program) -> Mutant:
    taps = next(one.buffer for one in program.phases() if isinstance(one, TapPhase))

    def misplaced(phase: Phase) -> Phase:
        assert isinstance(phase, VectorPhase)
        return replace(
            phase, writes={name: replace(one, buffer=taps) for name, one in phase.writes.items()}
        )

    return in_first(program, VectorPhase, misplaced)


# semaphores


@mutation("one semaphore counts what a rank sends and what it is sent", "V603", "two", "drafts")
def sends_counted_with_arrivals(program: Program) -> Mutant:
    """A wait for the messages of others may end because the own ones have left."""
    plan = next(one for one in program.exchanges if one.kind == "one_shot")
    leaving, arriving = ((f"{plan.name}_sems", (number,)) for number in (0, 1))

    def of_a_send(event: Event) -> bool:
        return isinstance(event, Send | Wait) and event.semaphore == leaving

    def mixed(event: Event) -> tuple[Event]:
        assert isinstance(event, Send | Wait)
        return (replace(event, semaphore=arriving),)

    return everywhere(program, replacing(of_a_send, mixed))
