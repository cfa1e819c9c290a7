"""The rules of the machine, each on a program small enough to reckon by hand."""

from __future__ import annotations

import pytest
from pytest import approx

from mkc.schedule.simulate.engine import Run
from mkc.schedule.simulate.events import Kind
from mkc.schedule.simulate.machine import Engine
from mkc.schedule.simulate.machine import Instruction
from mkc.schedule.simulate.machine import RankSkew
from mkc.schedule.simulate.machine import Stall
from tests.schedule.simulate.machines import COPY
from tests.schedule.simulate.machines import exchange
from tests.schedule.simulate.machines import one_rank
from tests.schedule.simulate.machines import ranks
from tests.schedule.simulate.machines import send
from tests.schedule.simulate.machines import start
from tests.schedule.simulate.machines import wait
from tests.schedule.simulate.machines import work


def copies(run: Run) -> list[tuple[str, float, float]]:
    """Semaphore, begin and end of every copy, in the order of service."""
    return [
        (one.semaphore, one.start_us, one.end_us) for one in run.events if one.kind is Kind.COPY
    ]


def test_a_copy_takes_issue_service_and_latency() -> None:
    assert one_rank(start(), wait()).end_us == approx((0.1 + 1.0 + 1.0,))


def test_memory_serves_one_copy_after_the_other() -> None:
    """The second is served while the first is on its way: latency is paid once."""
    run = one_rank(start("a"), start("b"), wait("a"), wait("b"))
    assert copies(run) == [("a", approx(0.1), approx(1.1)), ("b", approx(1.1), approx(2.1))]
    assert run.end_us == approx((3.1,))


def test_an_urgent_copy_overtakes_those_that_wait_but_not_the_one_being_served() -> None:
    run = one_rank(start("a"), start("b"), start("u", urgent=True), wait("u"), wait("a"), wait("b"))
    assert [name for name, _, _ in copies(run)] == ["a", "u", "b"]


def test_an_urgent_copy_that_comes_later_overtakes_nothing_that_began() -> None:
    """`b` begins at 1.1, before the urgent copy is issued at 1.6."""
    run = one_rank(
        start("a"), start("b"), start("c"), work(1.2), start("u", urgent=True), wait("u")
    )
    assert [name for name, _, _ in copies(run)] == ["a", "b", "u", "c"]


def test_a_wait_for_landed_bytes_costs_nothing() -> None:
    run = one_rank(start(), work(5.0), wait())
    assert run.end_us == approx((5.1,))
    (waited,) = [one for one in run.events if one.kind is Kind.WAIT]
    assert waited.stall is None
    assert waited.us == 0.0


def test_semaphores_count_bytes() -> None:
    """One wait for two copies ends when both have landed; two waits may share one copy."""
    assert one_rank(start(), start(), wait(size=2 * COPY)).end_us == approx((3.1,))
    run = one_rank(start(), wait(size=COPY // 4), wait(size=3 * COPY // 4))
    assert run.end_us == approx((2.1,))


def test_results_of_the_matrix_unit_come_out_late() -> None:
    """Vector work waits for them, the start of a copy does not."""
    assert one_rank(work(1.0, Engine.MATRIX), work(1.0)).end_us == approx((2.5,))
    assert one_rank(work(1.0, Engine.MATRIX), work(1.0, Engine.MATRIX)).end_us == approx((2.0,))
    run = one_rank(work(1.0, Engine.MATRIX), start(), work(0.0))
    assert run.end_us == approx((1.5,))  # issued at 1.0 .. 1.1, during the drain


def test_a_wait_for_a_copy_waits_for_the_matrix_unit_too() -> None:
    """Grouping waits exposes the drain once."""
    landed = (start("a"), start("b"), work(10.0))
    dot = work(1.0, Engine.MATRIX)
    alone = one_rank(*landed, wait("a"), dot, wait("b"), dot)
    grouped = one_rank(*landed, wait("a"), wait("b"), dot, dot)
    assert alone.end_us == approx((10.2 + 1.0 + 0.5 + 1.0,))
    assert grouped.end_us == approx((10.2 + 2.0,))


def test_a_message_to_the_sibling_and_to_another_chip() -> None:
    """Ranks 0 and 1 share a chip: 0.1 issue, 100 bytes at 1000 or 100 bytes/us, latency 1 or 2."""
    for peer, us in ((1, 0.1 + 0.1 + 1.0), (2, 0.1 + 1.0 + 2.0)):
        programs: dict[int, list[Instruction]] = {0: [send(peer)], peer: [wait("in", 100)]}
        run = ranks(4, lambda rank, programs=programs: programs.get(rank, []))
        assert run.end_us[peer] == approx(us)


def test_the_port_of_a_rank_limits_what_it_sends_to_other_chips() -> None:
    """Messages to ranks 2 and 4 leave one after the other, that to the sibling does not wait."""
    messages = [
        one
        for one in ranks(
            8,
            lambda rank: [send(2), send(4), send(1)] if rank == 0 else [],
        ).events
        if one.kind is Kind.MESSAGE
    ]
    assert [one.start_us for one in messages] == approx([0.1, 1.1, 0.3])
    assert [one.track for one in messages] == ["link:chip", "link:chip", "link:sibling"]


def test_sent_bytes_are_told_to_the_sender() -> None:
    run = ranks(2, lambda rank: [send(1, sent="out"), wait("out", 100)] if rank == 0 else [])
    assert run.end_us[0] == approx(0.1 + 0.1)


def test_one_rank_stands_for_all_of_a_symmetric_program() -> None:
    """Everything that differs between ranks is who they are, so their times are equal."""

    def of(rank: int) -> list[Instruction]:
        body = [start(), *exchange(rank, 8), wait(), work(1.0, Engine.MATRIX)]
        return [*body, *exchange(rank, 8, 300, "second"), work(0.5)]

    every = ranks(8, of)
    one = ranks(8, of, symmetric=True)
    assert len(every.end_us) == 8
    assert one.symmetric
    assert every.end_us == approx(one.end_us * 8)


def test_a_late_rank_makes_all_others_wait() -> None:
    skew = (RankSkew(start_us=5.0), *[RankSkew()] * 3)
    alone = ranks(4, lambda rank: exchange(rank, 4), symmetric=True)
    run = ranks(4, lambda rank: exchange(rank, 4), symmetric=True, skew=skew)
    assert not run.symmetric
    assert min(run.end_us) > 5.0
    assert max(run.end_us) == approx(alone.end_us[0] + 5.0)


def test_a_slow_memory_of_one_rank() -> None:
    skew = (RankSkew(memory_scale=0.5), RankSkew())
    run = ranks(2, lambda rank: [start(), wait()], symmetric=True, skew=skew)
    assert run.end_us == approx((0.1 + 2.0 + 1.0, 0.1 + 1.0 + 1.0))


def test_a_program_that_never_ends_is_named() -> None:
    with pytest.raises(AssertionError, match="rank 1 in p00 at in"):
        ranks(2, lambda rank: [] if rank == 0 else [wait("in", 100)])
    with pytest.raises(AssertionError, match="rank 0 in p00 at a"):
        one_rank(start("a", 10), wait("a", 11))


def test_events_name_what_they_waited_for() -> None:
    run = one_rank(start("a"), start("b"), wait("b"))
    issue_a, issue_b, copy_a, copy_b, waited = run.events
    assert (copy_a.after, copy_a.source) == (issue_a.id, issue_a.id)
    assert (copy_b.after, copy_b.source) == (copy_a.id, issue_b.id)
    assert (waited.after, waited.source) == (copy_b.id, copy_b.id)
    assert waited.stall is Stall.TAPE
    assert waited.end_us == copy_b.done_us
    assert [one.id for one in run.events] == list(range(5))


def test_a_wait_names_all_that_it_took() -> None:
    """Also what landed before, and what is taken in two parts by the wait that takes the rest."""
    run = one_rank(start(), start(), start(), wait(size=1500), work(5.0), wait(size=1500))
    ids = [one.id for one in run.events if one.kind is Kind.COPY]
    waits = [one for one in run.events if one.kind is Kind.WAIT]
    assert [one.took for one in waits] == [(ids[0],), (ids[1], ids[2])]
    assert [one.source for one in waits] == [ids[1], ids[2]]
