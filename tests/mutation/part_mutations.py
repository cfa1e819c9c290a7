"""Mistakes in exchanges of two parts, and in what goes on between them."""

from __future__ import annotations

from dataclasses import replace

from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Receive
from tests.mutation.edits import Mutant
from tests.mutation.edits import dropping
from tests.mutation.edits import everywhere
from tests.mutation.edits import with_bodies
from tests.mutation.edits import with_one
from tests.mutation.edits import with_phases
from tests.mutation.registry import mutation
from tests.passes.overlapped import between
from tests.passes.overlapped import ends
from tests.passes.overlapped import starts


def _moved(program: Program, phase: Phase, by: int) -> Mutant:
    """The phase stands so many places further on in its body."""

    def moved(body: tuple[Phase | Loop, ...]) -> tuple[Phase | Loop, ...]:
        if phase not in body:
            return body
        others = [one for one in body if one != phase]
        at = body.index(phase) + by
        return (*others[:at], phase, *others[at:])

    return everywhere(with_bodies(program, moved))


@mutation("an exchange ends before it starts", "V608", "parts", "scattered")
def end_before_start(program: Program) -> Mutant:
    start = starts(program)[0]
    return _moved(program, start, len(between(program, start)) + 1)


@mutation("an exchange that was started does not end", "V608", "parts", "scattered")
def end_missing(program: Program) -> Mutant:
    end = ends(program)[-1]
    return everywhere(with_phases(program, lambda one: None if one == end else one))


@mutation("an exchange is started before the loop in which it ends", "V608", "parts", "scattered")
def start_out_of_its_loop(program: Program) -> Mutant:
    start = starts(program)[0]
    without = with_phases(program, lambda one: None if one == start else one)
    at = next(number for number, one in enumerate(without.body) if isinstance(one, Loop))
    return everywhere(replace(without, body=(*without.body[:at], start, *without.body[at:])))


@mutation("another exchange begins before the one that was started has ended", "V608", "parts")
def exchange_between(program: Program) -> Mutant:
    """The gather that follows the sum comes before its end."""
    return _moved(program, ends(program)[-1], 1)


@mutation("both parts of an exchange use different buffers", "V608", "parts", "scattered")
def other_buffers_at_the_end(program: Program) -> Mutant:
    kind = type(ends(program)[0])
    gathers = [one for one in program.phases() if isinstance(one, kind)]
    end, other = ends(program)[0], gathers[-1]
    assert isinstance(other, AllGatherPhase) and other.exchange != end.exchange

    def changed(phase: Phase) -> Phase:
        return replace(end, exchange=other.exchange) if phase == end else phase

    return everywhere(with_phases(program, changed))


@mutation("a result is read between the parts of an exchange", "V202", "parts", "scattered")
def result_read_too_early(program: Program) -> Mutant:
    """The reader stands where the end was; without the loop before, nothing had been written."""
    return _moved(program, ends(program)[0], 1)


@mutation("an exchange is started before its operand was computed", "V202", "parts", "scattered")
def started_too_early(program: Program) -> Mutant:
    return _moved(program, starts(program)[-1], -1)


@mutation("partial sums are overwritten while they are on their way", "V301", "scattered")
def partials_overwritten(program: Program) -> Mutant:
    """A matmul between the parts of a sum writes into the memory that the messages leave from."""
    start = starts(program)[-1]
    assert isinstance(start, AllReducePhase) and start.algorithm == "two_phase"
    (work,) = between(program, start)
    assert isinstance(work, MatmulPhase)
    partial = next(one for one in program.buffers if one.name == start.partial.buffer)
    buffers = with_one(
        program.buffers,
        lambda one: one.name == work.output.buffer,
        region=partial.region,
        region_lanes=partial.region_lanes,
    )
    return everywhere(replace(program, buffers=buffers))


@mutation(
    "the end of an exchange does not wait for the first messages", "V606", "parts", "scattered"
)
def first_messages_not_awaited(program: Program) -> Mutant:
    phases = {one.id for one in ends(program)}

    def of_the_first(event: Event) -> bool:
        return isinstance(event, Receive) and event.phase in phases and event.semaphore[1] == (1,)

    return everywhere(program, dropping(of_the_first))
