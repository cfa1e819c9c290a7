"""Task files, checks of replies, and the confidence in an accuracy."""

from __future__ import annotations

import json
from math import comb
from math import isclose
from math import sqrt
from pathlib import Path
from typing import Any

import pytest

from mkc.errors import TaskFileError
from mkc.runtime.tasks import Task
from mkc.runtime.tasks import interval
from mkc.runtime.tasks import read_tasks
from mkc.runtime.tasks import same_json
from mkc.runtime.text import Reply
from mkc.runtime.text import ToolCall

CALL = {"name": "add", "arguments": {"a": 1, "b": [2, 3]}}


def line(**changes: Any) -> dict[str, Any]:
    found = {
        "id": "1",
        "task": "sum",
        "messages": [{"role": "user", "content": "12 + 7?"}],
        "check": "contains",
        "answer": "19",
    }
    return found | changes


def write(path: Path, *lines: Any) -> Path:
    texts = [one if isinstance(one, str) else json.dumps(one) for one in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def task(check: str, answer: Any, folder: Path) -> Task:
    return read_tasks(write(folder / "one.jsonl", line(check=check, answer=answer)))[0]


def says(content: str, *calls: tuple[str, str], complete: bool = True) -> Reply:
    return Reply(
        reasoning="because",
        content=content,
        tool_calls=tuple(
            ToolCall(name=name, arguments=arguments, complete=complete) for name, arguments in calls
        ),
    )


@pytest.mark.parametrize(
    ("check", "answer", "reply", "solved"),
    [
        ("exact", "19", says(" 19\n"), True),
        ("exact", "19", says("It is 19"), False),
        ("contains", "19", says("It is 19."), True),
        ("contains", "19", says("It is 18."), False),
        ("contains", "because", says("19"), False),
        ("json", {"a": [1, 2]}, says('{"a": [1, 2.0]}'), True),
        ("json", {"a": [1, 2]}, says('{"a": [2, 1]}'), False),
        ("json", {"a": 1}, says("the answer is a = 1"), False),
        ("json", 1, says("true"), False),
        ("tool_call", CALL, says("", ("add", '{"b": [2, 3], "a": 1}')), True),
        ("tool_call", CALL, says("", ("sub", '{"b": [2, 3], "a": 1}')), False),
        ("tool_call", CALL, says("", ("add", '{"b": [2, 3]}')), False),
        ("tool_call", CALL, says("", ("add", '{"b": [2, 3], "a": ')), False),
        ("tool_call", CALL, says('add {"a": 1}'), False),
        ("tool_call", CALL, says("", *[("add", '{"b": [2, 3], "a": 1}')] * 2), False),
        ("tool_call", CALL, says("", ("add", '{"b":[2,3],"a":1}'), complete=False), False),
    ],
)
def test_checks(check: str, answer: Any, reply: Reply, solved: bool, tmp_path: Path) -> None:
    problem = task(check, answer, tmp_path).problem(reply)
    assert (problem is None) == solved, problem


def test_equality_of_json() -> None:
    assert same_json({"a": 1, "b": None}, {"b": None, "a": 1.0})
    assert not same_json({"a": 1}, {"a": 1, "b": None})
    assert not same_json([1], [True])
    assert not same_json("1", 1)


def test_every_bad_line_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "bad.jsonl",
        line(),
        "{",
        "",
        "[]",
        {key: value for key, value in line(id="2").items() if key != "answer"},
        line(id="3", messages=[]),
        line(id="4", check="nearly"),
        line(id="5", check="tool_call", answer={"name": "add"}),
        line(id="6", check="exact", answer=19),
        line(id="7", tools={}),
        line(id="8", awnser="19"),
        line(id=9),
        line(),
    )
    with pytest.raises(TaskFileError) as caught:
        read_tasks(path)
    assert [one.number for one in caught.value.lines] == [2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    problems = "\n".join(one.problem for one in caught.value.lines)
    for part in ("not JSON", "no 'answer'", "nearly", "'awnser'", "that of line 1", "not text"):
        assert part in problems


def test_the_first_tasks(tmp_path: Path) -> None:
    path = write(tmp_path / "tasks.jsonl", line(), "", line(id="2"), line(id="3"))
    assert [one.id for one in read_tasks(path, limit=2)] == ["1", "2"]
    assert len(read_tasks(path)) == 3


@pytest.mark.parametrize(("solved", "total"), [(0, 20), (1, 20), (10, 20), (19, 20), (20, 20)])
def test_an_end_is_as_far_from_the_share_as_chance_would_take_it(solved: int, total: int) -> None:
    """The definition: the share is 1.96 standard deviations of the end's own accuracy away."""
    share = solved / total
    low, high = interval(solved, total)
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        deviation = sqrt(end * (1 - end) / total)
        assert isclose(abs(share - end), 1.96 * deviation, rel_tol=1e-4, abs_tol=1e-9)


def test_the_interval_holds_the_true_accuracy_in_95_of_100_cases() -> None:
    """On average over accuracies; for a single one an interval of counts cannot."""
    total = 50
    found = []
    for accuracy in (one / 100 for one in range(2, 99)):
        chances = [
            comb(total, solved) * accuracy**solved * (1 - accuracy) ** (total - solved)
            for solved in range(total + 1)
        ]
        ends = [interval(solved, total) for solved in range(total + 1)]
        found.append(
            sum(
                chance
                for chance, (low, high) in zip(chances, ends, strict=True)
                if low <= accuracy <= high
            )
        )
    assert 0.94 < sum(found) / len(found) < 0.96


def test_more_tasks_narrow_the_interval() -> None:
    widths = [high - low for low, high in (interval(9 * size, 10 * size) for size in (1, 10, 100))]
    assert widths == sorted(widths, reverse=True)
