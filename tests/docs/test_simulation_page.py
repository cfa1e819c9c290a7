"""docs/simulation.md says what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from bench.calibration.calibrate import series
from bench.calibration.measurements import FITTED
from bench.calibration.measurements import measurements
from mkc.schedule.simulate import Exposed
from mkc.schedule.simulate import Prediction
from mkc.schedule.simulate.prediction import FloorPart
from tests.schedule.simulate.calibrated import comparisons

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")


def test_modules_exist() -> None:
    modules = re.findall(r"`(\w+\.py)`", PAGE)
    found = {path.name for path in (ROOT / "mkc" / "schedule" / "simulate").glob("*.py")}
    assert set(modules) == found - {"__init__.py"}
    assert (ROOT / "mkc" / "codegen_pallas" / "aot_phases.py").exists()


def test_what_the_floor_is_made_of() -> None:
    (table,) = re.findall(r"\| `floor_parts` .*?\n\n", PAGE, re.DOTALL)
    assert re.findall(r"^\| `([\w ]+)` \|", table, re.MULTILINE) == [
        "floor_parts",
        *map(str, FloorPart),
    ]


def test_causes_and_fields_are_those_of_the_code() -> None:
    (table,) = re.findall(r"\| `exposed` .*?\n\n", PAGE, re.DOTALL)
    causes = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert causes == ["exposed", *(one.name for one in fields(Exposed))]
    names = {one.name for one in fields(Prediction)}
    assert {"round_us", "floor_us", "core_us", "launch_us", "cost_source"} <= names
    assert {"round_us", "floor_us", "core_us", "launch_us", "cost_source"} <= set(
        re.findall(r"`(\w+)`", PAGE)
    )


def test_the_table_of_errors_is_what_calibrate_prints() -> None:
    told = re.findall(
        r"^\| ([\w ]+).*? \| (\d+) \| ([\d.]+) \| ([+-][\d.]+) \|$", PAGE, re.MULTILINE
    )
    found = series(list(comparisons()))
    assert len(told) == len(found)
    for (label, *numbers), (row, errors) in zip(told, found.items(), strict=True):
        assert label.startswith(row)
        assert numbers == [str(errors.times), f"{errors.mean:.1f}", f"{errors.worst:+.1f}"], row


def test_the_bias_is_that_of_the_simulator() -> None:
    found = re.search(
        r"predicted ([\d.]+) % high without exchanges and\s+([\d.]+) % low with them", PAGE
    )
    assert found is not None
    errors = {one.measurement.id: 100 * one.error for one in comparisons()}
    without = errors["C7 Helion decode, no exchange, body"]
    together = errors["C7 Helion decode, body"]
    assert found.groups() == (f"{without:.1f}", f"{-together:.1f}")


def test_numbers_of_measurements() -> None:
    count = len(measurements())
    assert f"| all | {count} |" in PAGE
    assert f"| not fitted | {count - len(FITTED)} |" in PAGE
    assert f"on the {len(FITTED)} times marked `fit`" in PAGE
