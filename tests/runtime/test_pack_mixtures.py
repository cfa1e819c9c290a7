"""Checkpoints with many experts: packed to a folder, continued, filled on the fly, refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import finalize

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from mkc import Graph
from mkc.codegen_pallas.source import kernel_source
from mkc.errors import ScaleByteError
from mkc.passes.pipeline import Lowered
from mkc.runtime import layout
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import load_packed
from mkc.runtime.container import pack
from mkc.runtime.filling import read_operands
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.runtime.layout import pack_layout
from mkc.runtime.manifest import MANIFEST
from mkc.runtime.safetensors_file import StoredTensor
from mkc.runtime.shards import Array
from mkc.targets import load_target
from models.kimi_k3 import MODEL
from tests.kimi_weights import kimi_weights
from tests.passes.kimi import small_config
from tests.passes.lowering import TARGET
from tests.passes.lowering import lower
from tests.runtime.packed import check_operands
from tests.runtime.packed import digests
from tests.runtime.test_container_resume import Killed
from tests.runtime.test_container_resume import killing
from tests.runtime.test_filling import Counting

EXPERTS = "block_sparse_moe.experts."
WORKERS = 2
TENSORS_OF_GATE_UP = 4  # of an expert: codes and scales of two matrices
SCALE = f"language_model.model.layers.1.{EXPERTS}5.w2.weight_scale"


@dataclass(frozen=True, kw_only=True, eq=False)
class Watching(Checkpoint):
    """Counts the tensors of experts that are in memory at once."""

    alive: list[str] = field(default_factory=list)
    most: list[int] = field(default_factory=lambda: [0])
    guard: Lock = field(default_factory=Lock)

    def read_into(self, stored: StoredTensor, offset: int, out: Array) -> None:
        if EXPERTS in stored.name:
            memory = out
            while isinstance(memory.base, np.ndarray):
                memory = memory.base
            with self.guard:
                self.alive.append(stored.name)
                self.most[0] = max(self.most[0], len(self.alive))
            finalize(memory, self.alive.remove, stored.name)
        super().read_into(stored, offset, out)


@cache
def graph_of(mxfp4: bool) -> Graph:
    """Three layers, two of them with experts, which are as wide as two slices."""
    config = small_config(layers=3, latent=[3], dense=1, mxfp4=mxfp4)
    config["text_config"]["moe_intermediate_size"] = 128
    return MODEL.trace(config, batch=1, context=128)


@cache
def plan(mxfp4: bool, ranks: int) -> Lowered:
    return lower(graph_of(mxfp4), ranks)


@cache
def weights(mxfp4: bool) -> Mapping[str, Any]:
    return kimi_weights(graph_of(mxfp4), 3, heads=8)


def stored(folder: Path, tensors: Mapping[str, Any]) -> Checkpoint:
    folder.mkdir()
    save_file(dict(tensors), folder / SINGLE)
    return Checkpoint.open(folder)


def session_of(lowered: Lowered) -> KernelSession:
    return KernelSession(
        lowered=lowered,
        source=kernel_source(lowered.program, lowered.steps, target=load_target(TARGET)),
        mesh=mesh_of(jax.devices()[: lowered.program.ranks]),
        interpret=True,
    )


@pytest.mark.parametrize(("mxfp4", "ranks"), [(True, 4), (False, 2)])
def test_a_folder_has_what_packing_in_memory_gives(mxfp4: bool, ranks: int, tmp_path: Path) -> None:
    checkpoint = stored(tmp_path / "source", weights(mxfp4))
    result = pack(checkpoint, plan(mxfp4, ranks), tmp_path / "out")
    assert result.not_finite == ()
    check_operands(tmp_path / "out", plan(mxfp4, ranks), weights(mxfp4))
    load_packed(tmp_path / "out", plan(mxfp4, ranks)).verify()


@pytest.mark.parametrize("limit", [1 << 27, 1 << 15], ids=["whole", "portions"])
def test_filling_gives_the_same_and_reads_every_expert_once(limit: int, tmp_path: Path) -> None:
    lowered = plan(True, 4)
    assert {(one.groups, one.slices) for one in lowered.program.experts} == {(2, 2)}
    session = session_of(lowered)
    session.load_weights(weights(True).__getitem__)
    opened = stored(tmp_path / "source", weights(True))
    checkpoint = Counting(
        name="counted",
        folder=opened.folder,
        revision="",
        tensors=opened.tensors,
        headers=opened.headers,
    )
    found, _ = read_operands(checkpoint, lowered, session.format_of, portion_bytes=limit)
    assert set(found) == set(session.operands)
    for name, expected in session.operands.items():
        assert found[name].dtype == expected.dtype, name
        assert np.asarray(found[name]).tobytes() == np.asarray(expected).tobytes(), name
    read = {name: count for name, count in checkpoint.read.items() if EXPERTS in name}
    assert read == {name: one.nbytes for name, one in weights(True).items() if EXPERTS in name}
    assert len(read) == 2 * 32 * 6


@pytest.mark.parametrize("how", ["pack", "fill"])
def test_few_experts_are_in_memory_at_once(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many there are: a thread has the tensors of one matrix of a slot at a time."""
    monkeypatch.setattr(os, "cpu_count", lambda: WORKERS)
    lowered = plan(True, 4)
    opened = stored(tmp_path / "source", weights(True))
    checkpoint = Watching(
        name="watched",
        folder=opened.folder,
        revision="",
        tensors=opened.tensors,
        headers=opened.headers,
    )
    if how == "pack":
        pack(checkpoint, lowered, tmp_path / "out")
    else:
        read_operands(checkpoint, lowered, session_of(lowered).format_of, portion_bytes=1)
    assert 0 < checkpoint.most[0] <= WORKERS * TENSORS_OF_GATE_UP
    assert checkpoint.alive == []


def test_a_kill_among_the_experts_is_continued_to_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a few experts; those that were recorded are not written again."""
    monkeypatch.setattr(layout, "PIECE_BYTES", 1 << 16)
    lowered = plan(True, 2)
    pieces = pack_layout(lowered).pieces
    several = [one for one in pieces if one.operand.startswith("experts_") and one.blocks > 1]
    assert len(several) > 8
    before = sum(one.blocks for one in pieces[: pieces.index(several[4])])
    checkpoint = stored(tmp_path / "source", weights(True))
    pack(checkpoint, lowered, tmp_path / "whole")
    with pytest.raises(Killed):
        pack(checkpoint, lowered, tmp_path / "out", workers=1, progress=killing(before + 2))
    result = pack(checkpoint, lowered, tmp_path / "out")
    assert result.continued_bytes > 0
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_a_scale_byte_without_a_meaning_ends_packing(tmp_path: Path) -> None:
    tensors = {**weights(True), SCALE: weights(True)[SCALE].copy()}
    tensors[SCALE][9, 1] = 255
    checkpoint = stored(tmp_path / "source", tensors)
    with pytest.raises(ScaleByteError, match=r"5\.w2\.weight_scale.*255 at \[9, 1\]"):
        pack(checkpoint, plan(True, 2), tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_a_large_model_has_few_pieces() -> None:
    """Experts are recorded by many; a record has a checksum of every rank."""
    pieces = pack_layout(plan(True, 4)).pieces
    assert sum(one.operand.startswith("experts_") for one in pieces) == 4
