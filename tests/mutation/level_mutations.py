"""Mistakes in sums of two levels, and in two steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mkc.schedule.program import Program
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Receive
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Wait
from tests.mutation.edits import Mutant
from tests.mutation.edits import dropping
from tests.mutation.edits import everywhere
from tests.mutation.edits import replacing
from tests.mutation.registry import mutation

SUMS = ("exchange_two_level", "exchange_two_step")
ACROSS = ((2,), (3,))  # semaphores of the messages between groups


def _is_across(event: Event) -> bool:
    return isinstance(event, Send) and event.target.array.endswith("_across")


@mutation("groups do not exchange their sums", "V606", "levels", "steps")
def groups_left_out(program: Program) -> Mutant:
    def between(event: Event) -> bool:
        waits = isinstance(event, Receive | Wait) and event.semaphore[1] in ACROSS
        return _is_across(event) or (waits and event.semaphore[0].startswith(SUMS))

    return everywhere(program, dropping(between))


@mutation("a group sends its sum to the rank with another share", "V606", "levels")
def counterpart_mistaken(program: Program) -> Mutant:
    def neighbour(event: Event) -> Iterable[Event]:
        assert isinstance(event, Send)
        yield replace(event, peer=event.peer ^ 1)

    return everywhere(program, replacing(_is_across, neighbour))


@mutation("a share is scattered to the next group", "V606", "levels")
def group_mistaken(program: Program) -> Mutant:
    (group,) = {one.group for one in program.exchanges if one.group}

    def next_group(event: Event) -> Iterable[Event]:
        assert isinstance(event, Send)
        yield replace(event, peer=(event.peer + group) % program.ranks)

    def scatter(event: Event) -> bool:
        return isinstance(event, Send) and event.target.array.endswith("_scattered")

    return everywhere(program, replacing(scatter, next_group))


@mutation("what a group gathers is its own sum, not that of all groups", "V606", "levels")
def own_sum_gathered(program: Program) -> Mutant:
    def own(event: Event) -> Iterable[Event]:
        assert isinstance(event, Send)
        array = event.source.array.replace("_total", "_summed")
        yield replace(event, source=replace(event.source, array=array))

    def gather(event: Event) -> bool:
        return isinstance(event, Send) and event.source.array.endswith("_total")

    return everywhere(program, replacing(gather, own))


@mutation("a whole row goes to the group before it was folded", "V203", "steps")
def row_sent_before_it_is_there(program: Program) -> Mutant:
    def own(event: Event) -> Iterable[Event]:
        assert isinstance(event, Send)
        array = event.source.array.replace("_send", "_summed")
        yield replace(event, source=replace(event.source, array=array))

    def first(event: Event) -> bool:
        return isinstance(event, Send) and event.target.array.endswith("_receive")

    def of_a_step(event: Event) -> bool:
        return first(event) and "two_step" in event.target.array  # type: ignore[union-attr]

    return everywhere(program, replacing(of_a_step, own))
