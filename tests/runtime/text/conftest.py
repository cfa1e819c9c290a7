"""Fixtures of this folder: one checkpoint of each kind, loaded once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Pipeline

from mkc.runtime.text import Chat
from mkc.runtime.text import Tokenizer
from mkc.runtime.text import load_chat
from mkc.runtime.text import load_tokenizer
from tests.runtime.text.checkpoints import byte_level_checkpoint
from tests.runtime.text.checkpoints import ranked_checkpoint


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte_level")
    byte_level_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def ranked_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranked")
    ranked_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def pipeline(byte_level_folder: Path) -> Pipeline:
    """The tokenizer as the `tokenizers` package itself runs it."""
    return Pipeline.from_file(str(byte_level_folder / "tokenizer.json"))


@pytest.fixture(scope="session")
def byte_level(byte_level_folder: Path) -> Tokenizer:
    return load_tokenizer(byte_level_folder)


@pytest.fixture(scope="session")
def ranked(ranked_folder: Path) -> Tokenizer:
    return load_tokenizer(ranked_folder)


@pytest.fixture(scope="session", params=["byte_level", "ranked"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Either kind."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


@pytest.fixture(scope="session")
def template_chat(byte_level_folder: Path, byte_level: Tokenizer) -> Chat:
    return load_chat(byte_level_folder, byte_level)


@pytest.fixture(scope="session")
def channel_chat(ranked_folder: Path, ranked: Tokenizer) -> Chat:
    return load_chat(ranked_folder, ranked)
