"""Checkpoints of the hub at a revision, a drafter's too; nothing goes over the network."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from mkc.cli.main import app
from mkc.errors import CheckpointError
from mkc.runtime.manifest import MANIFEST

TINY = Path(__file__).parents[2] / "models" / "tiny"
PACK = ["pack", "qwen38", "--tp", "1", "--out", "packed"]
PAIR = ["--weights", "owner/model@v2", "--spec", "dflash2"]


def test_both_of_a_pair_may_be_pinned_to_a_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two commits each in the hub's cache, offline, those that are named are packed."""
    commits = {"model": ("1" * 40, "2" * 40), "drafts": ("3" * 40, "4" * 40)}
    for name, source in (("model", TINY), ("drafts", TINY / "drafter")):
        for commit in commits[name]:
            copytree(source, tmp_path / f"hub/models--owner--{name}/snapshots" / commit)
        refs = tmp_path / f"hub/models--owner--{name}/refs"
        refs.mkdir()
        (refs / "main").write_text(commits[name][0])
        (refs / "v2").write_text(commits[name][1])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    draft = ["--draft", f"owner/drafts@{commits['drafts'][1]}"]
    result = CliRunner().invoke(app, [*PACK, *PAIR, *draft])
    assert result.exit_code == 0, result.exception
    manifest = json.loads((tmp_path / "packed" / MANIFEST).read_text())
    assert manifest["revision"] == f"{'2' * 40} {'4' * 40}"
    draft[1] = "owner/drafts@v3"
    result = CliRunner().invoke(app, ["run", "-p", "a", *PAIR, *draft])
    assert isinstance(result.exception, CheckpointError)
    assert "owner/drafts: " in result.exception.message
    assert "revision 'v3'" in result.exception.message
