"""Checkpoints with 4-bit experts that cannot be used, as `mkc run` reports them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mkc.errors import CheckpointMismatchError
from mkc.errors import ScaleByteError
from mkc.runtime.checkpoint import Checkpoint
from tests.errors.expect import refused
from tests.kimi_goldens import kimi_case
from tests.runtime.checkpoints import write_checkpoint

NAME = "kimi_k3_mini_mxfp4"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3."


@pytest.mark.parametrize("byte", [0, 255])
def test_a_scale_byte_without_a_meaning(tmp_path: Path, byte: int) -> None:
    case = kimi_case(NAME)
    name = EXPERT + "w1.weight_scale"
    stored = dict(case.weights())
    stored[name] = stored[name].copy()
    stored[name][17, 2] = byte
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "weights", case, weights=stored))
    graph = case.graph()
    checkpoint.check(graph)  # which reads no tensor
    load = checkpoint.loader(graph)
    assert load(EXPERT + "w3.weight_scale").dtype == np.uint8
    with refused(ScaleByteError, f"'{name}'", f"scale byte {byte} at [17, 2]", "expected 1 to 254"):
        load(name)


def test_experts_that_are_not_there_are_listed(tmp_path: Path) -> None:
    case = kimi_case(NAME)
    stored = {
        name: one for name, one in case.weights().items() if not name.startswith(EXPERT + "w2")
    }
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "weights", case, weights=stored))
    with refused(
        CheckpointMismatchError,
        "all differences (2)",
        f"missing: {EXPERT}w2.weight_packed, expected e2m1x2[128, 32]",
        f"missing: {EXPERT}w2.weight_scale, expected e8m0[128, 2]",
    ):
        checkpoint.check(case.graph())


def test_plain_experts_where_packed_ones_are_expected(tmp_path: Path) -> None:
    plain = kimi_case("kimi_k3_mini")
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "weights", plain))
    said = (
        "all differences (1536)",
        "missing: language_model.model.layers.{1..8}.block_sparse_moe.experts.{0..31}."
        "w2.weight_scale (256 tensors), expected e8m0[128, 2]",
    )
    with refused(CheckpointMismatchError, *said) as raised:
        checkpoint.check(kimi_case(NAME).graph())
    error = raised.value
    assert isinstance(error, CheckpointMismatchError)
    assert len(error.message.splitlines()) < 10
    assert len(error.differences) == 1536
