"""Commands on checkpoints that are damaged or do not fit, a drafter's too: before anything runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.numpy import save_file
from typer.testing import CliRunner

from mkc.cli.main import app
from mkc.errors import CheckpointMismatchError
from mkc.errors import MkcError
from mkc.errors import PromptLengthError
from mkc.errors import SafetensorsError
from mkc.errors import TokenizerVocabularyError
from mkc.runtime.checkpoint import SINGLE
from tests.goldens import golden_case
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.text.checkpoints import byte_level_checkpoint

TINY = Path(__file__).parents[2] / "models" / "tiny"  # brings a drafter
NAME = "qwen38_mini"
NORM = "model.language_model.norm.weight"


def truncate(folder: Path) -> None:
    os.truncate(folder / SINGLE, 100_000)


def retype(folder: Path) -> None:
    stored: dict[str, Any] = dict(golden_case(NAME).weights())
    stored[NORM] = stored[NORM].astype(np.float32).astype(np.int32)
    write_checkpoint(folder, NAME, weights=stored)
    byte_level_checkpoint(folder)


def add_token(folder: Path, *, place: int | None = None) -> None:
    """A token at an id, by default behind the last row of the embedding."""
    file = folder / "tokenizer.json"
    description = json.loads(file.read_text())
    vocab = golden_case(NAME).meta["config"]["text_config"]["vocab_size"]
    description["added_tokens"].append(
        {
            "id": vocab if place is None else place,
            "content": "<|new|>",
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
            "normalized": False,
        }
    )
    file.write_text(json.dumps(description))


INTERPRET = ["--backend", "interpret"]


@pytest.mark.parametrize(
    "command",
    [["run", "-p", "a", "--weights"], ["chat"], ["run", "-p", "a", *INTERPRET, "--weights"]],
    ids=["run", "chat", "interpret"],
)
@pytest.mark.parametrize(
    ("damage", "error", "fragments"),
    [
        (truncate, SafetensorsError, (SINGLE, "is truncated", "100000 bytes")),
        (retype, CheckpointMismatchError, (f"wrong type: {NORM} is I32[256]", "bf16[256]")),
        (add_token, TokenizerVocabularyError, ("<|new|>", "1024")),
    ],
    ids=["truncated", "wrong type", "another tokenizer"],
)
def test_a_bad_checkpoint_is_refused(
    command: list[str],
    damage: Callable[[Path], None],
    error: type[MkcError],
    fragments: tuple[str, ...],
    tmp_path: Path,
) -> None:
    folder = write_checkpoint(tmp_path / "model", NAME)
    byte_level_checkpoint(folder)
    damage(folder)
    result = CliRunner().invoke(app, [*command, str(folder), "--context", "64"], input="hello\n")
    assert isinstance(result.exception, error), result.exception
    for fragment in fragments:
        assert fragment in result.exception.message
    assert result.stdout == ""


# A model and the drafter that it brings, one of them damaged.

PACK = ["pack", "qwen38", "--tp", "1", "--spec", "dflash2", "--out", "packed", "--weights"]
PAIR_COMMANDS = {
    "reference": ["run", "-p", "a", "--context", "64", "--weights"],
    "on the fly": ["run", "-p", "a", "--context", "64", *INTERPRET, "--weights"],
    "pack": PACK,
}


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1000)


def lie_about_the_header(file: Path) -> None:
    contents = file.read_bytes()
    file.write_bytes((1 << 62).to_bytes(8, "little") + contents[8:])


def change(file: Path, edit: Callable[[Any], Any]) -> None:
    """Rewrites the last norm of a file; None removes it."""
    stored = dict(load_file(file))
    name = max(one for one in stored if one.endswith("norm.weight"))
    edited = edit(np.array(stored.pop(name)))
    if edited is not None:
        stored[name] = edited
    save_file(stored, file)


def with_a_nan(values: Any) -> Any:
    values[3] = np.nan
    return values


@pytest.mark.parametrize("command", PAIR_COMMANDS.values(), ids=PAIR_COMMANDS)
@pytest.mark.parametrize("part", ["", "drafter"], ids=["target", "drafter"])
@pytest.mark.parametrize(
    ("damage", "error", "said"),
    [
        (cut, SafetensorsError, "is truncated"),
        (lie_about_the_header, SafetensorsError, "do not hold a header"),
        (lambda file: file.write_bytes(b""), SafetensorsError, "0 bytes do not hold a header"),
        (lambda file: change(file, lambda one: None), CheckpointMismatchError, "missing: "),
        (
            lambda file: change(file, lambda one: one[:-1].copy()),
            CheckpointMismatchError,
            "norm.weight is BF16[127], expected bf16[128]",
        ),
        (
            lambda file: change(file, lambda one: one.astype(np.float32).astype(np.float16)),
            CheckpointMismatchError,
            "norm.weight is F16[128], expected bf16[128]",
        ),
    ],
    ids=["cut", "header", "empty", "missing", "shape", "type"],
)
def test_a_bad_part_of_a_pair_is_refused(
    command: list[str],
    part: str,
    damage: Callable[[Path], None],
    error: type[MkcError],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copytree(TINY, tmp_path / "model")
    damage(folder / part / SINGLE)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*command, str(folder)])
    assert isinstance(result.exception, error), result.exception
    assert said in result.exception.message
    assert str(folder / part) in result.exception.message
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize(
    ("part", "name"),
    [("", "model.language_model.norm.weight"), ("drafter", "draft.norm.weight")],
    ids=["target", "drafter"],
)
def test_packing_names_tensors_that_are_not_finite(
    part: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copytree(TINY, tmp_path / "model")
    change(folder / part / SINGLE, with_a_nan)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*PACK, str(folder)])
    assert result.exit_code == 0, result.exception
    assert result.stderr == f"warning: tensor '{name}' has a NaN or an infinity\n"


def test_a_tokenizer_with_holes_or_of_a_smaller_model_is_doubted(tmp_path: Path) -> None:
    """Both are said, and the command goes on: here to a prompt that is too long."""
    folder = write_checkpoint(tmp_path / "model", NAME)
    byte_level_checkpoint(folder)
    add_token(folder, place=500)
    result = CliRunner().invoke(
        app, ["run", "-p", "a" * 99, "--raw", "--context", "64", "--weights", str(folder)]
    )
    assert isinstance(result.exception, PromptLengthError)
    said = "warning: 93 ids between others have no token: 407..499; should the model"
    assert said in result.stderr
    assert "warning: the tokenizer has 408 tokens, the model 1024: is it" in result.stderr
