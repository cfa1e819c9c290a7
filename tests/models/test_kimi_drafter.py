"""The DSpark drafter that comes with the small Kimi model, and how it is trained."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_dspark import DRAFT_CONFIG
from mkc.cli.eval import local_outcomes
from mkc.cli.eval import speculation
from mkc.cli.generation import BackendChoice
from mkc.cli.generation import ModelChoice
from mkc.cli.generation import Session
from mkc.cli.generation import open_session
from mkc.cli.shipped import checkpoint_named
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.request import Request
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.tasks import read_tasks
from mkc.runtime.text import ChatRequest
from mkc.spec import DRAFT_NAMESPACE
from mkc.spec import block_round
from models.dspark import DRAFTER
from models.kimi_k3 import MODEL

TARGET = Path(checkpoint_named("kimi-tiny"))
FOLDER = TARGET / "drafter"
QUESTIONS = Path(__file__).parents[1] / "data" / "kimi_tiny" / "eval.jsonl"
EVERY = 20  # of the questions, one in so many is asked here: one of each kind


@cache
def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def session() -> Session:
    """What `mkc eval kimi-tiny` opens: the drafter beside a model is used without being named."""
    choice = ModelChoice(
        model=None,
        weights="kimi-tiny",
        revision=None,
        packed=None,
        backend=BackendChoice.REFERENCE,
        target="tpu7x",
        tp=None,
        context=128,
        spec=None,
        draft=None,
    )
    return open_session(choice, quiet=True, slots=4)


def test_drafts_are_accepted_and_change_no_answer(session: Session) -> None:
    tasks = read_tasks(QUESTIONS)[::EVERY]
    sampling = SamplingParams(temperature=0.0)
    outcomes = list(local_outcomes(session, tasks, sampling, max_tokens=48, thinking=None))
    found = speculation(session, outcomes)
    assert found is not None and found["scheme"] == "dspark"
    measured = results()["speculation"]["tokens_per_round_with_drafts"]
    assert found["tokens_per_round_with_drafts"] == pytest.approx(measured, rel=0.3)
    requests = [
        Request(tokens=session.chat.encode(ChatRequest(messages=task.messages)).ids, max_tokens=48)
        for task in tasks
    ]

    def spoken() -> list[list[int]]:
        tokens: dict[int, list[int]] = {}
        for delta in session.generator.run(requests):
            tokens.setdefault(delta.sequence, []).extend(delta.tokens)
        return [tokens[number] for number in sorted(tokens)]

    with_drafts = spoken()
    session.generator.drafts = False
    try:
        assert spoken() == with_drafts
    finally:
        session.generator.drafts = True


def test_measured_figures() -> None:
    """The drafter changes no answer."""
    alone = json.loads((TARGET / "results.json").read_text())
    assert results()["tasks"] == alone["tasks"]
    assert results()["speculation"]["tokens_per_round_with_drafts"] > 4.0


def test_folder_is_that_of_the_example() -> None:
    folder = Checkpoint.open(FOLDER)
    assert folder.config == DRAFT_CONFIG
    scheme = block_round(
        MODEL, Checkpoint.open(TARGET).config, DRAFTER, folder.config, batch=1, context=64
    )
    own = {
        name.removeprefix(DRAFT_NAMESPACE): param.type.shape
        for key, param in scheme.graph.params.items()
        if key.startswith(DRAFT_NAMESPACE)
        for name in param.tensor_names()
    }
    assert {name: one.shape for name, one in folder.tensors.items()} == own
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 2 << 20
