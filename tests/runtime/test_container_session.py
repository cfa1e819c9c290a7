"""A kernel session takes packed weights from their files to its devices."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from mkc.codegen_pallas.source import kernel_source
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import load_packed
from mkc.runtime.container import pack
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.targets import load_target
from tests.goldens import golden_case
from tests.passes.lowering import TARGET
from tests.passes.lowering import lowered
from tests.runtime.checkpoints import write_checkpoint

NAME = "qwen38_mini"


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_packed_weights_are_the_operands_that_packing_in_memory_places(
    tmp_path: Path, ranks: int
) -> None:
    plan = lowered(NAME, ranks)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "source", NAME))
    pack(checkpoint, plan, tmp_path / "out")
    sessions = [
        KernelSession(
            lowered=plan,
            source=kernel_source(plan.program, plan.steps, target=load_target(TARGET)),
            mesh=mesh_of(jax.devices()[:ranks]),
            interpret=True,
        )
        for _ in range(2)
    ]
    sessions[0].load_weights(lambda name: golden_case(NAME).weights()[name])
    sessions[1].load_packed(load_packed(tmp_path / "out", plan))
    expected, found = (one.operands for one in sessions)
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].sharding == array.sharding
        assert found[name].dtype == array.dtype
        assert np.asarray(found[name]).tobytes() == np.asarray(array).tobytes()
