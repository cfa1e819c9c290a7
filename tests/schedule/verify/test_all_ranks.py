"""All ranks in one execution: the same events as when every rank is executed by itself."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from mkc.passes.pipeline import Lowered
from mkc.schedule.verify.all_ranks import difference_of_all
from mkc.schedule.verify.all_ranks import expected_of_all
from mkc.schedule.verify.all_ranks import traced_of_all
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.case import cases_of
from mkc.schedule.verify.compare import expected_events
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Write
from mkc.schedule.verify.trace import reference_names
from mkc.schedule.verify.trace import tracer_of
from mkc.schedule.verify.trace_ranks import EventsByRank
from mkc.schedule.verify.trace_ranks import PerRank
from mkc.schedule.verify.trace_ranks import RanksDivergeError
from mkc.schedule.verify.trace_ranks import applied
from mkc.schedule.verify.trace_ranks import per_rank
from tests.passes.lowering import golden_graph
from tests.passes.lowering import lower
from tests.schedule.verify.traced import module_of
from tests.schedule.verify.traced import trace

RANKS = 4


@cache
def plan(passes: str) -> Lowered:
    return lower(golden_graph("qwen38_lane"), RANKS, passes)


@cache
def traced(passes: str) -> tuple[ModuleType, Any]:
    module = module_of(plan(passes))
    return module, trace(module)


def case() -> Case:
    return cases_of(plan("").program)[0]


@pytest.mark.parametrize("passes", ["", "collectives{algorithm=two_phase}"])
def test_the_program(passes: str) -> None:
    program = plan(passes).program
    alone = [expected_events(program, rank, case()) for rank in range(RANKS)]
    assert expected_of_all(program, case()) == alone
    assert alone[0] != alone[1]


@pytest.mark.parametrize("passes", ["", "collectives{algorithm=two_phase}"])
def test_the_traced_kernel(passes: str) -> None:
    program = plan(passes).program
    module, kernel = traced(passes)
    names = reference_names(module.SPEC)
    found, hints = traced_of_all(program, case(), kernel, names)
    assert isinstance(found, EventsByRank), "one execution for all"
    assert list(found) == [tracer_of(program, one, case()).run(kernel, names) for one in range(4)]
    assert hints == []
    assert difference_of_all(expected_of_all(program, case()), found) is None


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("kind", [Send, Write, Read])
def test_a_rank_that_does_something_else(rank: int, kind: type[Event]) -> None:
    """One event of one rank is changed, everything else is the same object."""
    program = plan("").program
    expected = expected_of_all(program, case())
    found = [list(events) for events in expected]
    number = next(at for at, one in enumerate(found[rank]) if isinstance(one, kind))
    event: Any = found[rank][number]
    if isinstance(event, Send):
        found[rank][number] = replace(event, peer=(event.peer + 1) % RANKS)
    else:
        found[rank][number] = replace(event, place=replace(event.place, first=1 << 20))
    problem = difference_of_all(expected, found)
    assert problem is not None
    assert problem[0] == rank


def test_a_rank_that_waits_once_less() -> None:
    expected = expected_of_all(plan("").program, case())
    found = [list(events) for events in expected]
    del found[2][next(at for at, one in enumerate(found[2]) if isinstance(one, Send))]
    problem = difference_of_all(expected, found)
    assert problem is not None
    assert problem[0] == 2


def test_numbers_of_ranks() -> None:
    """Values that are equal everywhere are plain again; a decision by others is refused."""
    rank = per_rank(range(4))
    assert rank == PerRank(values=(0, 1, 2, 3))
    assert applied(lambda one, other: one % other, rank, 2) == PerRank(values=(0, 1, 0, 1))
    assert applied(lambda one: one * 0, rank) == 0
    assert 5 + rank == rank + 5 == PerRank(values=(5, 6, 7, 8))
    with pytest.raises(RanksDivergeError):
        bool(rank)
    with pytest.raises(RanksDivergeError):
        range(rank)


def test_ranks_that_go_different_ways_are_executed_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = plan("").program
    module, kernel = traced("")
    names = reference_names(module.SPEC)
    found, _ = traced_of_all(program, case(), kernel, names)

    def diverge(self: PerRank, other: object) -> None:
        raise RanksDivergeError

    monkeypatch.setattr(PerRank, "__add__", diverge)
    monkeypatch.setattr(PerRank, "__radd__", diverge)
    alone, _ = traced_of_all(program, case(), kernel, names)
    assert not isinstance(alone, EventsByRank)
    assert list(alone) == list(found)
