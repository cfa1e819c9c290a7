"""What differs between two plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mkc.plan.folder import PlanFolder
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import phases_of


@dataclass(frozen=True, kw_only=True)
class Change:
    """One thing that differs; None where a plan does not have it.

    Attributes:
      unit: of numbers: `bytes`, `us`; empty for text.
    """

    name: str
    before: str | float | None
    after: str | float | None
    unit: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All differences, by kind. `predicted` has every figure, also those that are equal."""

    request: tuple[Change, ...]
    decisions: tuple[Change, ...]
    loads: tuple[Change, ...]
    buffers: tuple[Change, ...]
    predicted: tuple[Change, ...]


REQUEST = ("model", "scheme", "target", "ranks", "batch", "rows", "context", "rounds_per_launch")


def compare(before: PlanFolder, after: PlanFolder) -> Comparison:
    """Compares two plans, of the same model or not."""
    return Comparison(
        request=_changes(_request(before), _request(after)),
        decisions=_changes(_decisions(before), _decisions(after)),
        loads=_changes(_loads(before), _loads(after)),
        buffers=_changes(_buffers(before), _buffers(after), unit="bytes"),
        predicted=_figures(before.report, after.report),
    )


def _changes(
    before: Mapping[str, Any], after: Mapping[str, Any], unit: str = ""
) -> tuple[Change, ...]:
    """Names in the order of the first plan, then what only the second has."""
    return tuple(
        Change(name=name, before=before.get(name), after=after.get(name), unit=unit)
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    )


def _request(folder: PlanFolder) -> dict[str, Any]:
    return {key: folder.report[key] for key in REQUEST}


def _decisions(folder: PlanFolder) -> dict[str, str]:
    return {one.id: one.chosen for one in folder.decisions}


def _loads(folder: PlanFolder) -> dict[str, str]:
    """The ring, and for every matmul how its weights are cut."""
    tape = folder.program.tape
    loads = {
        "ring": f"{tape.slots} slots of {tape.slot_rows} rows",
        "before the first phase": f"{len(tape.prologue)} loads, {sum(tape.prologue)} rows",
    }
    for phase in phases_of(folder.program.body):
        if isinstance(phase, MatmulPhase):
            rows = phase.loads()
            last = f", the last of {rows[-1]}" if rows[-1] != rows[0] else ""
            loads[f"{phase.id} {phase.title}"] = f"{len(rows)} loads of {rows[0]} rows{last}"
    return loads


def _buffers(folder: PlanFolder) -> dict[str, int]:
    return {one.name: one.bytes for one in folder.allocations}


def _figures(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    """The predicted times of both reports."""
    tables = [_times(report) for report in (before, after)]
    return tuple(
        Change(name=name, before=tables[0].get(name), after=tables[1].get(name), unit="us")
        for name in dict.fromkeys([*tables[0], *tables[1]])
    )


def _times(report: Mapping[str, Any]) -> dict[str, float]:
    predicted = report["predicted"]
    times = {"floor": predicted["floor_us"], "round": predicted["round_us"]}
    for group in ("by_engine", "exposed"):
        for key, us in predicted[group].items():
            times[f"{group} {key}".replace("_", " ")] = us
    return times
