"""Weights that are no numbers are named by every backend that loads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mkc.runtime.backends import OpenedBackend
from mkc.runtime.backends import open_kernel
from mkc.runtime.backends import open_reference
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import pack
from mkc.targets import load_target
from tests.goldens import golden_case
from tests.passes.lowering import TARGET
from tests.passes.lowering import lowered
from tests.runtime.checkpoints import write_checkpoint

NAME = "qwen38_mini"
NORM = "model.language_model.norm.weight"
QUERY = "model.language_model.layers.3.self_attn.q_norm.weight"


def broken() -> Mapping[str, Any]:
    """One tensor with a NaN, one with an infinity, each in a single place."""
    stored: dict[str, Any] = {
        name: np.array(one) for name, one in golden_case(NAME).weights().items()
    }
    stored[NORM][17] = np.nan
    stored[QUERY][-1] = np.inf
    return stored


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("opening")
    return {
        "broken": Checkpoint.open(write_checkpoint(folder / "broken", NAME, weights=broken())),
        "sound": Checkpoint.open(write_checkpoint(folder / "sound", NAME)),
    }


def opened(kind: str, checkpoint: Checkpoint, tmp_path: Path) -> OpenedBackend:
    graph = golden_case(NAME).graph()
    if kind == "reference":
        return open_reference(graph, checkpoint)
    target = load_target(TARGET)
    packed = None
    if kind == "packed":
        packed = tmp_path / "packed"
        pack(checkpoint, lowered(NAME, 1), packed)
    return open_kernel("interpret", graph, checkpoint, target=target, tp=1, packed=packed)


@pytest.mark.parametrize("kind", ["reference", "interpret", "packed"])
def test_tensors_with_a_nan_or_an_infinity_are_named(
    kind: str, checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    found = opened(kind, checkpoints["broken"], tmp_path / "broken")
    assert found.not_finite == (QUERY, NORM)
    assert opened(kind, checkpoints["sound"], tmp_path / "sound").not_finite == ()
    assert found.step_floor_us is None, "no prediction for what runs on the CPU"
