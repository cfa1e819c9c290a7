"""What goes on between the parts of an exchange is taken off the wait for its messages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from pytest import approx

from mkc.schedule.exchange_plan import Part
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.simulate import Event
from mkc.schedule.simulate import Kind
from mkc.schedule.simulate import Simulation
from mkc.schedule.simulate import simulate
from mkc.schedule.simulate.costs import phase_costs
from mkc.targets import Target
from mkc.targets import load_target
from tests.passes.lowering import TARGET
from tests.passes.overlapped import WHOLE
from tests.passes.overlapped import ends
from tests.passes.overlapped import lower_overlapped
from tests.passes.overlapped import starts
from tests.schedule.simulate.test_translate import balance

RANKS, LAYER = 4, 1
SUMS = ["one_shot", "two_phase", "two_level", "two_step"]


def program(sums: str, *, whole: bool = False) -> Program:
    batch = 1 if sums == "two_step" else 3
    passes = f"collectives{{algorithm={sums},group=2}}"
    passes = f"{WHOLE},{passes}" if whole else passes
    return lower_overlapped(ranks=RANKS, batch=batch, passes=passes).program


def far(latency_us: float) -> Target:
    """Messages take so long, whatever is in them; weights are there at once."""
    target = load_target(TARGET)
    return replace(
        target,
        hbm=replace(target.hbm, sustained_bytes_per_us=1e9),
        dma=replace(target.dma, latency_us=0.0),
        exchange=replace(target.exchange, egress_bytes_per_us=1e9),
        links=replace(
            target.links,
            sibling_latency_us=latency_us,
            sibling_bytes_per_us=1e9,
            chip_latency_us=latency_us,
            chip_bytes_per_us=1e9,
        ),
    )


@cache
def simulated(sums: str, latency_us: float, *, whole: bool = False) -> Simulation:
    return simulate(program(sums, whole=whole), far(latency_us))


def of_phase(found: Simulation, phase: str, kind: Kind) -> list[Event]:
    """Events of one layer on one rank, in order."""
    wanted = (phase, kind, LAYER, 0)
    return [one for one in found.events if (one.phase, one.kind, one.layer, one.rank) == wanted]


def sum_of(one: Program) -> AllReducePhase:
    """The sum, or the end of it."""
    (total,) = [
        item
        for item in one.phases()
        if isinstance(item, AllReducePhase) and item.part is not Part.START
    ]
    return total


def first_wait(found: Simulation, phase: str) -> Event:
    return next(one for one in of_phase(found, phase, Kind.WAIT) if "arrived 0" in one.semaphore)


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("latency_us", [0.01, 1.0, 20.0])
def test_the_wait_shrinks_by_the_work_between(sums: str, latency_us: float) -> None:
    """Down to nothing, if the messages arrive before that is done."""
    split, whole = (simulated(sums, latency_us, whole=one) for one in (False, True))
    start, end = starts(program(sums))[-1], ends(program(sums))[-1]
    sent = of_phase(split, start.id, Kind.ISSUE)[-1]
    wait = first_wait(split, end.id)
    between_us = wait.start_us - sent.end_us
    assert between_us > 0
    before = first_wait(whole, sum_of(program(sums, whole=True)).id)
    assert before.us > 0
    assert wait.us == approx(max(0.0, before.us - between_us), abs=1e-6)
    if latency_us != 1.0:
        assert (wait.us > 0) == (latency_us > 1.0)


@pytest.mark.parametrize("sums", SUMS)
def test_a_step_becomes_shorter(sums: str) -> None:
    """By what every layer does between, and never longer than that."""
    split, whole = (simulated(sums, 20.0, whole=one).prediction for one in (False, True))
    assert split.round_us < whole.round_us
    assert split.bytes == whole.bytes


@pytest.mark.parametrize("sums", SUMS)
def test_an_exchange_counts_as_often_as_before(sums: str) -> None:
    split, whole = (simulated(sums, 1.0, whole=one).prediction for one in (False, True))
    assert split.exchanges == whole.exchanges
    assert split.exchanges.round["chip"] > 0


@pytest.mark.parametrize("sums", SUMS)
def test_the_start_pays_for_the_messages_that_it_starts(sums: str) -> None:
    """The end for those of later phases, and for all sums: each message is paid once."""
    found, whole = simulated(sums, 1.0), simulated(sums, 1.0, whole=True)
    start, end = starts(program(sums))[-1], ends(program(sums))[-1]
    started, ended = (of_phase(found, one.id, Kind.ISSUE) for one in (start, end))
    together = of_phase(whole, sum_of(program(sums, whole=True)).id, Kind.ISSUE)
    assert len(started) + len(ended) == len(together)
    assert bool(ended) == (sums != "one_shot")
    issue_us = far(1.0).links.issue_us
    assert all(one.us == approx(issue_us) for one in (*started, *ended))


@pytest.mark.parametrize("kind", [AllReducePhase, AllGatherPhase])
def test_sums_are_paid_at_the_end(kind: type[AllReducePhase | AllGatherPhase]) -> None:
    one = program("one_shot")
    costs = phase_costs(one, load_target(TARGET), {})
    (start,) = [item for item in starts(one) if isinstance(item, kind)]
    (end,) = [item for item in ends(one) if isinstance(item, kind)]
    assert 0.0 <= costs[start.id].once_us < costs[end.id].once_us


@pytest.mark.parametrize("sums", SUMS)
def test_every_semaphore_ends_at_zero(sums: str) -> None:
    """What a start sends is what its end waits for."""
    assert set(balance(program(sums), 1).values()) == {0}
