"""Servers that several tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mkc.cli.generation import BackendChoice
from mkc.cli.generation import ModelChoice
from mkc.cli.generation import open_session
from mkc.cli.serve import served
from tests.runtime.fake_backend import FakeBackend
from tests.runtime.text.checkpoints import byte_level_checkpoint
from tests.serve.running import Running
from tests.serve.running import fake_model
from tests.serve.running import opening
from tests.serve.running import running

TINY_CONTEXT = 256
TINY_ROWS = 4


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a chat template, without a model."""
    folder = tmp_path_factory.mktemp("text")
    byte_level_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def fake(checkpoint: Path) -> Iterator[Running]:
    """A server whose backend makes tokens up: fast, and a function of the prompt."""
    model = fake_model(checkpoint, FakeBackend(batch=4, context=128))
    with running(opening(model)) as server:
        yield server


@pytest.fixture(scope="session")
def tiny() -> Iterator[Running]:
    """The small model that mkc ships, on the reference backend."""
    choice = ModelChoice(
        model=None,
        weights=None,
        revision=None,
        packed=None,
        backend=BackendChoice.REFERENCE,
        target="tpu7x",
        tp=None,
        context=TINY_CONTEXT,
    )
    model = served(open_session(choice, quiet=True, slots=TINY_ROWS), choice, ["tiny", "alias"])
    with running(opening(model)) as server:
        yield server
