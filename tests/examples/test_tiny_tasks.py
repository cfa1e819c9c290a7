"""The generated questions: their answers are right, and the two sides of the split never meet."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from random import Random

import pytest

from examples.tiny_card import eval_text
from examples.tiny_tasks import EVALUATED
from examples.tiny_tasks import TASKS
from examples.tiny_tasks import draw
from examples.tiny_tasks import is_held_out
from examples.tiny_words import WEEKDAYS

QUESTIONS = Path(__file__).parents[1] / "data" / "tiny" / "eval.jsonl"
DRAWS = 200


@pytest.mark.parametrize("task", TASKS)
def test_the_seed_decides(task: str) -> None:
    def some() -> list[object]:
        rng = Random(7)
        return [TASKS[task](rng) for _ in range(10)]

    assert some() == some()


@pytest.mark.parametrize("task", EVALUATED)
def test_an_item_is_on_one_side(task: str) -> None:
    rng = Random(1)
    trained = {draw(rng, task, held_out=False).item for _ in range(DRAWS)}
    kept = {draw(rng, task, held_out=True).item for _ in range(20)}
    assert not trained & kept
    assert all(is_held_out(task, item) for item in kept)
    assert not any(is_held_out(task, item) for item in trained)


def test_small_talk_is_learned_by_heart() -> None:
    assert not draw(Random(1), "small_talk", held_out=False).held_out


@pytest.mark.parametrize("task", ["addition", "subtraction"])
def test_sums(task: str) -> None:
    rng = Random(2)
    for _ in range(DRAWS):
        one = TASKS[task](rng)
        a, b = (int(part) for part in re.findall(r"\d+", one.item))
        asked = {int(part) for part in re.findall(r"\d+", one.messages[0]["content"])}
        assert asked == {a, b}
        assert one.answer["content"] == one.expected
        assert int(one.expected) == (a + b if task == "addition" else a - b)
        ones, tens = one.thought.split(",")
        assert all(left_is_right(part) for part in (ones, tens))
        assert int(tens.split("=")[1] + ones[-1]) == int(one.expected), "the work leads there"


def left_is_right(equation: str) -> bool:
    """Whether `4+5+1=10` holds."""
    left, right = equation.split("=")
    return sum(int(term) for term in re.findall(r"[+-]?\d+", left)) == int(right)


def test_sorted_numbers() -> None:
    rng = Random(3)
    for _ in range(DRAWS):
        one = TASKS["sort_numbers"](rng)
        numbers = [int(part) for part in re.findall(r"\d+", one.messages[0]["content"])]
        down = "largest to smallest" in str(one.messages) or "descending" in str(one.messages)
        assert one.expected == ", ".join(map(str, sorted(numbers, reverse=down)))


def test_counts() -> None:
    rng = Random(4)
    for _ in range(DRAWS):
        one = TASKS["count_items"](rng)
        assert int(re.findall(r"\d+", one.expected)[0]) == one.item.count(", ") + 1


def test_letters() -> None:
    rng = Random(5)
    for _ in range(DRAWS):
        one = TASKS["count_letters"](rng)
        letter, text = re.findall(r"'(\w+)'", one.item)
        count = text.count(letter)
        assert one.expected == f"{letter} occurs {'once' if count == 1 else f'{count} times'}."
        assert one.thought[-1] == str(count)


def test_dates() -> None:
    rng = Random(6)
    ends = 0
    for _ in range(DRAWS):
        one = TASKS["next_date"](rng)
        found = date.fromisoformat(one.expected)
        assert (found - date.fromisoformat(one.item)).days == 1
        ends += found.day == 1
    assert ends > DRAWS / 20


def test_weekdays() -> None:
    rng = Random(7)
    for _ in range(DRAWS):
        one = TASKS["weekday"](rng)
        start, days = (int(part) for part in re.findall(r"\d+", one.item))
        assert one.expected == f"It is {WEEKDAYS[(start + days) % 7]}."
        assert one.thought.endswith(one.expected.split()[-1].strip("."))


def test_tools() -> None:
    rng = Random(8)
    for _ in range(DRAWS):
        call = TASKS["tool_call"](rng)
        assert call.expected["name"] in call.tools
        missing = TASKS["no_tool"](rng)
        assert missing.item.partition("(")[0] not in missing.tools


def test_the_file_of_questions_is_what_the_example_writes() -> None:
    assert QUESTIONS.read_text(encoding="utf-8") == eval_text()
