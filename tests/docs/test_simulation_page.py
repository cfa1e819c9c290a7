"""docs/simulation.md says what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from bench.calibration.measurements import FITTED
from bench.calibration.measurements import measurements
from mkc.schedule.simulate import Exposed
from mkc.schedule.simulate import Prediction

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")


def test_modules_exist() -> None:
    modules = re.findall(r"`(\w+\.py)`", PAGE)
    found = {path.name for path in (ROOT / "mkc" / "schedule" / "simulate").glob("*.py")}
    assert set(modules) == found - {"__init__.py"}
    assert (ROOT / "mkc" / "codegen_pallas" / "aot_phases.py").exists()


def test_causes_and_fields_are_those_of_the_code() -> None:
    causes = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert causes == ["exposed", *(one.name for one in fields(Exposed))]
    names = {one.name for one in fields(Prediction)}
    assert {"round_us", "floor_us", "core_us", "launch_us", "cost_source"} <= names
    assert {"round_us", "floor_us", "core_us", "launch_us", "cost_source"} <= set(
        re.findall(r"`(\w+)`", PAGE)
    )


def test_numbers_of_measurements() -> None:
    count = len(measurements())
    assert f"| all | {count} |" in PAGE
    assert f"| not fitted | {count - len(FITTED)} |" in PAGE
    assert f"on the {len(FITTED)} times marked `fit`" in PAGE
