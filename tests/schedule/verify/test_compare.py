"""What can be said of events that are not the planned ones."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable

import pytest

from mkc.schedule.program import Program
from mkc.schedule.verify.arrays import receive_arrays
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.case import cases_of
from mkc.schedule.verify.compare import check_traced
from mkc.schedule.verify.compare import expected_events
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Receive
from mkc.schedule.verify.events import Wait
from mkc.schedule.verify.events import Write
from tests.passes.lowering import dense_graph
from tests.passes.lowering import lower

RANKS = 2


@pytest.fixture(scope="module")
def program() -> Program:
    return lower(dense_graph(), RANKS).program


def events(program: Program, change: Callable[[Event], Iterable[Event]]) -> list[list[Event]]:
    case: Case = cases_of(program)[0]
    return [
        [other for one in expected_events(program, rank, case) for other in change(one)]
        for rank in range(RANKS)
    ]


def received(program: Program, event: Event) -> bool:
    return isinstance(event, Read) and event.place.array in receive_arrays(program)


def test_a_message_may_be_read_part_by_part(program: Program) -> None:
    """As `sharded_argmax` does: the values of all rows, then the columns."""
    twice = events(program, lambda one: [one, one] if received(program, one) else [one])
    assert sum(map(len, twice)) > sum(map(len, events(program, lambda one: [one])))
    assert check_traced(program, twice) == []


def test_a_part_that_is_read_before_the_message_is_not(program: Program) -> None:
    """One of the two reads stands in front of the wait."""
    messages = receive_arrays(program)

    def early(event: Event) -> list[Event]:
        if not isinstance(event, Receive):
            return [event]
        array = event.semaphore[0].removesuffix("_sems") + "_receive"
        assert array in messages
        place = next(
            one.place
            for one in expected_events(program, 0, cases_of(program)[0])
            if isinstance(one, Read) and one.place.array == array
        )
        read = Read(phase=event.phase, routine="", place=place, data=None)
        return [read, event]

    assert "V606" in {one.code for one in check_traced(program, events(program, early))}


def test_a_message_is_not_read_again_after_another_exchange(program: Program) -> None:
    """Something was sent and received since, so the place may be the next message's."""
    last: list[Event] = []

    def again(event: Event) -> list[Event]:
        if received(program, event):
            last[:] = [event]
        return [event, *last] if isinstance(event, Receive) else [event]

    assert "V606" in {one.code for one in check_traced(program, events(program, again))}


def test_consequences_of_one_mistake_are_counted(program: Program) -> None:
    """No wait for the tape at all: one issue for each code and array."""

    def change(event: Event) -> list[Event]:
        return [] if isinstance(event, Wait) and event.semaphore[0] == "tape_sems" else [event]

    issues = check_traced(program, events(program, change))
    assert {"V101", "V201", "V302"} <= {one.code for one in issues}
    assert len(issues) < 10
    assert any(one.message.endswith(" more)") for one in issues)


def test_mistakes_in_two_arrays_are_two_issues(program: Program) -> None:
    def change(event: Event) -> list[Event]:
        dropped = ("region_0", "region_1")
        return [] if isinstance(event, Write) and event.place.array in dropped else [event]

    found = [one for one in check_traced(program, events(program, change)) if one.code == "V203"]
    assert len(found) == 2
