"""Backends with a scheme from two checkpoints, or from one packed folder; nothing is compiled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from mkc.errors import CheckpointMismatchError
from mkc.errors import PackedMismatchError
from mkc.runtime.backends import KernelRoundsBackend
from mkc.runtime.backends import OpenedBackend
from mkc.runtime.backends import open_kernel_rounds
from mkc.runtime.backends.opening_speculative import open_speculative
from mkc.runtime.checkpoint import CONFIG
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import pack
from mkc.runtime.manifest import drafter_identity
from mkc.runtime.pair import paired
from mkc.spec import DRAFT_NAMESPACE
from mkc.targets import load_target
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.rounds_backends import DRAFTS
from tests.runtime.rounds_backends import LANE
from tests.runtime.rounds_backends import ROUNDS
from tests.runtime.rounds_backends import TARGET
from tests.runtime.rounds_backends import lowered_round
from tests.runtime.rounds_backends import scheme_of
from tests.runtime.rounds_backends import tensors_of

NORM = "norm.weight"

type Pair = tuple[Checkpoint, Checkpoint]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The drafter's last norm has a NaN."""
    folder = tmp_path_factory.mktemp("rounds")
    tensors = {
        name.removeprefix(DRAFT_NAMESPACE): np.array(one)
        for name, one in tensors_of(LANE).items()
        if name.startswith(DRAFT_NAMESPACE)
    }
    tensors[NORM][3] = np.nan
    (folder / "draft").mkdir()
    (folder / "draft" / CONFIG).write_text(json.dumps(DRAFTS[LANE]))
    save_file(tensors, folder / "draft" / SINGLE)
    target = write_checkpoint(folder / "target", LANE)
    return Checkpoint.open(target), Checkpoint.open(folder / "draft")


def opened(pair: Pair, packed: Path | None, said: list[str]) -> OpenedBackend:
    return open_kernel_rounds(
        "interpret",
        scheme_of(LANE, batch=1),
        *pair,
        hardware=load_target(TARGET),
        tp=2,
        rounds_per_launch=ROUNDS,
        packed=packed,
        say=said.append,
    )


def test_the_reference_backend_names_tensors_that_are_not_finite(pair: Pair) -> None:
    found = open_speculative(scheme_of(LANE, batch=1), *pair)
    assert found.not_finite == (DRAFT_NAMESPACE + NORM,)


def test_packed_weights_are_those_of_the_checkpoints(pair: Pair, tmp_path: Path) -> None:
    plan = lowered_round(LANE, ranks=2, batch=1)
    identity = drafter_identity("dflash2", DRAFTS[LANE])
    pack(paired(*pair), plan, tmp_path / "packed", drafter=identity)
    said: list[str] = []
    found = [opened(pair, packed, said) for packed in (None, tmp_path / "packed")]
    operands = []
    for one in found:
        assert "interpret backend" in one.description
        assert one.description.endswith(
            "scheme dflash2 with up to 7 drafts per round of a greedy sequence"
        )
        assert one.not_finite == (DRAFT_NAMESPACE + NORM,)
        assert one.step_floor_us is None
        assert isinstance(one.backend, KernelRoundsBackend)
        operands.append(one.backend.session.operands)
    first, second = operands
    assert first.keys() == second.keys()
    for name, operand in first.items():
        assert np.asarray(operand).tobytes() == np.asarray(second[name]).tobytes(), name
    assert len(said) == 2
    assert all("weight tape" in one and "prefill workspace" in one for one in said)


def test_weights_without_the_drafter_are_refused(pair: Pair, tmp_path: Path) -> None:
    plan = lowered_round(LANE, ranks=2, batch=1)
    other = drafter_identity("dflash2", {**DRAFTS[LANE], "is_causal": True})
    pack(paired(*pair), plan, tmp_path / "packed", drafter=other)
    with pytest.raises(PackedMismatchError, match="'is_causal = true'; expected 'is_causal = fal"):
        opened(pair, tmp_path / "packed", [])
    with pytest.raises(CheckpointMismatchError, match=r"missing: fc\.weight"):
        opened((pair[0], pair[0]), None, [])
