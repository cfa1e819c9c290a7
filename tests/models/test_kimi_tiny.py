"""The small Kimi model that comes with mkc: it is what the example writes, and it answers."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

from examples import tiny_kimi
from examples.tiny_card import card
from examples.tiny_card import eval_text
from examples.tiny_family import KIMI_TINY
from mkc.ir.types import DType
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
from models.kimi_k3 import MODEL

FOLDER = Path(__file__).parents[2] / "models" / "kimi_tiny"
QUESTIONS = Path(__file__).parents[1] / "data" / "kimi_tiny" / "eval.jsonl"
TEXT_FILES = ("tiktoken.model", "tokenizer_config.json", "text_format.json")
ASKED = 20  # sums
GOAL = 0.5  # of them; the card says how many it was
SLOTS = 4


def ask(tasks: list[Task]) -> list[str | None]:
    """Why each answer is wrong, None for right ones: reference backend, bf16, greedy."""
    checkpoint = Checkpoint.open(FOLDER)
    graph = MODEL.trace(checkpoint.config, batch=SLOTS, context=128)
    backend = open_reference(graph, checkpoint, rounds_per_launch=8).backend
    tokenizer = load_tokenizer(FOLDER)
    chat = load_chat(FOLDER, tokenizer)
    generator = Generator(backend, tokenizer=tokenizer)
    requests = []
    for task in tasks:
        prompt = chat.encode(ChatRequest(messages=task.messages))
        output = chat.output(prompt, tools=None)
        requests.append(Request(tokens=prompt.ids, max_tokens=64, output=output))
    events: dict[int, list[Event]] = {}
    for delta in generator.run(requests):
        events.setdefault(delta.sequence, []).extend(delta.events)
    return [task.problem(joined(events[number])) for number, task in enumerate(tasks)]


def test_it_answers_unseen_sums() -> None:
    tasks = [one for one in read_tasks(QUESTIONS) if one.kind == "addition"][:ASKED]
    problems = [problem for problem in ask(tasks) if problem is not None]
    assert len(tasks) == ASKED
    assert len(problems) <= (1 - GOAL) * len(tasks), "\n".join(problems)


def test_the_text_files_are_what_the_example_writes(tmp_path: Path) -> None:
    tiny_kimi.write_text_files(tmp_path, seed=0)
    for name in TEXT_FILES:
        assert (tmp_path / name).read_text() == (FOLDER / name).read_text(), name


def test_every_id_has_a_token() -> None:
    tokenizer = load_tokenizer(FOLDER)
    assert tokenizer.holes == ()
    assert tokenizer.tokens == tokenizer.vocab_size == tiny_kimi.TEXT_CONFIG["vocab_size"]
    for name in tiny_kimi.NAMES:
        assert len(tokenizer.encode(name, allow_special=False)) == 1, name


def test_config_is_that_of_the_example() -> None:
    assert json.loads((FOLDER / "config.json").read_text()) == tiny_kimi.CONFIG


def test_size_and_form() -> None:
    """Some megabytes; every expert is in MXFP4, and each part of the architecture is there."""
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 4 << 20
    checkpoint = Checkpoint.open(FOLDER)
    graph = MODEL.trace(checkpoint.config, batch=1, context=64)
    assert checkpoint.check(graph).extra == ()
    experts = [one for key, one in graph.params.items() if ".experts." in key]
    assert experts and {one.type.dtype for one in experts} == {DType.E2M1X2, DType.E8M0}
    mnemonics = {node.op.mnemonic for node in graph.body.nodes()}
    assert {"delta_rule", "latent_attention", "expert_mlp", "mix_blocks"} <= mnemonics
    plain = MODEL.trace(KIMI_TINY.config, batch=1, context=64)
    numbers = sum(prod(one.type.shape) * one.instances for one in plain.params.values())
    assert 1_000_000 <= numbers <= 3_000_000


def test_questions_are_those_of_the_example() -> None:
    assert QUESTIONS.read_text() == eval_text(20, KIMI_TINY)


def test_card_has_the_measured_figures() -> None:
    assert (FOLDER / "README.md").read_text() == card(FOLDER, "kimi_tiny")


def test_measured_figures() -> None:
    results = json.loads((FOLDER / "results.json").read_text())
    kinds = [task.kind for task in read_tasks(QUESTIONS)]
    assert {kind: one["total"] for kind, one in results["tasks"].items()} == {
        kind: kinds.count(kind) for kind in kinds
    }
    assert results["accuracy"] == pytest.approx(results["solved"] / len(kinds), abs=1e-4)
