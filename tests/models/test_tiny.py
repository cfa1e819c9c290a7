"""The model that comes with mkc: it answers, and its card says what was measured."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from examples.tiny_card import card
from examples.tiny_folder import CONFIG
from mkc.runtime.backends import open_reference
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.generate import Generator
from mkc.runtime.request import Request
from mkc.runtime.tasks import Task
from mkc.runtime.tasks import read_tasks
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import Event
from mkc.runtime.text import joined
from mkc.runtime.text import load_chat
from mkc.runtime.text import load_tokenizer
from models.qwen38 import MODEL

FOLDER = Path(__file__).parents[2] / "models" / "tiny"
QUESTIONS = Path(__file__).parents[1] / "data" / "tiny" / "eval.jsonl"
GOAL = 0.9
EVERY = 12  # of the questions, one in so many is asked here
SLOTS = 8


def ask(tasks: list[Task]) -> list[str | None]:
    """Why each answer is wrong, None for right ones: reference backend, bf16, greedy."""
    checkpoint = Checkpoint.open(FOLDER)
    graph = MODEL.trace(checkpoint.config, batch=SLOTS, context=256)
    backend = open_reference(graph, checkpoint, rounds_per_launch=8).backend
    tokenizer = load_tokenizer(FOLDER)
    chat = load_chat(FOLDER, tokenizer)
    generator = Generator(backend, tokenizer=tokenizer)
    requests = []
    for task in tasks:
        prompt = chat.encode(ChatRequest(messages=task.messages, tools=task.tools))
        output = chat.output(prompt, tools=task.tools)
        requests.append(Request(tokens=prompt.ids, max_tokens=96, output=output))
    events: dict[int, list[Event]] = {}
    for delta in generator.run(requests):
        events.setdefault(delta.sequence, []).extend(delta.events)
    return [task.problem(joined(events[number])) for number, task in enumerate(tasks)]


def test_it_answers_unseen_questions() -> None:
    tasks = read_tasks(QUESTIONS)[::EVERY]
    assert len(tasks) >= 36
    assert len({task.kind for task in tasks}) == 12
    problems = [problem for problem in ask(tasks) if problem is not None]
    assert len(problems) <= (1 - GOAL) * len(tasks), "\n".join(problems)


def test_size() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 8 << 20
    graph = MODEL.trace(CONFIG, batch=1, context=1024)
    parameters = sum(
        prod(param.type.shape) for param in graph.params.values() for _ in param.tensor_names()
    )
    assert 1_000_000 <= parameters <= 3_000_000


def test_config_is_that_of_the_example() -> None:
    assert json.loads((FOLDER / "config.json").read_text()) == CONFIG


def test_card_has_the_measured_figures() -> None:
    assert (FOLDER / "README.md").read_text() == card(FOLDER)


def test_measured_figures() -> None:
    results = json.loads((FOLDER / "results.json").read_text())
    kinds = [task.kind for task in read_tasks(QUESTIONS)]
    assert {kind: one["total"] for kind, one in results["tasks"].items()} == {
        kind: kinds.count(kind) for kind in kinds
    }
    assert sum(one["solved"] for one in results["tasks"].values()) == results["solved"]
    assert results["accuracy"] == pytest.approx(results["solved"] / len(kinds), abs=1e-4)
    assert results["accuracy"] > GOAL
