"""The drafter that comes with the small model: its drafts are right as often as its card says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from math import prod
from pathlib import Path

import pytest

from examples.tiny_dflash2 import DRAFT_CONFIG
from mkc.cli.eval import Outcome
from mkc.cli.eval import local_outcomes
from mkc.cli.eval import speculation
from mkc.cli.generation import BackendChoice
from mkc.cli.generation import ModelChoice
from mkc.cli.generation import Session
from mkc.cli.generation import open_session
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.request import Request
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.tasks import Task
from mkc.runtime.tasks import read_tasks
from mkc.runtime.text import ChatRequest
from mkc.spec import DRAFT_NAMESPACE
from mkc.spec import block_round
from models.dflash2 import DRAFTER
from models.qwen38 import MODEL

TARGET = Path(__file__).parents[2] / "models" / "tiny"
FOLDER = TARGET / "drafter"
QUESTIONS = Path(__file__).parents[1] / "data" / "tiny" / "eval.jsonl"
PAGE = (Path(__file__).parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
GOAL = 4.0  # tokens of a round with drafts, on average
EVERY = 16  # of the questions, one in so many is asked here
SLOTS = 4


@cache
def asked() -> list[Task]:
    return read_tasks(QUESTIONS)[::EVERY]


@pytest.fixture(scope="module")
def session() -> Session:
    """What `mkc eval --spec dflash2 --draft models/tiny/drafter` opens."""
    choice = ModelChoice(
        model=None,
        weights=str(TARGET),
        revision=None,
        packed=None,
        backend=BackendChoice.REFERENCE,
        target="tpu7x",
        tp=None,
        context=256,
        spec="dflash2",
        draft=str(FOLDER),
    )
    return open_session(choice, quiet=True, slots=SLOTS)


@pytest.fixture(scope="module")
def outcomes(session: Session) -> list[Outcome]:
    sampling = SamplingParams(temperature=0.0)
    found: Iterator[Outcome] = local_outcomes(
        session, asked(), sampling, max_tokens=96, thinking=None
    )
    return list(found)


def test_drafts_are_right_as_often_as_measured(session: Session, outcomes: list[Outcome]) -> None:
    assert {task.kind for task in asked()} == {task.kind for task in read_tasks(QUESTIONS)}
    found = speculation(session, outcomes)
    assert found is not None
    print(f"{found['tokens_per_round_with_drafts']} tokens per round with drafts")
    assert found["scheme"] == "dflash2"
    assert [key for key in found if f"`{key}`" not in PAGE] == []
    assert found["tokens_per_round_with_drafts"] > GOAL
    measured = results()["speculation"]["tokens_per_round_with_drafts"]
    assert found["tokens_per_round_with_drafts"] == pytest.approx(measured, rel=0.15)
    # What was counted adds up.
    ended = [one.statistics for one in outcomes if one.statistics is not None]
    assert len(ended) == len(asked())
    assert found["rounds"] - found["rounds_with_drafts"] == len(asked()), "only the first has none"
    assert found["drafted"] == 7 * found["rounds_with_drafts"]
    assert found["accepted"] == sum(
        count * number for count, number in enumerate(session.generator.draft_rounds)
    )


def test_answers_are_those_without_drafts(session: Session, outcomes: list[Outcome]) -> None:
    """Token by token; that they are also right is not asked here."""
    requests = []
    for task in asked():
        prompt = session.chat.encode(ChatRequest(messages=task.messages, tools=task.tools))
        requests.append(Request(tokens=prompt.ids, max_tokens=96))

    def spoken() -> tuple[dict[int, list[int]], int]:
        tokens: dict[int, list[int]] = {}
        drafted = 0
        for delta in session.generator.run(requests):
            tokens.setdefault(delta.sequence, []).extend(delta.tokens)
            drafted += delta.finish.statistics.drafted if delta.finish else 0
        first = min(tokens)
        return {number - first: one for number, one in tokens.items()}, drafted

    with_drafts, drafted = spoken()
    session.generator.drafts = False
    try:
        plain, none = spoken()
    finally:
        session.generator.drafts = True
    assert drafted > 0 and none == 0
    assert with_drafts == plain


@cache
def results() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads((FOLDER / "results.json").read_text())
    return found


def test_measured_figures() -> None:
    """The drafter changes no answer, and its rounds have more tokens than was asked for."""
    alone = json.loads((TARGET / "results.json").read_text())
    found = results()
    assert found["tasks"] == alone["tasks"]
    assert found["speculation"]["tokens_per_round_with_drafts"] > GOAL


def test_folder_is_that_of_the_example() -> None:
    folder = Checkpoint.open(FOLDER)
    assert folder.config == DRAFT_CONFIG
    scheme = block_round(
        MODEL, Checkpoint.open(TARGET).config, DRAFTER, folder.config, batch=1, context=1024
    )
    own = {
        name.removeprefix(DRAFT_NAMESPACE): param.type.shape
        for key, param in scheme.graph.params.items()
        if key.startswith(DRAFT_NAMESPACE)
        for name in param.tensor_names()
    }
    assert {name: one.shape for name, one in folder.tensors.items()} == own
    assert sum(prod(shape) for shape in own.values()) < 1_000_000
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 2 << 20
