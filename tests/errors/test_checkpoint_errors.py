"""Checkpoints and packed folders that cannot be used, as `mkc pack` reports them."""

from __future__ import annotations

import os
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants

from mkc.errors import CheckpointError
from mkc.errors import CheckpointMismatchError
from mkc.errors import DiskFullError
from mkc.errors import PackedDamagedError
from mkc.errors import PackedFolderError
from mkc.errors import PackedMismatchError
from mkc.errors import SafetensorsError
from mkc.errors import TensorDifference
from mkc.runtime import container
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import pack
from mkc.runtime.layout import rank_file
from tests.errors.command import Command
from tests.errors.expect import refused
from tests.goldens import golden_case
from tests.passes.lowering import lowered
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.text.checkpoints import byte_level_checkpoint

NAME = "qwen38_mini"
ARGV = "pack qwen38 --weights weights --tp 2 --out packed"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A checkpoint in the folder `weights` of the working directory."""
    return write_checkpoint(tmp_path / "weights", NAME)


@pytest.fixture
def packed(weights: Path, tmp_path: Path) -> Path:
    """The same, packed for two ranks in the folder `packed`."""
    pack(Checkpoint.open(weights), lowered(NAME, 2), tmp_path / "packed")
    return tmp_path / "packed"


def test_no_such_checkpoint(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    command.refused(
        CheckpointError,
        "checkpoint owner/nothing: is no folder",
        "Correct the path",
        argv="pack qwen38 --weights owner/nothing --out packed",
    )


def test_a_checkpoint_without_safetensors(command: Command, weights: Path) -> None:
    (weights / SINGLE).rename(weights / "model.bin")
    command.refused(
        CheckpointError,
        "has no safetensors files, only pickled weights, which mkc never opens",
        "convert the weights to safetensors",
        argv=ARGV,
    )


def test_a_truncated_download(command: Command, weights: Path) -> None:
    os.truncate(weights / SINGLE, 100_000)
    command.refused(
        SafetensorsError,
        f"weights/{SINGLE}: is truncated: it has 100000 bytes and its header describes",
        "Get the file again",
        argv=ARGV,
    )


def test_a_checkpoint_of_another_model(command: Command, weights: Path) -> None:
    """Everything that differs is listed, and nothing was written."""
    stored: dict[str, Any] = dict(golden_case(NAME).weights())
    del stored["lm_head.weight"]
    stored["model.language_model.norm.weight"] = np.zeros(7, np.int32)
    rmtree(weights)
    write_checkpoint(weights, NAME, weights=stored)
    command.refused(
        CheckpointMismatchError,
        "does not fit model 'qwen38'; all differences (3)",
        "missing: lm_head.weight, expected bf16[1024, 256]",
        "wrong shape: model.language_model.norm.weight is I32[7], expected bf16[256]",
        "wrong type: model.language_model.norm.weight is I32[7], expected bf16[256]",
        argv=ARGV,
    )


def test_tensors_under_other_names(command: Command, weights: Path) -> None:
    """What the checkpoint has instead is said too: by name, or by prefix where it is a lot."""
    stored: dict[str, Any] = dict(golden_case(NAME).weights())
    stored["head.weight"] = stored.pop("lm_head.weight")
    stored["model.norm.weight"] = stored.pop("model.language_model.norm.weight")
    rmtree(weights)
    write_checkpoint(weights, NAME, weights=stored)
    said = "\n  not named by the model: head.weight, model.norm.weight\n"
    command.refused(CheckpointMismatchError, "all differences (2)", said, argv=ARGV)
    renamed = {name.replace("language_model.", ""): one for name, one in stored.items()}
    write_checkpoint(weights, NAME, weights=renamed)
    layers = [one for one in renamed if one.startswith("model.layers.")]
    said = (
        "\n  not named by the model: head.weight, model.embed_tokens.weight, "
        f"model.layers.* ({len(layers)}), model.norm.weight\n"
    )
    command.refused(CheckpointMismatchError, said, argv=ARGV)
    with refused(CheckpointMismatchError, "not named by the model: 9 tensors, such as a0, a1, a2"):
        raise CheckpointMismatchError(
            name="c",
            model="m",
            differences=[TensorDifference("missing", "b")],
            extra=[f"a{n}" for n in range(9)],
        )


def test_differences_that_are_alike_share_a_line(command: Command, weights: Path) -> None:
    """The list is complete: what is absent in one layer only is not hidden among the others."""
    stored = {
        name: one
        for name, one in golden_case(NAME).weights().items()
        if not name.endswith("input_layernorm.weight") and ".layers.5." not in name
    }
    rmtree(weights)
    write_checkpoint(weights, NAME, weights=stored)
    printed = command.refused(CheckpointMismatchError, argv=ARGV)
    lines = [one.strip() for one in printed.splitlines() if ".layers." in one]
    layers = "missing: model.language_model.layers"
    assert f"{layers}.{{0..7}}.input_layernorm.weight (8 tensors), expected bf16[256]" in lines
    assert sum(one.startswith(f"{layers}.5.") for one in lines) == len(lines) - 1 > 5


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.50 KiB"),
        (20 << 20, "20.00 MiB"),
        (5 << 30, "5.00 GiB"),
    ],
)
def test_sizes_are_said_in_units_that_fit(count: int, said: str) -> None:
    with refused(DiskFullError, f"expected room for {said} more, it has {said}."):
        raise DiskFullError(path="packed", needed_bytes=count, free_bytes=count)


def test_an_extra_tensor_when_none_is_allowed(command: Command, weights: Path) -> None:
    stored = {**golden_case(NAME).weights(), "mtp.weight": np.zeros(7, np.float32)}
    write_checkpoint(weights, NAME, weights=stored)
    command.refused(CheckpointMismatchError, "extra: mtp.weight", argv=f"{ARGV} --strict")


def test_an_output_folder_with_other_files(command: Command, weights: Path) -> None:
    weights.with_name("packed").mkdir()
    (weights.with_name("packed") / "thesis.tex").write_text("mine")
    command.refused(
        PackedFolderError,
        "packed folder packed: holds files mkc pack did not write: thesis.tex",
        "--out",
        argv=ARGV,
    )


def test_an_output_folder_that_was_packed_for_other_ranks(command: Command, packed: Path) -> None:
    command.refused(
        PackedMismatchError,
        "'ranks' is 2; expected 1",
        "Pack again into another folder",
        argv=ARGV.replace("--tp 2", "--tp 1"),
    )


def test_other_weights_than_those_that_were_packed(command: Command, tmp_path: Path) -> None:
    """The kernel does not run the weights of one checkpoint under the name of another."""
    first = Checkpoint.open(write_checkpoint(tmp_path / "first", NAME))
    pack(first, lowered(NAME, 1), tmp_path / "packed")
    norm = "model.language_model.norm.weight"
    stored: dict[str, Any] = dict(golden_case(NAME).weights())
    stored[norm] = stored[norm] + stored[norm].dtype.type(1)
    byte_level_checkpoint(write_checkpoint(tmp_path / "second", NAME, weights=stored))
    said = "'contents_sha256' of entry 1 of 'sources' is '"
    pack_argv = "pack qwen38 --tp 1 --weights second --out packed"
    command.refused(PackedMismatchError, said, argv=pack_argv)
    run_argv = "run -p hi --quiet --backend interpret --packed packed --weights second --context 64"
    command.refused(PackedMismatchError, said, argv=run_argv)


def test_a_packed_folder_that_was_damaged(command: Command, packed: Path) -> None:
    path = packed / rank_file(1)
    contents = bytearray(path.read_bytes())
    contents[-5000] ^= 1
    path.write_bytes(contents)
    command.refused(
        PackedDamagedError,
        f"packed/{rank_file(1)}: the checksum of",
        "Remove the folder and pack again",
        argv=f"{ARGV} --verify --quiet",
    )


def test_a_disk_without_room(
    command: Command, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Nothing:
        free = 0

    (weights.with_name("packed")).mkdir()
    (weights.with_name("packed") / container.JOURNAL).touch()
    monkeypatch.setattr(container.shutil, "disk_usage", lambda path: Nothing)
    command.refused(
        DiskFullError,
        "packed folder packed: the disk is full; expected room for 17.",
        " MiB more, it has 0 bytes. ",
        "run the same command again",
        argv=ARGV,
    )
