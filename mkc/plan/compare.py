"""What differs between two plans.

Phases are numbered in program order, so those of a plan with more phases have other numbers. What
is compared are phases that do the same: the first of a kind, title and file with the first, the
second with the second.
A phase that has another number in the second plan is called `p17 (p18)`, one that only the second
has `(p35)`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mkc.plan.folder import PlanFolder
from mkc.plan.phases import phase_kind
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
    """All differences, by kind. `predicted` has every figure, also those that are equal.

    Attributes:
      request: what was compiled, and what the predictions hold for.
    """

    request: tuple[Change, ...]
    decisions: tuple[Change, ...]
    loads: tuple[Change, ...]
    buffers: tuple[Change, ...]
    predicted: tuple[Change, ...]


PHASE = re.compile(r"(?<=\.)p\d+$")  # that a decision is about
REQUEST = ("model", "scheme", "target", "ranks", "batch", "rows", "context", "rounds_per_launch")


def compare(before: PlanFolder, after: PlanFolder) -> Comparison:
    """Compares two plans, of the same model or not."""
    names = _names(before, after)
    return Comparison(
        request=_changes(_request(before), _request(after)),
        decisions=_changes(_decisions(before, names[0]), _decisions(after, names[1])),
        loads=_changes(_loads(before, names[0]), _loads(after, names[1])),
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
    predicted = folder.report["predicted"]
    sources = ", ".join(predicted["cost_source"])
    return {
        **{key: folder.report[key] for key in REQUEST},
        "predicted at position": predicted["position"],
        "predicted with times from": sources,
    }


def _names(before: PlanFolder, after: PlanFolder) -> tuple[dict[str, str], dict[str, str]]:
    """What the phases of both plans are called, by id; those that do the same have one name."""
    old, new = _same(before), _same(after)
    names = {id: id for id in old.values()}
    others = {id: f"({id})" for id in new.values()}
    for key in old.keys() & new.keys():
        was, is_ = old[key], new[key]
        names[was] = others[is_] = was if was == is_ else f"{was} ({is_})"
    return names, others


def _same(folder: PlanFolder) -> dict[tuple[str, str, str, int], str]:
    """Ids of phases by kind, title, the author's file, and their number among the ones alike."""
    ids: dict[tuple[str, str, str, int], str] = {}
    counts: Counter[tuple[str, str, str]] = Counter()
    for one in phases_of(folder.program.body):
        # The file tells a drafter's use of a weight from that of its owner.
        key = (phase_kind(one), one.title, str(one.location or "").rpartition(":")[0])
        counts[key] += 1
        ids[*key, counts[key]] = one.id
    return ids


def _decisions(folder: PlanFolder, names: Mapping[str, str]) -> dict[str, str]:
    """Chosen values by id, with the phases' names in both plans."""
    return {
        PHASE.sub(lambda found: names.get(found[0], found[0]), one.id): one.chosen
        for one in folder.decisions
    }


def _loads(folder: PlanFolder, names: Mapping[str, str]) -> dict[str, str]:
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
            loads[f"{names[phase.id]} {phase.title}"] = f"{len(rows)} loads of {rows[0]} rows{last}"
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
