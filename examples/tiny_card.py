"""Questions to measure a small model with, and its model card.

python -m examples.tiny_card questions tests/data/tiny/eval.jsonl
mkc eval models/tiny tests/data/tiny/eval.jsonl --json > models/tiny/results.json
mkc eval models/tiny tests/data/tiny/eval.jsonl --spec dflash2 --draft models/tiny/drafter --json \
    > models/tiny/drafter/results.json
python -m examples.tiny_card card models/tiny

The other model has `--family kimi_tiny` here, and questions of its own.
"""

from __future__ import annotations

import argparse
import json
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from examples.tiny_family import FAMILIES
from examples.tiny_family import TINY
from examples.tiny_family import Family
from examples.tiny_folder import DRAFTER_FOLDER
from examples.tiny_folder import TRAINING_FILE
from examples.tiny_tasks import EVALUATED
from examples.tiny_tasks import HELD_OUT
from examples.tiny_tasks import LARGEST
from examples.tiny_tasks import LONGEST_LIST
from examples.tiny_tasks import MOST_DAYS
from examples.tiny_tasks import Exchange
from examples.tiny_tasks import draw
from examples.tiny_text import definitions
from examples.tiny_words import CITIES
from examples.tiny_words import THINGS
from examples.tiny_words import TOOLS
from mkc.runtime.safetensors_file import read_header

QUESTIONS = 40  # of each task
MOST_DRAWS = 20  # for one question, on average
RESULTS_FILE = "results.json"
CARD_FILE = "README.md"
TEMPLATES = {
    "tiny": Path(__file__).with_suffix(".md"),
    "kimi_tiny": Path(__file__).with_name("kimi_tiny_card.md"),
}

RANGES = {
    "addition": f"two numbers from 0 to {LARGEST}",
    "subtraction": f"two numbers from 0 to {LARGEST}, the result not negative",
    "sort_numbers": f"two to four numbers from 0 to {LARGEST}, up or down",
    "sort_words": f"three or four of {len(THINGS)} words",
    "count_items": f"lists of up to {LONGEST_LIST} of {len(THINGS)} words",
    "count_letters": f"a, b or c among up to {LONGEST_LIST} of them",
    "next_date": "the day after an ISO date, from the end of 1999 to 2029",
    "weekday": f"1 to {MOST_DAYS} days after a weekday",
    "json": f"name, age up to {LARGEST} and perhaps one of {len(CITIES)} cities from a sentence",
    "tool_call": f"one of {len(TOOLS)} tools with one argument, with up to two tools offered",
    "tool_answer": "a sentence about what a tool has returned",
    "no_tool": "saying that the tool that it takes is not offered",
}


def questions(count: int = QUESTIONS, family: Family = TINY) -> list[Exchange]:
    """Different questions about items that training never sees.

    Args:
      count: of each task; of tasks with few items there are fewer.
      family: the model, which knows some of the tasks.
    """
    found: list[Exchange] = []
    for task in (one for one in EVALUATED if one in family.weights):
        rng = Random(f"questions/{task}")
        different: dict[str, Exchange] = {}
        for _ in range(MOST_DRAWS * count):
            one = draw(rng, task, held_out=True)
            different.setdefault(json.dumps([one.messages, one.tools]), one)
            if len(different) == count:
                break
        found += different.values()
    return found


def line(number: int, exchange: Exchange) -> dict[str, Any]:
    """One line of the file for `mkc eval`; arguments of calls are text, as in the OpenAI API."""
    entry: dict[str, Any] = {
        "id": f"{exchange.task}-{number}",
        "task": exchange.task,
        "messages": [_as_text(message) for message in exchange.messages],
        "check": exchange.check,
        "answer": exchange.expected,
    }
    if exchange.tools:
        entry["tools"] = definitions(exchange.tools)
    return entry


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    calls = []
    for number, call in enumerate(message["tool_calls"]):
        function = call["function"]
        text = {"name": function["name"], "arguments": json.dumps(function["arguments"])}
        calls.append({"id": f"call_{number}", "type": "function", "function": text})
    return {**message, "tool_calls": calls}


def eval_text(count: int = QUESTIONS, family: Family = TINY) -> str:
    """The whole file."""
    lines = [json.dumps(line(number, one)) for number, one in enumerate(questions(count, family))]
    return "\n".join(lines) + "\n"


def card(folder: Path, family: str = "tiny") -> str:
    """The model card, from what was measured and how long training took."""
    results, training = _read(folder / RESULTS_FILE), _read(folder / TRAINING_FILE)
    rows = [
        f"| {task} | {RANGES[task]} | {found['solved']} of {found['total']} "
        f"| {100 * found['accuracy']:.1f} |"
        for task, found in sorted(results["tasks"].items())
    ]
    return (
        TEMPLATES[family]
        .read_text(encoding="utf-8")
        .format(
            parameters=f"{parameters(folder):,}",
            table="\n".join(rows),
            solved=results["solved"],
            total=results["total"],
            accuracy=f"{100 * results['accuracy']:.1f}",
            held_out=HELD_OUT,
            **{**training, "steps": " ".join(map(str, training["steps"]))},
            last=training["steps"][-1],
            **drafter_facts(folder / DRAFTER_FOLDER),
        )
    )


def drafter_facts(folder: Path) -> dict[str, Any]:
    """What the card says of the drafter."""
    results, training = _read(folder / RESULTS_FILE), _read(folder / TRAINING_FILE)
    config = _read(folder / "config.json")
    block = config.get("dflash_config", config)["block_size"]
    found = results["speculation"]
    decoded = found["rounds"] * found["tokens_per_round"]
    own = {f"draft_{key}": value for key, value in training.items()}
    return {
        **own,
        "draft_parameters": f"{parameters(folder):,}",
        "draft_last": training["steps"][-1],
        "draft_steps": " ".join(map(str, training["steps"])),
        "block": block,
        "drafts": block - 1,
        "tokens_per_answer": decoded / results["total"] + 1,
        "tokens_per_round": found["tokens_per_round"],
        "tokens_per_round_with_drafts": found["tokens_per_round_with_drafts"],
    }


def parameters(folder: Path) -> int:
    """Numbers in a checkpoint."""
    tensors = read_header(folder / "model.safetensors").tensors.values()
    return sum(prod(one.shape) for one in tensors)


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("questions", "card"))
    parser.add_argument("path", type=Path, help="file of the questions, or folder of the model")
    parser.add_argument("--family", choices=FAMILIES, default="tiny", help="which of the models")
    parser.add_argument("--count", type=int, default=QUESTIONS, help="questions of each task")
    given = parser.parse_args()
    if given.what == "questions":
        given.path.parent.mkdir(parents=True, exist_ok=True)
        given.path.write_text(eval_text(given.count, FAMILIES[given.family]), encoding="utf-8")
    else:
        (given.path / CARD_FILE).write_text(card(given.path, given.family), encoding="utf-8")


if __name__ == "__main__":
    main()
