"""Exchanges in two parts are proved, and the generated kernel does what was proved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkc.passes.pipeline import Lowered
from mkc.schedule.exchange_plan import Part
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import Phase
from mkc.schedule.verify import Issue
from mkc.schedule.verify import verify_program
from mkc.schedule.verify.case import cases_of
from mkc.targets import load_target
from tests.mutation.edits import with_phases
from tests.passes.lowering import TARGET
from tests.passes.overlapped import ends
from tests.passes.overlapped import lower_overlapped
from tests.passes.overlapped import starts
from tests.schedule.verify.test_protocol import compare

SUMS = [
    ("one_shot", 1),
    ("one_shot", 3),
    ("two_phase", 3),
    ("two_phase,wire=bf16", 3),
    ("two_level", 3),
    ("two_level,wire=bf16", 1),
    ("two_step", 1),
    ("two_step,wire=bf16", 1),
]


def lowered(sums: str, batch: int) -> Lowered:
    """A gather and a sum in two parts on four ranks."""
    one = lower_overlapped(ranks=4, batch=batch, passes=f"collectives{{algorithm={sums},group=2}}")
    _, total = starts(one.program)
    assert isinstance(total, AllReducePhase)
    assert total.algorithm == sums.split(",")[0]
    return one


@pytest.mark.parametrize(("sums", "batch"), SUMS)
def test_they_are_proved(sums: str, batch: int) -> None:
    assert verify_program(lowered(sums, batch).program, load_target(TARGET)) == []


@pytest.mark.parametrize(("sums", "batch"), SUMS)
def test_the_kernel_does_what_was_proved(sums: str, batch: int) -> None:
    """Event by event: each part does its own half."""
    one = lowered(sums, batch)
    compare(one, [0, 3], cases_of(one.program)[:1])


def found(program_of: Lowered, changed: dict[str, Phase | None]) -> list[Issue]:
    """What is said of a program with other phases, by id."""
    program = with_phases(program_of.program, lambda one: changed.get(one.id, one))
    return verify_program(program, load_target(TARGET))


def test_an_exchange_without_its_end_is_named() -> None:
    """Nothing else is said then: the events would make no sense."""
    one = lowered("one_shot", 1)
    end = ends(one.program)[-1]
    (issue,) = found(one, {end.id: None})
    assert issue.code == "V608"
    start = starts(one.program)[-1]
    assert issue.message == f"begins before the exchange of {start.id} has ended"
    assert issue.where.startswith("p11 (all_gather,"), "the next exchange"


def test_an_end_without_its_start_is_named() -> None:
    one = lowered("one_shot", 1)
    (issue,) = found(one, {starts(one.program)[0].id: None})
    assert issue.code == "V608"
    assert issue.where.startswith(f"{ends(one.program)[0].id} (all_gather, finish")
    assert issue.message == "the end of an exchange that was not started before it"


def test_two_starts_of_one_exchange_are_named() -> None:
    one = lowered("one_shot", 1)
    end = ends(one.program)[0]
    issues = found(one, {end.id: replace(end, part=Part.START)})
    assert issues[0].code == "V608"
    assert issues[0].message.startswith("begins before the exchange of")
