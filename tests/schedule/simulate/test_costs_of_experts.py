"""Core time of mixtures of experts and of stored blocks, from machine code."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pytest import approx

from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.mixing_phases import StoreBlockPhase
from mkc.schedule.program import Program
from mkc.schedule.simulate import Kind
from mkc.schedule.simulate import simulate
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.schedule.simulate.cost_parts import Source
from mkc.targets import load_target
from tests.mutation.subjects import subject
from tests.passes.lowering import TARGET
from tests.passes.lowering import phase_of
from tests.schedule.simulate.test_costs import code
from tests.schedule.simulate.test_costs import cost

STARTS = code(10_000)  # the loop that starts loads: their time is the copies'


@pytest.fixture(scope="module")
def program() -> Program:
    """Two rows, eight experts in three slots."""
    return subject("experts")


def with_rows(program: Program, rows: int) -> Program:
    rings = tuple(replace(one, rows=rows) for one in program.expert_rings)
    return replace(program, expert_rings=rings)


def test_experts_are_a_loop_and_what_is_left_of_the_last_one(program: Program) -> None:
    phase = phase_of(program, ExpertsPhase)
    found = cost(program, phase.id, code(440, code(880)))
    assert (found.once_us, found.item_us) == (approx(0.2), approx(0.4))
    assert found.source is Source.MACHINE_CODE


@pytest.mark.parametrize(
    "other", [code(440), code(440, code(1), code(1)), code(1, code(1, code(1)))]
)
def test_another_form_of_the_loop_is_not_used(program: Program, other: PhaseCycles) -> None:
    phase = phase_of(program, ExpertsPhase)
    assert cost(program, phase.id, other).source is Source.TARGET


@pytest.mark.parametrize(
    ("rows", "loops", "us"),
    [(2, (STARTS,), 0.5), (8, (STARTS,), 0.5), (9, (code(220), STARTS), 0.7), (24, (), None)],
)
def test_a_choice_goes_through_registers_of_rows(
    program: Program, rows: int, loops: tuple[PhaseCycles, ...], us: float | None
) -> None:
    phase = phase_of(program, RoutePhase)
    found = cost(with_rows(program, rows), phase.id, code(1100, *loops))
    assert found.source is (Source.TARGET if us is None else Source.MACHINE_CODE)
    assert us is None or found.once_us == approx(us)


def test_machine_code_has_waited_for_the_matrix_unit(program: Program) -> None:
    """Core time of the experts is that of the code; by the target's figures a drain is added."""
    phase = phase_of(program, ExpertsPhase)

    def core_us(cycles: dict[str, PhaseCycles]) -> tuple[float, float]:
        found = simulate(program, load_target(TARGET), cycles=cycles)
        mine = [
            one
            for one in found.events
            if one.phase == phase.id and one.rank == 0 and one.track == "core"
        ]
        work = sum(one.us for one in mine if one.kind is Kind.WORK)
        drains = sum(one.us for one in mine if one.stall and "drain" in str(one.stall))
        return work, drains

    work, drains = core_us({phase.id: code(440, code(880))})
    executions = sum(one.id == phase.id for one in program.phases())
    in_front = executions * load_target(TARGET).mxu.drain_us  # that of the matmul before
    assert drains < 1.1 * in_front and work > executions * (0.2 + 0.4)
    assert core_us({})[1] > in_front * 1.5


def test_most_layers_store_nothing(program: Program) -> None:
    """The mean of all executions: of four layers one moves its stream."""
    phase = phase_of(program, StoreBlockPhase)
    assert isinstance(phase, StoreBlockPhase) and phase.period == 4
    assert cost(program, phase.id, code(22, code(220))).once_us == approx(0.01 + 0.1 / 4)
    assert cost(program, phase.id, code(22)).source is Source.TARGET
