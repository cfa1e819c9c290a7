"""Packed folders: the same operands as packing in memory, streamed, resumable, checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors import safe_open

from mkc.errors import DiskFullError
from mkc.errors import PackedDamagedError
from mkc.errors import PackedFolderError
from mkc.errors import PackedMismatchError
from mkc.passes.pipeline import Lowered
from mkc.runtime import container
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import load_packed
from mkc.runtime.container import pack
from mkc.runtime.journal import open_journal
from mkc.runtime.layout import SHARED
from mkc.runtime.layout import pack_layout
from mkc.runtime.layout import rank_file
from mkc.runtime.manifest import JOURNAL
from mkc.runtime.manifest import MANIFEST
from mkc.runtime.pack import Packer
from tests.errors.small_model import Sizes
from tests.errors.small_model import compile_small
from tests.generate_weights import weights
from tests.goldens import golden_case
from tests.passes.lowering import golden_graph
from tests.passes.lowering import lower
from tests.passes.lowering import lowered
from tests.runtime.checkpoints import Forms
from tests.runtime.checkpoints import Weights
from tests.runtime.checkpoints import write_checkpoint

MINI = "qwen38_mini"
LANE = "qwen38_lane"
NORM = "model.language_model.norm.weight"
HEAD = "lm_head.weight"
TABLE = "model.language_model.embed_tokens.weight"
ROOT = Path(__file__).parents[2]


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Golden checkpoints, written once."""

    @cache
    def opened(name: str) -> Checkpoint:
        return Checkpoint.open(write_checkpoint(tmp_path_factory.mktemp(name), name))

    return opened


type Sources = Callable[[str], Checkpoint]


def check_operands(folder: Path, plan: Lowered, stored: Weights) -> None:
    """Every operand of every rank has the bytes that packing in memory gives."""
    packed = load_packed(folder, plan)
    packer = Packer(
        program=plan.program, sharded=plan.steps.sharded, load=lambda name: stored[name]
    )
    roles = {one.name: one.role for one in plan.program.operands}
    expected = {name for name, role in roles.items() if role in ("tape", "page", "narrow", "table")}
    assert set(packed.operands) == expected
    for name in packed.operands:
        parts = packed.operand(name)
        assert len(parts) == (1 if roles[name] == "table" else plan.program.ranks)
        for rank, part in enumerate(parts):
            operand = packer.operand(name, rank)
            assert (part.dtype, part.shape) == (operand.dtype, operand.shape)
            assert part.tobytes() == operand.tobytes(), f"{name}, rank {rank}"


def digests(folder: Path) -> dict[str, str]:
    """Every file and its contents."""
    return {one.name: sha256(one.read_bytes()).hexdigest() for one in sorted(folder.iterdir())}


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
    """Rows of one head fill no whole block here; what two blocks share is read for both."""
    read: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(preadv(descriptor, buffers, offset))
        return read[-1]

    checkpoint = sources(LANE)
    stored = sum(one.bytes for one in checkpoint.tensors.values())
    plans = {ranks: lowered(LANE, ranks) for ranks in (1, 8)}
    monkeypatch.setattr(os, "preadv", counted)
    pack(checkpoint, plans[1], tmp_path / "one")
    assert sum(read) == stored
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


def test_one_folder_serves_every_batch_context_and_ring(sources: Sources, tmp_path: Path) -> None:
    pack(sources(MINI), lowered(MINI, 2), tmp_path / "out")
    case = golden_case(MINI)
    others = [
        lower(case.graph(batch=8), 2),
        lower(case.graph(context=64), 2),
        lower(case.graph(), 2, "tile{load_bytes=65536}"),
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


# Ends of all kinds, and what follows.


def killing(after: int) -> Callable[[int], None]:
    """A progress that ends the packing when its n-th block has been written."""
    left = [after]

    def progress(count: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    return progress


def block_count(plan: Lowered) -> int:
    return sum(one.blocks for one in pack_layout(plan).pieces)


def test_a_kill_after_any_block_is_continued_to_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small model in small pieces: some blocks lie within a piece, some at its border."""
    monkeypatch.setattr("mkc.runtime.layout.PIECE_BYTES", 1 << 18)
    monkeypatch.setattr("mkc.runtime.layout.TABLE_BLOCK_BYTES", 1 << 17)
    plan = compile_small(Sizes(mlp=1024, vocab=2048), tp=2).lowered
    small = weights(plan.steps.sharded.full, seed=1)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "source", MINI, weights=small))
    pack(checkpoint, plan, tmp_path / "whole")
    expected = digests(tmp_path / "whole")
    blocks = block_count(plan)
    assert blocks > len(pack_layout(plan).pieces) > 10
    continued = set()
    for after in range(1, blocks + 1):
        folder = tmp_path / f"killed-{after}"
        with pytest.raises(Killed):
            pack(checkpoint, plan, folder, progress=killing(after), workers=1)
        with pytest.raises(PackedFolderError, match="is not finished"):
            load_packed(folder, plan)
        continued.add(pack(checkpoint, plan, folder).continued_bytes)
        assert digests(folder) == expected
    assert len(continued) > 5, "work that was finished is not done again"


def test_a_folder_that_is_killed_again_and_again_gets_finished(
    sources: Sources, tmp_path: Path
) -> None:
    plan = lowered(LANE, 2)
    checkpoint = sources(LANE)
    pack(checkpoint, plan, tmp_path / "whole")
    kills = 0
    while not (tmp_path / "out" / MANIFEST).exists():
        journal = tmp_path / "out" / JOURNAL
        there = len(journal.read_bytes().splitlines()) - 1 if journal.exists() else 0
        try:
            pack(checkpoint, plan, tmp_path / "out", progress=killing(there + 15), workers=2)
        except Killed:
            kills += 1
    assert kills > 2
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


KILLED_PROCESS = """
import os, signal, sys
from pathlib import Path
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import pack
from tests.passes.lowering import lowered
left = [30]
def progress(count):
    left[0] -= 1
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
pack(Checkpoint.open(sys.argv[1]), lowered("qwen38_lane", 2), Path(sys.argv[2]), progress=progress)
"""


def test_a_process_that_is_killed_leaves_a_folder_to_continue(
    sources: Sources, tmp_path: Path
) -> None:
    checkpoint = sources(LANE)
    plan = lowered(LANE, 2)
    arguments = [sys.executable, "-c", KILLED_PROCESS, checkpoint.folder, tmp_path / "out"]
    ended = subprocess.run(arguments, cwd=ROOT, check=False)
    assert ended.returncode == -9
    result = pack(checkpoint, plan, tmp_path / "out")
    assert 0 < result.continued_bytes < result.bytes
    pack(checkpoint, plan, tmp_path / "whole")
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.fixture
def killed(sources: Sources, tmp_path: Path) -> Path:
    """A folder of LANE on two ranks, killed halfway."""
    plan = lowered(LANE, 2)
    with pytest.raises(Killed):
        after = block_count(plan) // 2
        pack(sources(LANE), plan, tmp_path / "killed", progress=killing(after), workers=1)
    return tmp_path / "killed"


def check_continued(sources: Sources, folder: Path) -> int:
    """The folder is continued to the right end; returns the bytes that were kept."""
    plan = lowered(LANE, 2)
    result = pack(sources(LANE), plan, folder)
    whole = folder.with_name("whole")
    if not whole.exists():
        pack(sources(LANE), plan, whole)
    assert digests(folder) == digests(whole)
    return result.continued_bytes


def test_a_torn_line_of_the_journal_is_forgotten(
    sources: Sources, killed: Path, tmp_path: Path
) -> None:
    text = (killed / JOURNAL).read_bytes()
    kept = []
    # the end of the last line, within it, within earlier ones, within the first, and nothing
    for length in (len(text) - 1, len(text) - 20, len(text) // 2, 100, 0):
        folder = copytree(killed, tmp_path / f"torn-{length}")
        (folder / JOURNAL).write_bytes(text[:length])
        kept.append(check_continued(sources, folder))
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 0
    assert kept[-1] == 0


def test_a_finished_piece_that_did_not_reach_the_disk_is_written_again(
    sources: Sources, killed: Path
) -> None:
    untouched = check_continued(sources, copytree(killed, killed.with_name("untouched")))
    path = killed / rank_file(1)
    start = len(pack_layout(lowered(LANE, 2)).ranks[1].header)
    with path.open("r+b") as file:
        file.seek(start + 1000)
        file.write(bytes(4096))
    assert 0 < check_continued(sources, killed) < untouched


def test_a_kill_before_the_journal_is_removed_leaves_a_finished_folder(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(path: Path, missing_ok: bool = False) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "unlink", kill)
        pack(sources(MINI), lowered(MINI, 2), tmp_path / "out")
    check_operands(tmp_path / "out", lowered(MINI, 2), golden_case(MINI).weights())
    result = pack(sources(MINI), lowered(MINI, 2), tmp_path / "out")
    assert result.continued_bytes == result.bytes
    assert not (tmp_path / "out" / JOURNAL).exists()


def test_a_source_that_changed_meanwhile_is_not_mixed_in(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", LANE)
    plan = lowered(LANE, 2)
    with pytest.raises(Killed):
        pack(Checkpoint.open(source), plan, tmp_path / "out", progress=killing(20))
    os.utime(source / SINGLE, ns=(0, 1))
    with pytest.raises(PackedMismatchError, match="entry 1 of 'source_times' is .*; expected 1"):
        pack(Checkpoint.open(source), plan, tmp_path / "out")


def test_two_processes_do_not_pack_into_one_folder(sources: Sources, killed: Path) -> None:
    identity = json.loads((killed / JOURNAL).read_bytes().splitlines()[0])
    with open_journal(killed, identity), pytest.raises(PackedFolderError, match="another process"):
        pack(sources(LANE), lowered(LANE, 2), killed)


# A full disk.


@pytest.mark.parametrize("written", [0, 100_000, 7_000_000, 20_000_000])
def test_a_disk_that_gets_full_is_one_error_and_the_rest_is_written_later(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """The last write before the disk is full is a short one, as the system does it."""
    room = [written]
    pwrite = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if room[0] == 0:
            raise OSError(28, "No space left on device")
        count = pwrite(descriptor, data[: room[0]], offset)
        room[0] -= count
        return count

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(DiskFullError, match="continues where it stopped"):
            pack(sources(LANE), lowered(LANE, 2), tmp_path / "out")
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert (check_continued(sources, tmp_path / "out") > 0) == (written > 1_000_000)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = replace_free(3 << 20)
    monkeypatch.setattr(container.shutil, "disk_usage", usage)
    with pytest.raises(DiskFullError, match=r"expected room for 0.02 GiB more, it has 0.00 GiB"):
        pack(sources(LANE), lowered(LANE, 2), tmp_path / "out")
    assert [one.name for one in (tmp_path / "out").iterdir()] == [JOURNAL]


def replace_free(free: int) -> Callable[[Path], Any]:
    """`disk_usage` of a disk with so many free bytes."""

    class Usage:
        def __init__(self, path: Path) -> None:
            self.free = free

    return Usage


def test_a_flush_that_fails_is_an_error(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems say only then that the disk is full."""

    def failing(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing)
        with pytest.raises(DiskFullError):
            pack(sources(LANE), lowered(LANE, 2), tmp_path / "out")
    check_continued(sources, tmp_path / "out")


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
        ("version", 2, "'version' is 2; expected 1"),
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
