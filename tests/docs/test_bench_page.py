"""docs/bench.md says what is there."""

from __future__ import annotations

from pathlib import Path
from re import findall

import pytest

from mkc.cli.bench import Row
from mkc.cli.bench import document
from mkc.cli.main import load_command
from mkc.runtime.measure import Load
from mkc.runtime.measure import measure
from mkc.runtime.tasks import CHECKS
from mkc.runtime.tasks import KEYS
from mkc.runtime.tasks import OPTIONAL_KEYS
from tests.runtime.fake_backend import FakeBackend

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "bench.md").read_text(encoding="utf-8")
SPEED, ACCURACY = PAGE.split("## Accuracy")


def first_cells(text: str) -> set[str]:
    """The names in the first column of all tables."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {name for cell in cells for name in findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("command", ["bench", "eval"])
def test_options_exist(command: str) -> None:
    known = {option for one in load_command(command).params for option in one.opts}
    used = [line for line in PAGE.splitlines() if line.startswith(f"mkc {command} ")]
    assert used
    for line in used:
        assert set(findall(r"(?<= )--[a-z-]+", line)) <= known


def test_every_key_of_the_measurement_is_explained() -> None:
    load = Load(batch=1, prompt_tokens=4, output_tokens=4)
    row = Row(load=load, measured=measure(FakeBackend(), load), step_floor_us=None, scheme="none")
    found = document([row], "reference", ["what runs"])
    assert first_cells(SPEED) == found.keys() | found["runs"][0].keys()
    for key in found["runs"][0]["speculation"]:
        assert f"`{key}`" in SPEED


def test_every_key_and_check_of_a_task_is_explained() -> None:
    assert first_cells(ACCURACY) == {*KEYS, *OPTIONAL_KEYS, *CHECKS, "check"}


def test_the_program_it_names_exists() -> None:
    (path,) = findall(r"\.venv/bin/python (\S+\.py)", PAGE)
    assert (ROOT / path).is_file()
