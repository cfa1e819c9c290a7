"""Machine code by phase, from the real TPU compiler."""

from __future__ import annotations

import pytest

from mkc.codegen_pallas.aot_phases import phase_machine_code
from mkc.codegen_pallas.source import kernel_source
from mkc.passes.pipeline import Lowered
from mkc.schedule.messages import messages
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import MatmulPhase
from mkc.schedule.simulate.cost_parts import Source
from mkc.schedule.simulate.costs import phase_costs
from mkc.targets import load_target
from tests.passes.lowering import TARGET
from tests.passes.lowering import lowered

TOPOLOGY = "tpu7x:2x2x1"


def source_of(plan: Lowered) -> str:
    return kernel_source(plan.program, plan.steps, target=load_target(TARGET))


@pytest.mark.parametrize(
    ("name", "ranks", "batch"),
    [("qwen38_lane", 8, 1), pytest.param("dense", 1, 2, marks=pytest.mark.long)],
)
def test_every_phase_is_found_and_its_loops_are_the_programs(
    name: str, ranks: int, batch: int
) -> None:
    built = lowered(name, ranks, batch)
    program = built.program
    cycles = phase_machine_code(source_of(built), topology=TOPOLOGY)
    functions = {one.id for one in program.phases() if one.id[1:].isdigit()}
    assert set(cycles) == functions
    costs = phase_costs(program, load_target(TARGET), cycles)
    assert Source.TARGET not in {costs[one].source for one in functions}
    for phase in program.phases():
        if isinstance(phase, MatmulPhase):
            code = cycles[phase.id]
            steps = sum(run.count == 1 for run in phase.runs) + len(code.loops)
            pushes = code.pushes + sum(one.pushes for one in code.loops)
            blocks = phase.K * phase.blocks_per_step / 256
            assert pushes == pytest.approx(16 * blocks * steps, rel=0.2)  # the last step is shorter
        if isinstance(phase, AllReducePhase):
            (plan,) = (one for one in program.exchanges if one.name == phase.exchange)
            sent = sum(one.peers for one in messages(plan, program.ranks))
            assert cycles[phase.id].messages == sent


def test_a_kernel_that_the_compiler_refuses_has_no_machine_code() -> None:
    source = source_of(lowered("dense", 1)).replace("lax.fori_loop", "lax.no_such_loop")
    assert phase_machine_code(source, topology=TOPOLOGY) == {}
