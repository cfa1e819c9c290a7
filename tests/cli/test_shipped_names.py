"""Names of the checkpoints that come with mkc."""

from __future__ import annotations

from pathlib import Path

import pytest

from mkc.cli.serve import names_of
from mkc.cli.shipped import SHIPPED
from mkc.cli.shipped import checkpoint_named


@pytest.mark.parametrize("name", SHIPPED)
def test_a_name_is_a_folder_with_a_model(name: str) -> None:
    folder = Path(checkpoint_named(name))
    assert (folder / "config.json").is_file()
    assert (folder / "model.safetensors").is_file()
    assert names_of(None, name) == [name]


def test_the_default_is_the_small_model() -> None:
    assert checkpoint_named(None) == checkpoint_named("tiny")


def test_other_names_are_left_alone() -> None:
    assert checkpoint_named("owner/kimi-tiny") == "owner/kimi-tiny"


def test_a_folder_of_the_user_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kimi-tiny").mkdir()
    (tmp_path / "tiny").mkdir()
    assert checkpoint_named("kimi-tiny") == "kimi-tiny"
    assert Path(checkpoint_named(None)).is_absolute(), "nobody named the folder"
