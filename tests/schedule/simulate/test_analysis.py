"""What is said about a stretch of time adds up to it."""

from __future__ import annotations

from itertools import pairwise

from pytest import approx

from mkc.schedule.simulate.analysis import Part
from mkc.schedule.simulate.analysis import Window
from mkc.schedule.simulate.analysis import by_part
from mkc.schedule.simulate.analysis import by_phase
from mkc.schedule.simulate.analysis import clipped
from mkc.schedule.simulate.analysis import core_us
from mkc.schedule.simulate.analysis import critical_path
from mkc.schedule.simulate.analysis import exposed
from mkc.schedule.simulate.engine import Run
from mkc.schedule.simulate.machine import Engine
from mkc.schedule.simulate.machine import Instruction
from mkc.schedule.simulate.machine import Stall
from tests.schedule.simulate.machines import exchange
from tests.schedule.simulate.machines import one_rank
from tests.schedule.simulate.machines import ranks
from tests.schedule.simulate.machines import start
from tests.schedule.simulate.machines import wait
from tests.schedule.simulate.machines import work


def whole(run: Run) -> Window:
    return Window(rank=0, start_us=0.0, end_us=run.end_us[0])


def test_a_path_through_memory() -> None:
    """Issue, both copies, the latency of the second, and the work behind it."""
    run = one_rank(start("a"), start("b"), work(0.3), wait("a"), wait("b"), work(2.0))
    path = critical_path(run, whole(run))
    assert [one.part for one in path] == [
        Part.CONTROL,
        Part.STREAM,
        Part.STREAM,
        Part.LATENCY,
        Part.COMPUTE,
    ]
    assert by_part(path)[Part.STREAM] == approx(2.0)
    assert all(one.end_us == approx(other.start_us) for one, other in pairwise(path))
    assert sum(one.us for one in path) == approx(run.end_us[0])


def test_a_path_through_a_link() -> None:
    run = ranks(2, lambda rank: [work(1.0), *exchange(rank, 2)], symmetric=True)
    parts = by_part(critical_path(run, whole(run)))
    assert parts[Part.COMPUTE] == approx(1.0)
    assert parts[Part.LINK] == approx(0.1)
    assert parts[Part.LATENCY] == approx(1.0)
    assert sum(parts.values()) == approx(run.end_us[0])


def test_a_window_cuts_the_path() -> None:
    run = one_rank(start(), wait(), work(2.0))
    path = critical_path(run, Window(rank=0, start_us=1.5, end_us=3.1))
    assert [(one.start_us, one.end_us) for one in path] == [
        (approx(1.5), approx(2.1)),
        (approx(2.1), approx(3.1)),
    ]


def test_idle_memory_is_explained_by_what_the_core_did() -> None:
    """Served 0.1 to 1.1; then latency, work, and at last an exchange."""

    def of(rank: int) -> list[Instruction]:
        return [start(), wait(), work(2.0), *exchange(rank, 2)]

    run = ranks(2, of, symmetric=True)
    found = exposed(clipped(run.events, whole(run)), whole(run))
    assert found.dma == approx(1.0)
    assert found.compute == approx(2.0)
    assert found.collective == approx(0.1 + 1.0)
    assert found.fixed == approx(0.1 + 0.1)  # the starts of the copy and of the message
    assert found.total + 1.0 == approx(run.end_us[0])


def test_work_under_a_busy_memory_is_not_exposed() -> None:
    run = one_rank(start("a", 10_000), work(9.0), wait("a", 10_000))
    found = exposed(clipped(run.events, whole(run)), whole(run))
    assert found.compute == 0.0
    assert found.total == approx(0.1 + 1.0)


def test_the_core_without_its_waits_for_copies() -> None:
    for stall in (Stall.TAPE, Stall.COPY):
        run = one_rank(start(), wait(stall=stall), work(2.0), work(1.0, Engine.MATRIX), work(0.5))
        found = core_us(clipped(run.events, whole(run)), whole(run))
        assert found == approx(0.1 + 2.0 + 1.5 + 0.5)


def test_time_by_phase() -> None:
    run = one_rank(start(), wait(), work(2.0))
    (phase,) = by_phase(clipped(run.events, whole(run))).values()
    assert phase.work_us == approx(2.1)
    assert phase.wait_us == {Stall.TAPE: approx(2.0)}
    assert phase.us == approx(run.end_us[0])
