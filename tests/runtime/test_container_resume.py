"""Packing that is killed or runs out of disk, and what the next call makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import copytree
from threading import Lock
from typing import Any

import pytest

from mkc.errors import DiskFullError
from mkc.errors import PackedFolderError
from mkc.errors import PackedMismatchError
from mkc.passes.pipeline import Lowered
from mkc.runtime import container
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import load_packed
from mkc.runtime.container import pack
from mkc.runtime.journal import open_journal
from mkc.runtime.layout import pack_layout
from mkc.runtime.layout import rank_file
from mkc.runtime.manifest import JOURNAL
from mkc.runtime.manifest import MANIFEST
from tests.errors.small_model import Sizes
from tests.errors.small_model import compile_small
from tests.generate_weights import weights
from tests.goldens import golden_case
from tests.passes.lowering import lowered
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.packed import check_operands
from tests.runtime.packed import digests

MINI = "qwen38_mini"
LANE = "qwen38_lane"
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
    checkpoint, plan = sources(MINI), lowered(MINI, 2)

    def kill(path: Path, missing_ok: bool = False) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "unlink", kill)
        pack(checkpoint, plan, tmp_path / "out")
    check_operands(tmp_path / "out", plan, golden_case(MINI).weights())
    result = pack(checkpoint, plan, tmp_path / "out")
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
    lock = Lock()
    pwrite = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        with lock:
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
    with pytest.raises(DiskFullError, match=r"room for 2\d\.\d\d MiB more, it has 3.00 MiB"):
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


def test_a_system_that_writes_nothing_is_not_asked_for_ever(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, plan = sources(LANE), lowered(LANE, 2)
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: 0)
    with pytest.raises(DiskFullError):
        pack(checkpoint, plan, tmp_path / "out")
