"""Mistakes within one rank: the tape, streams, caches and values."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import replace
from math import prod

from mkc.schedule.program import Guard
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.program import StreamAdvancePhase
from mkc.schedule.program import StreamWaitPhase
from mkc.schedule.program import TileRun
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Start
from mkc.schedule.verify.events import Wait
from mkc.schedule.verify.events import Write
from tests.mutation.edits import Mutant
from tests.mutation.edits import dropping
from tests.mutation.edits import everywhere
from tests.mutation.edits import is_event
from tests.mutation.edits import matmuls
from tests.mutation.edits import replacing
from tests.mutation.edits import with_bodies
from tests.mutation.edits import with_loop
from tests.mutation.edits import with_one
from tests.mutation.edits import with_phases
from tests.mutation.registry import mutation

# the tape


@mutation("a matmul reads its load without waiting for it", "V201", "one", "dense", "eight")
def tape_wait_dropped(program: Program) -> Mutant:
    phase = matmuls(program)[0].id
    return everywhere(program, dropping(is_event(Wait, "tape_wait", phase)))


@mutation("a consumed slot is not refilled", "V102", "one", "eight")
def refill_dropped(program: Program) -> Mutant:
    phase = matmuls(program)[0].id
    return everywhere(program, dropping(is_event(Start, "refill", phase)))


@mutation("the prologue starts one load less than the ring has slots", "V102", "two", "dense")
def prologue_too_short(program: Program) -> Mutant:
    tape = program.tape
    return everywhere(replace(program, tape=replace(tape, prologue=tape.prologue[:-1])))


@mutation("two slots of the ring change places at every start", "V202", "shares")
def slots_swapped_with_semaphores(program: Program) -> Mutant:
    return _swapped(program, semaphores=True)


@mutation("two slots of the ring change places, their semaphores do not", "V202", "one", "two")
def slots_swapped(program: Program) -> Mutant:
    return _swapped(program, semaphores=False)


def _swapped(program: Program, *, semaphores: bool) -> Mutant:
    def swap(event: Event) -> Iterable[Event]:
        assert isinstance(event, Start)
        index = (1 - event.target.index[0],)
        changed = replace(event, target=replace(event.target, index=index))
        yield replace(changed, semaphore=("tape_sems", index)) if semaphores else changed

    def first_two(event: Event) -> bool:
        return (
            isinstance(event, Start)
            and event.target.array == "tape_ring"
            and event.target.index[0] < 2
        )

    return everywhere(program, replacing(first_two, swap))


@mutation("a wait is for 512 bytes less than its load has", "V103", "one", "eight")
def other_bytes_waited(program: Program) -> Mutant:
    def less(event: Event) -> Iterable[Event]:
        assert isinstance(event, Wait)
        yield replace(event, size=event.size - 512)

    return everywhere(program, replacing(is_event(Wait, "tape_wait"), less))


@mutation("ring slots are smaller than the largest load", "V804", "one", "two")
def slots_too_small(program: Program) -> Mutant:
    tape = replace(program.tape, slot_rows=program.tape.slot_rows - 16)
    return everywhere(replace(program, tape=tape))


@mutation("a refill is started before the slot has been read", "V301", "dense")
def refill_too_early(program: Program) -> Mutant:
    """The read of the weights moves behind the refill, as writes of the slot would."""

    def late(event: Event) -> Iterable[Event]:
        assert isinstance(event, Wait)
        slot = event.semaphore[1]
        place = Place(array="tape_ring", index=slot, count=1)
        yield event
        yield Start(
            phase=event.phase,
            routine="refill",
            source=Place(array="tape", count=1),
            target=place,
            semaphore=event.semaphore,
        )
        yield Write(phase=event.phase, routine="matmul", place=place, data=place)

    return everywhere(program, replacing(is_event(Wait, "tape_wait"), late))


@mutation("the guard at a loop border takes the first case always", "V103", "eight")
def guard_ignored(program: Program) -> Mutant:
    return _guards(program, lambda guards: guards[:1])


@mutation("the last round starts loads for one that does not come", "V101", "rounds")
def last_round_goes_on(program: Program) -> Mutant:
    return _guards(program, lambda guards: guards[:1])


@mutation("the two cases of a guard are exchanged", "V502", "eight", "rounds")
def guard_reversed(program: Program) -> Mutant:
    return _guards(program, lambda guards: guards[::-1])


@mutation("a guard loads what the other way out needs", "V103", "eight")
def guard_sizes_exchanged(program: Program) -> Mutant:
    def exchange(guards: tuple[Guard, ...]) -> tuple[Guard, ...]:
        sizes = [one.rows for one in guards][::-1]
        return tuple(replace(one, rows=rows) for one, rows in zip(guards, sizes, strict=True))

    return _guards(program, exchange)


def _guards(program: Program, change: Callable[[tuple[Guard, ...]], tuple[Guard, ...]]) -> Mutant:
    def guarded(guards: tuple[Guard, ...]) -> tuple[Guard, ...]:
        return change(guards) if len(guards) > 1 else guards

    def run(one: TileRun) -> TileRun:
        return replace(one, refill=tuple(guarded(guards) for guards in one.refill))

    def phase(one: Phase) -> Phase:
        if not isinstance(one, MatmulPhase):
            return one
        return replace(one, runs=tuple(run(each) for each in one.runs))

    return everywhere(with_phases(program, phase))


@mutation("a matmul leaves out its last output step", "V503", "one", "eight")
def step_left_out(program: Program) -> Mutant:
    first = matmuls(program)[0].id

    def shorter(phase: Phase) -> Phase:
        if not isinstance(phase, MatmulPhase) or phase.id != first:
            return phase
        last = phase.runs[-1]
        return replace(phase, runs=(*phase.runs[:-1], replace(last, count=last.count - 1)))

    return everywhere(with_phases(program, shorter))


@mutation("a loop runs once more", "V501", "one", "dense")
def loop_too_long(program: Program) -> Mutant:
    return everywhere(with_loop(program, 1))


@mutation("loads started for a round that does not come are not waited for", "V101", "rounds")
def tape_drain_dropped(program: Program) -> Mutant:
    return everywhere(program, dropping(is_event(Wait, "tape_drain")))


# streams and states


@mutation("a layer reads its small vectors before they have arrived", "V201", "one", "eight")
def page_wait_dropped(program: Program) -> Mutant:
    return everywhere(_without(program, StreamWaitPhase))


@mutation("a page is never released", "V501", "dense", "two")
def page_advance_dropped(program: Program) -> Mutant:
    return everywhere(_without(program, StreamAdvancePhase))


def _without(program: Program, kind: type[Phase]) -> Program:
    return with_phases(program, lambda one: None if isinstance(one, kind) else one)


@mutation("a state is changed before it has arrived", "V201", "one", "two")
def state_wait_dropped(program: Program) -> Mutant:
    def state(event: Event) -> bool:
        return isinstance(event, Wait) and event.semaphore[0] == "state_recurrent_arrived"

    return everywhere(program, dropping(state))


@mutation("a changed state is not written back", "V303", "one", "eight")
def write_back_dropped(program: Program) -> Mutant:
    return everywhere(program, dropping(_writes_back))


def _writes_back(event: Event) -> bool:
    return (
        isinstance(event, Start)
        and event.target.array.startswith("state_recurrent")
        and not event.target.array.endswith("_ring")
    )


@mutation("a state is written back before it is changed", "V301", "one", "two")
def write_back_too_early(program: Program) -> Mutant:
    """The change comes again, behind the start of the write-back."""

    def change_again(event: Event) -> Iterable[Event]:
        assert isinstance(event, Start)
        yield event
        yield Write(
            phase=event.phase, routine="delta_rule", place=event.source, data=None, saved=True
        )

    return everywhere(program, replacing(_writes_back, change_again))


@mutation("a state goes back to the next layer's place", "V403", "one", "eight")
def write_back_elsewhere(program: Program) -> Mutant:
    def next_item(event: Event) -> Iterable[Event]:
        assert isinstance(event, Start)
        yield replace(event, target=replace(event.target, index=(event.target.index[0] ^ 1,)))

    return everywhere(program, replacing(_writes_back, next_item))


@mutation("a layer fetches a state that the layer before has still to change", "V204", "one", "two")
def state_shared_by_two_layers(program: Program) -> Mutant:
    """Every second layer takes the state of the one before, from HBM."""
    stream = next(one for one in program.streams if one.name == "state_recurrent")
    size = prod(stream.item_shape) * stream.dtype.bytes

    def shared(place: Place) -> Place:
        known = place.array == stream.array
        return replace(place, index=(place.index[0] & -2,)) if known else place

    def share(event: Event) -> Iterable[Event]:
        if isinstance(event, Start):
            yield replace(event, source=shared(event.source), target=shared(event.target))
            if event.source.array == stream.array:  # it has long arrived
                yield Wait(phase=event.phase, routine="wait", semaphore=event.semaphore, size=size)
        elif isinstance(event, Read) and event.data is not None:
            yield replace(event, data=shared(event.data))
        elif not (isinstance(event, Wait) and event.semaphore[0] == "state_recurrent_arrived"):
            yield event

    return everywhere(program, replacing(lambda event: True, share))


@mutation("a slot is refilled without waiting for its write-back", "V302", "two")
def written_wait_dropped(program: Program) -> Mutant:
    def written(event: Event) -> bool:
        return is_event(Wait, "stream_advance")(event)

    return everywhere(program, dropping(written))


@mutation("the kernel ends with write-backs under way", "V101", "one", "eight")
def stream_drain_dropped(program: Program) -> Mutant:
    return everywhere(program, dropping(is_event(Wait, "stream_drain")))


@mutation("a round fetches states whose write-back is still under way", "V401", "rounds")
def drain_behind_the_next_prologue(program: Program) -> Mutant:
    """The drains are not waited for, so the next round's first items come from old memory."""
    return everywhere(program, dropping(is_event(Wait, "stream_drain")))


@mutation("an item is fetched twice and the next one not at all", "V202", "one", "dense")
def item_fetched_twice(program: Program) -> Mutant:
    def before(event: Event) -> Iterable[Event]:
        assert isinstance(event, Start)
        yield replace(event, source=replace(event.source, index=(event.source.index[0] - 1,)))

    def page(event: Event) -> bool:
        return (
            is_event(Start, "stream_prologue")(event)
            and isinstance(event, Start)
            and event.source.index[0] == 1
        )

    return everywhere(program, replacing(page, before))


@mutation("a stream is planned with one item less than the layers use", "V501", "one", "two")
def item_missing(program: Program) -> Mutant:
    fewer = tuple(
        replace(one, items=one.items - 1) if one.name == "state_recurrent" else one
        for one in program.streams
    )
    return everywhere(replace(program, streams=fewer))


@mutation("a ring slot of a stream is smaller than its items", "V104", "one", "eight")
def stream_slot_too_small(program: Program) -> Mutant:
    one = next(one for one in program.streams if one.name == "state_recurrent")
    shape = (one.item_shape[0] // 2, *one.item_shape[1:])
    return everywhere(
        replace(
            program, streams=with_one(program.streams, lambda each: each is one, item_shape=shape)
        )
    )


@mutation("an operand that the kernel writes is not marked as updated", "V404", "one", "dense")
def not_updated(program: Program) -> Mutant:
    operands = with_one(program.operands, lambda one: one.updated, updated=False)
    return everywhere(replace(program, operands=operands))


# caches


@mutation("attention reads a tile that is still on its way", "V201", "one", "dense")
def tile_wait_dropped(program: Program) -> Mutant:
    def arrived(event: Event) -> bool:
        return is_event(Wait, "attention")(event)

    return everywhere(program, dropping(arrived))


@mutation("a new row takes the place of one that is still being written", "V301", "dense", "two")
def row_wait_dropped(program: Program) -> Mutant:
    def before(event: Event) -> bool:
        return is_event(Wait, "kv_written")(event) and event.phase != "end"

    return everywhere(program, dropping(before))


@mutation("a new row goes to another sequence's cache", "V403", "dense")
def row_of_another_sequence(program: Program) -> Mutant:
    def other(event: Event) -> Iterable[Event]:
        assert isinstance(event, Start)
        layer, sequence = event.target.index
        yield replace(event, target=replace(event.target, index=(layer, 1 - sequence)))

    return everywhere(program, replacing(is_event(Start, "kv_patch"), other))


@mutation("a tile does not divide the context", "V804", "one", "dense")
def tile_does_not_divide(program: Program) -> Mutant:
    caches = with_one(program.caches, lambda one: True, tile=48)
    return everywhere(replace(program, caches=caches))


# values


@mutation("a phase stands before the one that makes its operand", "V203", "one", "dense")
def phases_exchanged(program: Program) -> Mutant:
    first = matmuls(program)[0].id

    def exchange(body: tuple[Phase | Loop, ...]) -> tuple[Phase | Loop, ...]:
        for at, item in enumerate(body[1:], start=1):
            if isinstance(item, Phase) and item.id == first:
                return (*body[: at - 1], item, body[at - 1], *body[at + 1 :])
        return body

    return everywhere(with_bodies(program, exchange))


@mutation("two values that are needed at the same time share a region", "V202", "one", "eight")
def values_share_a_region(program: Program) -> Mutant:
    """A value and the next one of its shape."""
    for one in program.buffers:
        for other in program.buffers:
            if one.region != other.region and _alike(one, other) and _meet(one, other):
                buffers = with_one(
                    program.buffers, lambda each, other=other: each is other, region=one.region
                )
                return everywhere(replace(program, buffers=buffers))
    raise AssertionError("no two values of one shape")


def _alike(one: object, other: object) -> bool:
    names = ("dtype", "region_lanes", "shape")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _meet(one: object, other: object) -> bool:
    first, last = getattr(one, "first"), getattr(one, "last")  # noqa: B009
    return first < getattr(other, "last") and getattr(other, "first") < last  # noqa: B009


@mutation("a buffer is narrower than its value", "V803", "one", "two")
def buffer_too_narrow(program: Program) -> Mutant:
    name = matmuls(program)[0].output.buffer
    rows, lanes = next(one.shape for one in program.buffers if one.name == name)
    buffers = with_one(program.buffers, lambda one: one.name == name, shape=(rows, lanes // 2))
    return everywhere(replace(program, buffers=buffers))


@mutation("the rings take more VMEM than there is", "V801", "one", "eight")
def ring_too_large(program: Program) -> Mutant:
    tape = program.tape
    return everywhere(replace(program, tape=replace(tape, slot_rows=200_000)))


@mutation("a launch is planned for more rounds than SMEM has room for tokens", "V802", "rounds")
def too_many_rounds(program: Program) -> Mutant:
    return everywhere(replace(program, rounds_per_launch=1 << 20))


@mutation("a ring has more slots than there are semaphores", "V806", "one", "dense")
def too_many_slots(program: Program) -> Mutant:
    return everywhere(replace(program, tape=replace(program.tape, slots=10_000)))


@mutation("a phase names a stream that is not there", "V805", "one", "dense")
def stream_removed(program: Program) -> Mutant:
    return everywhere(replace(program, streams=program.streams[1:]))
