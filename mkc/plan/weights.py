"""Which decisions matter: how much of a round each one governs."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mkc.errors import UnknownDecisionError
from mkc.plan.folder import PlanFolder
from mkc.plan.phases import STEP_ID
from mkc.plan.phases import PhaseRow
from mkc.plan.phases import phase_rows
from mkc.schedule.decisions import Decision
from mkc.schedule.program import phases_of

PREDICTED = re.compile(r"predicted (\d+(?:\.\d+)?) us")


# Fields of phases that name a stream, a cache or a parameter.
NAMED = ("stream", "cache", "page", "param", "state", "kept_k", "kept_u", "kept_decay")


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A decision and what it governs.

    Attributes:
      weight_us: predicted time per step that it governs: the larger of the memory stream of `bytes`
        and `saved_us`.
      bytes: HBM bytes per step and rank of the phases, streams or parameters it names; those of the
        whole step when it names none.
      phases: ids of the phases it names; empty when it is about the whole step.
      executions: of those phases per step.
      saved_us: predicted time per step that the choice saves against its best alternative, over all
        executions; None when the alternatives were not costed.
    """

    decision: Decision
    weight_us: float
    bytes: int
    phases: tuple[str, ...]
    executions: int
    saved_us: float | None


def estimated_us(text: str) -> float | None:
    """The time that a pass estimated for one execution and wrote into its words, if it did."""
    found = PREDICTED.search(text)
    return float(found[1]) if found else None


def weigh(folder: PlanFolder) -> tuple[Weighed, ...]:
    """All decisions, heaviest first, those of equal weight by name."""
    rows = phase_rows(folder)
    uses = _uses(folder)
    rate = folder.target.hbm.sustained_bytes_per_us
    weighed = [_weighed(one, rows, uses, rate) for one in folder.decisions]
    return tuple(sorted(weighed, key=lambda one: (-one.weight_us, one.decision.id)))


def find_decisions(folder: PlanFolder, name: str) -> tuple[Weighed, ...]:
    """The decisions that `name` means: the id, else its last part, else a part of the id.

    Raises:
      UnknownDecisionError: none does.
    """
    weighed = weigh(folder)
    wanted = name.lower()
    tests = (
        lambda id: id == wanted,
        lambda id: id.rpartition(".")[2] == wanted,
        lambda id: wanted in id,
    )
    for test in tests:
        if found := tuple(one for one in weighed if test(one.decision.id.lower())):
            return found
    raise UnknownDecisionError(
        name=name, path=folder.path, known=[one.decision.id for one in weighed]
    )


def _uses(folder: PlanFolder) -> dict[str, set[str]]:
    """Stream, cache, parameter -> phases that use it."""
    uses: dict[str, set[str]] = {}
    for phase in phases_of(folder.program.body):
        names = [getattr(phase, key, "") for key in NAMED]
        names += getattr(phase, "states", {}).values()
        # a parameter of several regions is `name#region` in each; decisions use either name
        params = [one.param for one in getattr(phase, "pieces", ())]
        params += [name for node in getattr(phase, "nodes", ()) for name in node.operands]
        names += [*params, *(one.partition("#")[0] for one in params)]
        names += getattr(phase, "params", ())
        for name in filter(None, names):
            uses.setdefault(name, set()).add(phase.id)
    return uses


def _weighed(
    decision: Decision, rows: tuple[PhaseRow, ...], uses: dict[str, set[str]], bytes_per_us: float
) -> Weighed:
    subject = decision.id.partition(".")[2]
    ids = {subject} if STEP_ID.fullmatch(subject) else _named(subject, uses)
    governed = [one for one in rows if one.id in ids] if ids else rows
    executions = max(one.executions for one in governed) if ids and governed else 1
    moved = sum(one.bytes * one.executions for one in governed)
    saved = _saved(decision, executions)
    return Weighed(
        decision=decision,
        weight_us=round(max(moved / bytes_per_us, saved or 0.0), 3),
        bytes=moved,
        phases=tuple(one.id for one in governed) if ids else (),
        executions=executions,
        saved_us=saved,
    )


def _named(subject: str, uses: dict[str, set[str]]) -> set[str]:
    """Phases that use what the id ends with: a stream, a cache or a parameter."""
    return next((ids for name, ids in sorted(uses.items()) if subject.endswith(name)), set())


def _saved(decision: Decision, executions: int) -> float | None:
    chosen = estimated_us(decision.chosen)
    others = [us for text in decision.rejected.values() if (us := estimated_us(text)) is not None]
    if chosen is None or not others:
        return None
    return round((min(others) - chosen) * executions, 3)
