"""`mkc pack` as a user sees it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mkc.cli.main import main
from mkc.runtime.checkpoint import CONFIG
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.container import load_packed
from mkc.runtime.layout import rank_file
from mkc.runtime.manifest import drafter_identity
from tests.draft_goldens import draft_case
from tests.draft_goldens import draft_weights
from tests.goldens import golden_case
from tests.passes.lowering import lowered
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.rounds_backends import lowered_round

NAME = "qwen38_mini"

type Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*arguments)` is `mkc pack qwen38 ARGUMENTS`; returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["mkc", "pack", "qwen38", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert not ended.value.code, printed.err
        return printed.out, printed.err

    return command


def test_a_checkpoint_is_packed_with_its_own_config(run: Run, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "weights", NAME)
    out, err = run("--weights", "weights", "--tp", "2", "--out", "packed", "--verify")
    assert out == "packed: 0.02 GB for 2 ranks\n"
    assert err == ""
    packed = load_packed(tmp_path / "packed", lowered(NAME, 2))
    assert len(packed.operand("tape")) == 2
    out, _ = run("--weights", "weights", "--tp", "2", "--out", "packed")
    assert "it was finished already" in out


def test_what_was_left_out_converted_or_broken_is_said(run: Run, tmp_path: Path) -> None:
    stored: dict[str, Any] = dict(golden_case(NAME).weights())
    norm = "model.language_model.norm.weight"
    stored[norm] = np.full(256, np.nan, np.float32)
    stored["mtp.fc.weight"] = np.zeros(3, np.float32)
    write_checkpoint(tmp_path / "weights", NAME, weights=stored)
    out, err = run("--weights", "weights", "--tp", "1", "--out", "packed")
    assert "converted: 1 tensors" in out
    assert "left out: 1 tensors" in out
    assert err == f"warning: tensor '{norm}' has a NaN or an infinity\n"


def test_all_devices_of_the_topology_are_the_default(run: Run, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "weights", NAME)
    out, _ = run("--weights", "weights", "--out", "packed", "--target", "v6e:2x2", "--quiet")
    assert out == ""
    files = sorted(one.name for one in (tmp_path / "packed").glob("rank-*"))
    assert files == [rank_file(rank) for rank in range(4)]


def test_a_drafter_is_packed_with_its_target(run: Run, tmp_path: Path) -> None:
    """From two folders into one; the same command finishes it only once."""
    write_checkpoint(tmp_path / "weights", NAME)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / CONFIG).write_text(json.dumps(draft_case().meta["config"]))
    save_file(draft_weights(), tmp_path / "draft" / SINGLE)
    options = ["--weights", "weights", "--spec", "dflash2", "--tp", "2", "--out", "packed"]
    out, err = run(*options, "--draft", "draft", "--verify")
    assert out == "packed: 0.02 GB for 2 ranks\n"
    assert err == ""
    identity = drafter_identity("dflash2", draft_case().meta["config"])
    plan = lowered_round(NAME, ranks=2, batch=2)
    load_packed(tmp_path / "packed", plan, identity).verify()
    (tmp_path / "weights" / "drafter").symlink_to(tmp_path / "draft")
    out, _ = run(*options)
    assert "it was finished already" in out, "the drafter in the model's folder is the same one"
    out, _ = run("--weights", "weights", "--draft", "draft", "--tp", "2", "--out", "packed")
    assert "it was finished already" in out, "the drafter's config says its scheme"
