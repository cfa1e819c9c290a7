"""Weights that go from a checkpoint onto devices without a packed folder."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from dataclasses import field
from pathlib import Path

import jax
import numpy as np
import pytest

from bench import pack_bench
from bench.load_bench import load_in_process
from mkc.codegen_pallas.source import kernel_source
from mkc.passes.pipeline import Lowered
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.filling import portions
from mkc.runtime.filling import read_operands
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.runtime.layout import pack_layout
from mkc.runtime.safetensors_file import StoredTensor
from mkc.runtime.shards import Array
from mkc.targets import load_target
from tests.goldens import golden_case
from tests.passes.lowering import TARGET
from tests.passes.lowering import lowered
from tests.runtime.checkpoints import write_checkpoint

MINI = "qwen38_mini"
LANE = "qwen38_lane"
SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 8192}


@dataclass(frozen=True, kw_only=True, eq=False)
class Counting(Checkpoint):
    """Counts the bytes that are read of every tensor."""

    read: Counter[str] = field(default_factory=Counter)

    def read_into(self, stored: StoredTensor, offset: int, out: Array) -> None:
        self.read[stored.name] += out.nbytes
        super().read_into(stored, offset, out)


def session(plan: Lowered) -> KernelSession:
    return KernelSession(
        lowered=plan,
        source=kernel_source(plan.program, plan.steps, target=load_target(TARGET)),
        mesh=mesh_of(jax.devices()[: plan.program.ranks]),
        interpret=True,
    )


@pytest.mark.parametrize("limit", [1 << 27, 1 << 20, 1], ids=["whole", "portions", "blocks"])
@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", [MINI, LANE])
def test_operands_are_those_that_packing_in_memory_gives(
    name: str, ranks: int, limit: int, tmp_path: Path
) -> None:
    plan = lowered(name, ranks)
    opened = session(plan)
    opened.load_weights(golden_case(name).weights().__getitem__)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, name))
    found, not_finite = read_operands(checkpoint, plan, opened.format_of, portion_bytes=limit)
    assert not_finite == ()
    assert set(found) == set(opened.operands)
    for operand, expected in opened.operands.items():
        assert found[operand].sharding == expected.sharding
        assert found[operand].dtype == expected.dtype
        same = np.asarray(found[operand]).tobytes() == np.asarray(expected).tobytes()
        assert same, operand


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_matrix_is_read_once_whatever_the_ranks(ranks: int, tmp_path: Path) -> None:
    """But for heads of which several ranks have copies: each of them reads its own."""
    opened = Checkpoint.open(write_checkpoint(tmp_path, MINI))
    checkpoint = Counting(
        name="counted",
        folder=opened.folder,
        revision="",
        tensors=opened.tensors,
        headers=opened.headers,
    )
    plan = lowered(MINI, ranks)
    assert session(plan).load_checkpoint(checkpoint) == ()
    sharded = plan.steps.sharded
    expected = {
        name: opened.tensors[name].bytes * sharded.params[key].copies
        for key, param in sharded.full.params.items()
        for name in param.tensor_names()
        if len(opened.tensors[name].shape) == 2
    }
    assert len(expected) > 50
    assert {name: checkpoint.read[name] for name in expected} == expected


def test_portions_cover_every_byte_once_and_keep_the_limit() -> None:
    plan = lowered(MINI, 2)
    layout = pack_layout(plan)
    for operand in {one.operand for one in layout.pieces}:
        pieces = [one for one in layout.pieces if one.operand == operand]
        largest = max(one.block_bytes for one in pieces)
        for limit in (1, largest, 3 * largest):
            found = list(portions(pieces, limit))
            ends = [0, *(one.stop for one in found)]
            assert [one.start for one in found] == ends[:-1]
            assert ends[-1] == pieces[-1].start + pieces[-1].bytes
            assert all(one.stop - one.start <= max(limit, largest) for one in found)


def test_memory_beside_the_operands_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Far below the checkpoint's size, let alone a tape that is held twice."""
    monkeypatch.setattr(pack_bench, "SIZES", {**pack_bench.SIZES, **SIZES})
    size = pack_bench.write_checkpoint(tmp_path, layers=4)
    found = load_in_process(tmp_path, ranks=2, portion_bytes=16 << 20)
    assert found.operand_bytes > size > 200_000_000
    assert found.beside_bytes < size / 2
