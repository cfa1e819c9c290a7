"""Core time of phases: machine code where it fits the program, the target's figures otherwise."""

from __future__ import annotations

from dataclasses import replace

from pytest import approx

from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import DeltaRulePhase
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Program
from mkc.schedule.program import VectorPhase
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.schedule.simulate.cost_parts import PhaseCost
from mkc.schedule.simulate.cost_parts import Source
from mkc.schedule.simulate.cost_parts import push_us
from mkc.schedule.simulate.costs import phase_costs
from mkc.targets import load_target
from tests.passes.lowering import TARGET
from tests.passes.lowering import full_size
from tests.passes.lowering import lower
from tests.passes.lowering import phase_of

CLOCK = 2200  # cycles per us
BLOCK_PUSHES = 16  # of a block of 256 x 256 weights, which takes 0.02 us


def program(batch: int = 1) -> Program:
    return lower(full_size(batch=batch), 8).program


def cost(of: Program, phase: str, code: PhaseCycles) -> PhaseCost:
    return phase_costs(of, load_target(TARGET), {phase: code})[phase]


def code(cycles: float, *loops: PhaseCycles, pushes: int = 0) -> PhaseCycles:
    return PhaseCycles(bundles=1, cycles=cycles, pushes=pushes, loops=loops)


def test_pushes_take_the_time_of_their_blocks() -> None:
    assert push_us(20 * BLOCK_PUSHES, load_target(TARGET)) == approx(20 * 0.02)


def test_vector_work_takes_its_cycles() -> None:
    plan = program()
    phase = phase_of(plan, VectorPhase)
    found = cost(plan, phase.id, code(220))
    assert found == PhaseCost(source=Source.MACHINE_CODE, once_us=approx(0.1))


def test_a_matmul_is_as_slow_as_its_pushes_or_its_instructions() -> None:
    """`p03`: one step by itself, then a loop of seven; a step pushes 20 blocks."""
    plan = program()
    phase = phase_of(plan, MatmulPhase)
    assert isinstance(phase, MatmulPhase)
    assert [run.count for run in phase.runs] == [1, 7]
    pushes = 20 * BLOCK_PUSHES
    fast = cost(plan, phase.id, code(570, code(570, pushes=pushes), pushes=pushes))
    assert fast.source is Source.PUSH_RATE
    assert fast.tile_us == approx((0.4, 0.4))
    slow = cost(plan, phase.id, code(570, code(2200, pushes=pushes), pushes=pushes))
    assert slow.source is Source.MACHINE_CODE
    assert slow.tile_us == approx((0.4, 1.0 - 0.1))  # the drain is the simulator's


def test_code_whose_loops_are_not_the_programs_is_not_used() -> None:
    plan = program()
    phase = phase_of(plan, MatmulPhase)
    found = cost(plan, phase.id, code(570, code(570), code(570)))
    assert found.source is Source.TARGET
    assert found.tile_us == approx((0.4, 0.4))


def test_attention_has_a_loop_over_tiles_in_one_over_sequences() -> None:
    plan = program()
    phase = phase_of(plan, AttentionPhase)
    alone = cost(plan, phase.id, code(22, code(880)))
    assert (alone.once_us, alone.item_us, alone.tile_us) == (0.0, approx(0.01), (approx(0.4),))
    nested = cost(plan, phase.id, code(22, code(44, code(880))))
    assert (nested.once_us, nested.item_us) == (approx(0.01), approx(0.02))
    assert nested.tile_us == (approx(0.4),)


def test_the_delta_rule_goes_through_sequences() -> None:
    one, eight = program(), program(batch=8)
    phase = phase_of(one, DeltaRulePhase)
    assert cost(one, phase.id, code(550)).item_us == approx(0.25)
    batched = cost(eight, phase.id, code(22, code(550)))
    assert (batched.once_us, batched.item_us) == (approx(0.01), approx(0.25))
    assert cost(eight, phase.id, code(550)).source is Source.TARGET


def test_every_phase_has_an_estimate() -> None:
    plan = program()
    found = phase_costs(plan, load_target(TARGET), {})
    assert list(found) == [phase.id for phase in plan.phases()]
    assert {one.source for one in found.values()} == {Source.TARGET}
    for phase in plan.phases():
        named = phase.id.startswith("p0") or phase.id[1:].isdigit()
        us = found[phase.id].once_us + found[phase.id].item_us + sum(found[phase.id].tile_us)
        assert (us > 0.0) == (named and not phase.id.endswith(("wait", "advance")))
        assert us < 5.0


def test_a_faster_matrix_unit_makes_matmuls_faster() -> None:
    plan, target = program(), load_target(TARGET)
    phase = phase_of(plan, MatmulPhase)
    fast = replace(target, mxu=replace(target.mxu, push_us=target.mxu.push_us / 2))
    slow_us, fast_us = (phase_costs(plan, one, {})[phase.id].tile_us[0] for one in (target, fast))
    assert fast_us == approx(slow_us / 2)
