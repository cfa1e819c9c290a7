"""Packed folders: the same operands as packing in memory, streamed, checked, refused."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors import safe_open

from mkc.errors import PackedDamagedError
from mkc.errors import PackedFolderError
from mkc.errors import PackedMismatchError
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import load_packed
from mkc.runtime.container import pack
from mkc.runtime.layout import SHARED
from mkc.runtime.layout import pack_layout
from mkc.runtime.layout import rank_file
from mkc.runtime.manifest import JOURNAL
from mkc.runtime.manifest import MANIFEST
from mkc.runtime.manifest import SAMPLE_BYTES
from mkc.runtime.manifest import SAMPLED_TENSORS
from mkc.runtime.manifest import contents_digest
from tests.goldens import golden_case
from tests.passes.lowering import golden_graph
from tests.passes.lowering import lower
from tests.passes.lowering import lowered
from tests.runtime.checkpoints import Forms
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.packed import check_operands
from tests.runtime.packed import digests

MINI = "qwen38_mini"
LANE = "qwen38_lane"
NORM = "model.language_model.norm.weight"
HEAD = "lm_head.weight"
TABLE = "model.language_model.embed_tokens.weight"


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Golden checkpoints, written once."""

    @cache
    def opened(name: str) -> Checkpoint:
        return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp(name), name))

    return opened


type Sources = Callable[[str], Checkpoint]


# Contents.


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("name", [MINI, LANE])
def test_operands_are_those_of_packing_in_memory(
    sources: Sources, tmp_path: Path, name: str, ranks: int
) -> None:
    plan = lowered(name, ranks)
    result = pack(sources(name), plan, tmp_path / "out")
    check_operands(tmp_path / "out", plan, golden_case(name).weights())
    load_packed(tmp_path / "out", plan).verify()
    assert result.not_finite == ()
    assert result.continued_bytes == 0
    assert result.bytes == sum(
        one.stat().st_size for one in (tmp_path / "out").glob("*.safetensors")
    )


def test_stored_types_are_converted_as_when_loaded(tmp_path: Path) -> None:
    stored: dict[str, Any] = dict(golden_case(MINI).weights())
    for name, tensor in stored.items():
        other = np.float32 if tensor.dtype == bfloat16 else bfloat16
        stored[name] = tensor.astype(other)
    stored[HEAD] = (stored[HEAD] * np.float32(1.0 + 2.0**-9)).astype(np.float32)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "source", MINI, weights=stored))
    plan = lowered(MINI, 2)
    pack(checkpoint, plan, tmp_path / "out")
    load = checkpoint.loader(plan.steps.sharded.full)
    check_operands(tmp_path / "out", plan, {name: load(name) for name in stored})


def test_other_tools_can_read_the_files(sources: Sources, tmp_path: Path) -> None:
    plan = lowered(MINI, 2)
    pack(sources(MINI), plan, tmp_path / "out")
    assert sorted(one.name for one in (tmp_path / "out").iterdir()) == [
        MANIFEST,
        rank_file(0),
        rank_file(1),
        SHARED,
    ]
    for file in pack_layout(plan).files:
        with safe_open(tmp_path / "out" / file.name, framework="numpy") as opened:
            assert set(opened.keys()) == set(file.tensors)
            for name, tensor in file.tensors.items():
                found = opened.get_slice(name)
                assert tuple(found.get_shape()) == tensor.operand.shape
                assert found.get_dtype().lower() == tensor.operand.dtype


def test_tensors_are_read_once_for_all_ranks_and_few_bytes_are_held(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one head fill no whole block here; what two blocks share is read for both.

    The samples that identify the checkpoint are read too, once.
    """
    read: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(preadv(descriptor, buffers, offset))
        return read[-1]

    checkpoint = sources(LANE)
    sizes = [one.bytes for one in checkpoint.tensors.values()]
    stored, sampled = sum(sizes), sum(min(one, SAMPLE_BYTES) for one in sizes)
    assert len(sizes) <= SAMPLED_TENSORS
    plans = {ranks: lowered(LANE, ranks) for ranks in (1, 8)}
    monkeypatch.setattr(os, "preadv", counted)
    pack(checkpoint, plans[1], tmp_path / "one")
    assert sum(read) == stored + sampled
    read.clear()
    tracemalloc.start()
    pack(checkpoint, plans[8], tmp_path / "eight")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(read) < 1.5 * stored
    assert peak < stored / 2


@pytest.mark.parametrize("form", [Forms.SHARDED, Forms.UNINDEXED])
def test_how_the_checkpoint_is_divided_into_files_changes_no_weight(
    sources: Sources, tmp_path: Path, form: str
) -> None:
    plan = lowered(MINI, 2)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "source", MINI, form=form))
    pack(sources(MINI), plan, tmp_path / "single")
    pack(checkpoint, plan, tmp_path / "several")
    first, second = digests(tmp_path / "single"), digests(tmp_path / "several")
    assert first.pop(MANIFEST) != second.pop(MANIFEST)
    assert first == second


def test_one_folder_serves_every_batch_context_ring_and_launch(
    sources: Sources, tmp_path: Path
) -> None:
    pack(sources(MINI), lowered(MINI, 2), tmp_path / "out")
    case = golden_case(MINI)
    others = [
        lower(case.graph(batch=8), 2),
        lower(case.graph(context=64), 2),
        lower(case.graph(), 2, "tile{load_bytes=65536}"),
        lower(case.graph(), 2, "lower{rounds=8}"),
    ]
    for plan in others:
        check_operands(tmp_path / "out", plan, case.weights())


def test_the_manifest_says_what_was_packed(sources: Sources, tmp_path: Path) -> None:
    checkpoint = sources(MINI)
    plan = lowered(MINI, 2)
    pack(checkpoint, plan, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["ranks"] == 2
    assert manifest["pipeline"] == plan.pipeline
    assert manifest["sources"] == [
        {
            "file": SINGLE,
            "bytes": (checkpoint.folder / SINGLE).stat().st_size,
            "header_sha256": checkpoint.headers[0].digest,
            "contents_sha256": contents_digest(checkpoint, checkpoint.headers[0]),
        }
    ]
    assert f"{HEAD} bf16[" in "".join(manifest["layout"])
    packed = sum(one["bytes"] * len(one["crc32"]) for one in manifest["pieces"])
    assert packed < pack_layout(plan).bytes < 1.01 * packed


def test_the_same_folder_is_not_packed_twice(sources: Sources, tmp_path: Path) -> None:
    plan = lowered(MINI, 2)
    first = pack(sources(MINI), plan, tmp_path / "out")
    before = {one: one.stat().st_mtime_ns for one in (tmp_path / "out").iterdir()}
    again = pack(sources(MINI), plan, tmp_path / "out")
    assert again.continued_bytes == again.bytes == first.bytes
    assert {one: one.stat().st_mtime_ns for one in (tmp_path / "out").iterdir()} == before


# Weights that are not numbers.


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tensor_with_a_nan_is_named(tmp_path: Path, ranks: int, value: float) -> None:
    """In a matrix of the tape, a table, a small vector and a narrow weight."""
    stored: dict[str, Any] = dict(golden_case(MINI).weights())
    narrow = "model.language_model.layers.0.linear_attn.in_proj_b.weight"
    broken = [HEAD, TABLE, NORM, narrow]
    for name in broken:
        stored[name] = stored[name].copy()
        stored[name].flat[-1] = value
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "source", MINI, weights=stored))
    result = pack(checkpoint, lowered(MINI, ranks), tmp_path / "out")
    assert result.not_finite == tuple(sorted(broken))
    again = pack(checkpoint, lowered(MINI, ranks), tmp_path / "out")
    assert again.not_finite == result.not_finite
    check_operands(tmp_path / "out", lowered(MINI, ranks), stored)


# Folders that do not fit.


def changed(folder: Path, key: str, value: object) -> None:
    """Rewrites one key of the manifest."""
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest[key] = value
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_a_folder_for_other_ranks_is_refused(sources: Sources, tmp_path: Path) -> None:
    pack(sources(MINI), lowered(MINI, 2), tmp_path / "out")
    said = "'ranks' is 2; expected 8"
    with pytest.raises(PackedMismatchError, match=said):
        load_packed(tmp_path / "out", lowered(MINI, 8))
    with pytest.raises(PackedMismatchError, match=said):
        pack(sources(MINI), lowered(MINI, 8), tmp_path / "out")


def test_the_first_difference_of_the_layout_is_named(sources: Sources, tmp_path: Path) -> None:
    """One parameter of the graph has another checkpoint name."""
    plan = lowered(MINI, 2)
    pack(sources(MINI), plan, tmp_path / "out")
    graph = golden_graph(MINI)
    head = replace(graph.params[HEAD], pattern="head.weight")
    other = lower(replace(graph, params={**graph.params, HEAD: head}), 2)
    number = next(n for n, line in enumerate(pack_layout(plan).lines, start=1) if HEAD in line)
    with pytest.raises(PackedMismatchError) as raised:
        load_packed(tmp_path / "out", other)
    assert f"entry {number} of 'layout' is 'tape K=" in str(raised.value)
    assert f"{HEAD} bf16[" in str(raised.value)
    assert "; expected 'tape K=" in str(raised.value)
    assert ": head.weight bf16[" in str(raised.value)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("version", 2, "'version' is 2; expected 3"),
        ("dtype_policy", "none", "'dtype_policy' is 'none'; expected 'f32 to bf16"),
        ("layout", [], "entry 1 of 'layout' is absent; expected 'tape"),
        ("layout", None, "'layout' is absent"),
    ],
)
def test_a_manifest_with_another_identity_is_refused(
    sources: Sources, tmp_path: Path, key: str, value: object, said: str
) -> None:
    pack(sources(MINI), lowered(MINI, 2), tmp_path / "out")
    changed(tmp_path / "out", key, value)
    with pytest.raises(PackedMismatchError, match=said):
        load_packed(tmp_path / "out", lowered(MINI, 2))


def test_another_checkpoint_is_not_packed_into_a_finished_folder(
    sources: Sources, tmp_path: Path
) -> None:
    plan = lowered(MINI, 2)
    pack(sources(MINI), plan, tmp_path / "out")
    stored = {**golden_case(MINI).weights(), "extra": np.zeros(3, np.float32)}
    other = Checkpoint.open(write_checkpoint(tmp_path / "source", MINI, weights=stored))
    with pytest.raises(PackedMismatchError, match="entry 1 of 'sources'"):
        pack(other, plan, tmp_path / "out")


def test_other_weights_of_the_same_form_are_refused(sources: Sources, tmp_path: Path) -> None:
    """Files of the same name and size with the same header: a checkpoint that was trained on."""
    plan = lowered(MINI, 2)
    pack(sources(MINI), plan, tmp_path / "out")
    stored: dict[str, Any] = dict(golden_case(MINI).weights())
    stored[NORM] = stored[NORM] + stored[NORM].dtype.type(1)
    other = Checkpoint.open(write_checkpoint(tmp_path / "source", MINI, weights=stored))
    assert other.headers[0].digest == sources(MINI).headers[0].digest
    said = "'contents_sha256' of entry 1 of 'sources' is '"
    with pytest.raises(PackedMismatchError, match=said):
        pack(other, plan, tmp_path / "out")
    with pytest.raises(PackedMismatchError, match=said):
        load_packed(tmp_path / "out", plan, checkpoint=other)
    load_packed(tmp_path / "out", plan, checkpoint=sources(MINI))
    copy = Checkpoint.open(write_checkpoint(tmp_path / "copy", MINI))
    load_packed(tmp_path / "out", plan, checkpoint=copy)


def test_the_contents_are_sampled(tmp_path: Path) -> None:
    """The beginnings of tensors, spread over the file where there are many."""
    stored = {f"t{n}": np.zeros(SAMPLE_BYTES + 1, np.uint8) for n in range(SAMPLED_TENSORS + 1)}
    folder = write_checkpoint(tmp_path / "source", MINI, weights=stored)

    def found() -> str:
        checkpoint = Checkpoint.open(folder)
        return contents_digest(checkpoint, checkpoint.headers[0])

    before = found()
    placed = sorted(Checkpoint.open(folder).tensors.values(), key=lambda one: one.start)
    seen = {0: True, SAMPLE_BYTES - 1: True, SAMPLE_BYTES: False}  # of the first tensor
    cases = [(placed[0].start + at, noticed) for at, noticed in seen.items()]
    cases += [(placed[1].start, False), (placed[2].start, True), (placed[-1].start, True)]
    for at, noticed in cases:
        contents = bytearray((folder / SINGLE).read_bytes())
        contents[at] ^= 1
        (folder / SINGLE).write_bytes(contents)
        assert (found() != before) == noticed
        contents[at] ^= 1
        (folder / SINGLE).write_bytes(contents)
    assert found() == before


def test_a_folder_with_other_files_is_left_alone(sources: Sources, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(PackedFolderError, match=r"did not write: thesis\.tex"):
        pack(sources(MINI), lowered(MINI, 1), tmp_path)
    with pytest.raises(PackedFolderError, match="is a file"):
        pack(sources(MINI), lowered(MINI, 1), tmp_path / "thesis.tex")
    (tmp_path / JOURNAL).write_text("[1, 2]\n")
    with pytest.raises(PackedFolderError, match=r"did not write: thesis\.tex"):
        pack(sources(MINI), lowered(MINI, 1), tmp_path)
    (tmp_path / "thesis.tex").unlink()
    assert pack(sources(MINI), lowered(MINI, 1), tmp_path).continued_bytes == 0


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_folder_without_a_manifest_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(PackedFolderError, match=f"{MANIFEST}"):
        load_packed(tmp_path, lowered(MINI, 1))


# Damage.


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def with_another_header(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"tape"', b'"TAPE"', 1))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Path.unlink, "cannot be read"),
        (shorter, "bytes and had"),
        (with_another_header, "has another header"),
    ],
)
def test_a_damaged_file_is_found_when_it_is_opened(
    sources: Sources, tmp_path: Path, change: Callable[[Path], None], said: str
) -> None:
    pack(sources(MINI), lowered(MINI, 2), tmp_path / "out")
    change(tmp_path / "out" / rank_file(1))
    with pytest.raises(PackedDamagedError, match=f"{rank_file(1)}: .*{said}"):
        load_packed(tmp_path / "out", lowered(MINI, 2))


def test_a_single_flipped_bit_is_found_when_it_is_verified(
    sources: Sources, tmp_path: Path
) -> None:
    plan = lowered(MINI, 2)
    pack(sources(MINI), plan, tmp_path / "out")
    for file in pack_layout(plan).files:
        for name, tensor in file.tensors.items():
            path = tmp_path / "out" / file.name
            contents = path.read_bytes()
            at = tensor.start + 77
            path.write_bytes(contents[:at] + bytes([contents[at] ^ 4]) + contents[at + 1 :])
            with pytest.raises(PackedDamagedError, match=f"{file.name}: the checksum of") as raised:
                load_packed(tmp_path / "out", plan).verify()
            assert name == "tape" or name in str(raised.value)
            path.write_bytes(contents)
    load_packed(tmp_path / "out", plan).verify()
