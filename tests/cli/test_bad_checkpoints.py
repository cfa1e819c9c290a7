"""`mkc run` and `mkc chat` on checkpoints that are damaged or do not fit: before anything runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from mkc.cli.main import app
from mkc.errors import CheckpointMismatchError
from mkc.errors import MkcError
from mkc.errors import SafetensorsError
from mkc.errors import TokenizerVocabularyError
from mkc.runtime.checkpoint import SINGLE
from tests.goldens import golden_case
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.text.checkpoints import byte_level_checkpoint

NAME = "qwen38_mini"
NORM = "model.language_model.norm.weight"


def truncate(folder: Path) -> None:
    os.truncate(folder / SINGLE, 100_000)


def retype(folder: Path) -> None:
    stored: dict[str, Any] = dict(golden_case(NAME).weights())
    stored[NORM] = stored[NORM].astype(np.float32).astype(np.int32)
    write_checkpoint(folder, NAME, weights=stored)
    byte_level_checkpoint(folder)


def add_token(folder: Path) -> None:
    file = folder / "tokenizer.json"
    description = json.loads(file.read_text())
    vocab = golden_case(NAME).meta["config"]["text_config"]["vocab_size"]
    description["added_tokens"].append(
        {
            "id": vocab,
            "content": "<|new|>",
            "special": True,
            "lstrip": False,
            "rstrip": False,
            "single_word": False,
            "normalized": False,
        }
    )
    file.write_text(json.dumps(description))


@pytest.mark.parametrize(
    "command", [["run", "-p", "a", "--weights"], ["chat"]], ids=["run", "chat"]
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
