"""The summary says what the report says; every time in it is called predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mkc.cli.summary import print_summary
from mkc.plan.weights import weigh
from tests.plan.plans import plan

PREDICTED = {
    "round_us": 2025.8,
    "floor_us": 1980.9,
    "utilization": 0.9778,
    "position": 2048,
    "routing": None,
    "cost_source": {"machine code": 0.371, "push rate": 0.604, "target file": 0.025},
    "exchanges": {"round": {"chip": 97, "host": 3}, "loop_body": {"chip": 2}},
    "exposed": {"collective": 40.0, "dma": 4.9, "compute": 0.0, "fixed": 0.01},
}


def summary(capsys: pytest.CaptureFixture[str], **changes: Any) -> list[str]:
    folder = plan("27b", ranks=8)
    report = {**folder.report, **changes}
    print_summary(report, Path("build/plan"), weigh(folder))
    return capsys.readouterr().out.splitlines()


def test_a_prediction_is_shown_with_what_it_loses(capsys: pytest.CaptureFixture[str]) -> None:
    lines = summary(capsys, predicted=PREDICTED)
    at = next(index for index, line in enumerate(lines) if line.startswith("predicted"))
    assert lines[at].split(None, 1)[1] == (
        "2,025.8 us a step, floor 1,980.9 us: 97.8 % of the memory's rate"
    )
    assert lines[at + 1].strip() == "caches read up to position 2,048 of every sequence"
    assert lines[at + 2].strip() == (
        "core times from: push rate 60 %, machine code 37 %, target file 2 %"
    )
    assert lines[at + 3].strip() == "exchanges: 97 chip + 3 host phases a step, one after the other"
    assert lines[at + 4].strip() == "memory idle, us: collective 40, dma 4.9"


def test_rounding_that_was_asked_for_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert not any(one.startswith("rounding") for one in summary(capsys))
    (line,) = [
        one for one in summary(capsys, rounding=["sums as bf16"]) if one.startswith("rounding")
    ]
    assert line.split(None, 1)[1] == "sums as bf16"


def test_without_one_the_floor_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    floor = plan("27b", ranks=8).report["floor_us"]
    lines = summary(capsys, predicted=None)
    assert any(line == f"predicted     at least {floor:,.1f} us a step" for line in lines)


def test_memory_is_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    """38.70 of 63.94 MiB are 12 of 20 marks, 3 MiB one."""
    (line,) = [one for one in summary(capsys) if one.startswith("vmem")]
    assert "[############.......c] 38.70 of 63.94 MiB" in line


def test_the_heaviest_decisions_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    lines = summary(capsys)
    heaviest = weigh(plan("27b", ranks=8))[0].decision
    assert any(f"{heaviest.id}: {heaviest.chosen}" in line for line in lines)
    assert len(lines) <= 24


def test_a_round_of_a_scheme_is_one_screen_too(capsys: pytest.CaptureFixture[str]) -> None:
    folder = plan("round", ranks=2)
    print_summary(folder.report, Path("build/plan"), weigh(folder))
    lines = capsys.readouterr().out.splitlines()
    assert any("for the next drafts" in line for line in lines)
    assert any(
        line.split() == ["core", "times", "from:", "target", "file", "100", "%"] for line in lines
    )
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
