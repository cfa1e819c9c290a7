"""What the tests of several commands need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.text.checkpoints import byte_level_checkpoint


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A golden model with a byte-level tokenizer of 400 tokens."""
    found = write_checkpoint(tmp_path_factory.mktemp("cli") / "model", "qwen38_lane")
    byte_level_checkpoint(found)
    return found


@pytest.fixture(autouse=True)
def own_compilation_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
