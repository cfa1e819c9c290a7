"""`mkc verify --spec`: the kernel that runs whole rounds of a speculative scheme."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from mkc.cli.main import main
from mkc.schedule.verify import OBLIGATIONS
from tests.draft_goldens import draft_case
from tests.goldens import golden_case


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """The golden target and drafter, by their config files."""
    configs = {"target": golden_case("qwen38_mini"), "draft": draft_case()}
    for name, case in configs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(case.meta["config"]))
    target, draft = (str(tmp_path / f"{name}.json") for name in configs)
    return ["--config", target, "--spec", "dflash2", "--draft", draft, "--context", "64"]


def verdicts(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, dict[str, Any]]:
    argv = ["mkc", "verify", "qwen38", *arguments, "--tp", "2", "--no-aot", "--json"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        main()
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] == (not ended.value.code)
    return {one["name"]: one for one in document["verdicts"]}


def test_rounds_are_proven_and_traced(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = verdicts([*options, "--no-races"], monkeypatch, capsys)
    assert {name for name, one in found.items() if one["status"] == "holds"} == {
        *OBLIGATIONS,
        "lint",
        "kernel",
        "traced lint",
    }
    assert "traced events of all ranks" in found["kernel"]["ground"]


@pytest.mark.long
def test_rounds_are_free_of_races(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = verdicts([*options, "--no-trace"], monkeypatch, capsys)
    assert found["races"]["status"] == "holds"
    assert "the model itself" in found["races"]["ground"]


def test_an_unknown_scheme_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["mkc", "verify", "qwen38", "--spec", "guesses"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code
    assert "unknown scheme 'guesses'" in capsys.readouterr().err
