"""Every way to sum over ranks is proved, whatever its messages travel as."""

from __future__ import annotations

import pytest

from mkc.schedule.program import AllReducePhase
from mkc.schedule.verify import verify_program
from mkc.targets import load_target
from tests.passes.lowering import TARGET
from tests.passes.lowering import dense_graph
from tests.passes.lowering import lower


@pytest.mark.parametrize("wire", ["f32", "bf16"])
@pytest.mark.parametrize(
    ("algorithm", "batch"),
    [
        ("one_shot", 1),
        ("one_shot", 3),
        ("two_phase", 1),
        ("two_phase", 3),
        ("two_level", 1),
        ("two_level", 3),
        ("two_step", 1),
    ],
)
def test_sums_are_proved(algorithm: str, batch: int, wire: str) -> None:
    passes = f"collectives{{algorithm={algorithm},group=2,wire={wire}}}"
    program = lower(dense_graph(batch=batch), 4, passes).program
    sums = [one for one in program.phases() if isinstance(one, AllReducePhase)]
    assert algorithm in {one.algorithm for one in sums}
    assert verify_program(program, load_target(TARGET)) == []
