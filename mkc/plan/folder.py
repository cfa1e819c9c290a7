"""Reading a plan folder: everything in it is checked before anything is shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mkc.errors import PlanDamagedError
from mkc.errors import PlanFolderError
from mkc.errors import PlanVersionError
from mkc.passes.p50_residency import Allocation
from mkc.plan.decode import DecodeError
from mkc.plan.decode import decode
from mkc.plan.form import DIGEST
from mkc.plan.form import OF_PLAN
from mkc.plan.form import PLAN_VERSION
from mkc.plan.form import digest
from mkc.schedule.decisions import Decision
from mkc.schedule.program import Program
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.targets import Target
from mkc.targets import load_target

KERNEL = "kernel.py"
PLAN = "plan.json"
REPORT = "report.json"
CYCLES = "cycles"


@dataclass(frozen=True)
class PlanFolder:
    """What `mkc compile` wrote.

    Attributes:
      path: the folder.
      plan, report: the documents, see `docs/report.md`.
      kernel_source: text of kernel.py; it may have been edited.
    """

    path: Path
    plan: Mapping[str, Any]
    report: Mapping[str, Any]
    kernel_source: str

    @cached_property
    def program(self) -> Program:
        """Raises `PlanVersionError` when it is not of this form, or has an op nobody registered."""
        program: Program = self._decoded(Program, "program")
        return program

    @property
    def unit(self) -> str:
        """What is repeated: a `step`, or a `round` of a scheme."""
        return "step" if self.program.round is None else "round"

    @cached_property
    def allocations(self) -> tuple[Allocation, ...]:
        allocations: tuple[Allocation, ...] = self._decoded(tuple[Allocation, ...], "allocations")
        return allocations

    @cached_property
    def decisions(self) -> tuple[Decision, ...]:
        decisions: tuple[Decision, ...] = self._decoded(tuple[Decision, ...], "decisions")
        return decisions

    @cached_property
    def cycles(self) -> dict[str, PhaseCycles]:
        """Machine code of the phases, empty when the plan was compiled without it."""
        cycles: dict[str, PhaseCycles] = self._decoded(dict[str, PhaseCycles], CYCLES)
        return cycles

    @cached_property
    def target(self) -> Target:
        return load_target(str(self.plan["target"]))

    def _decoded(self, expected: Any, key: str) -> Any:
        try:
            return decode(expected, self.plan.get(key, {}), key)
        except DecodeError as error:
            # The digest holds, so nobody changed it: the records of another mkc are different.
            problem = f"is of another version of mkc: {error}"
            raise PlanVersionError(path=self.path / PLAN, problem=problem) from error


def read_folder(path: Path) -> PlanFolder:
    """Reads a folder of `mkc compile`.

    Raises:
      PlanFolderError: there is no such folder, or a file is missing.
      PlanVersionError: another version of mkc wrote it.
      PlanDamagedError: a file is truncated or was changed.
    """
    if not path.is_dir():
        problem = "is not a folder" if path.exists() else "does not exist"
        raise PlanFolderError(path=path, problem=problem)
    plan = _document(path, PLAN)
    version = plan.get("version")
    if version != PLAN_VERSION:
        found = "names no version" if version is None else f"has version {version!r}"
        problem = f"{found} of the form, not {PLAN_VERSION}"
        raise PlanVersionError(path=path / PLAN, problem=problem)
    _check_digest(plan, path / PLAN)
    report = _document(path, REPORT)
    _check_digest(report, path / REPORT)
    if report[OF_PLAN] != plan[DIGEST]:
        raise PlanDamagedError(path=path / REPORT, problem=f"is of another {PLAN}")
    return PlanFolder(path=path, plan=plan, report=report, kernel_source=_text(path, KERNEL))


def _document(folder: Path, name: str) -> dict[str, Any]:
    text = _text(folder, name)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        problem = f"is truncated or not JSON ({error})"
        raise PlanDamagedError(path=folder / name, problem=problem) from error
    if not isinstance(document, dict):
        raise PlanDamagedError(path=folder / name, problem="is no JSON object")
    return document


def _check_digest(document: Mapping[str, Any], path: Path) -> None:
    try:
        holds = document.get(DIGEST) == digest(document)
    except RecursionError:  # nested deeper than JSON is written, though not than it is read
        holds = False
    if not holds:
        problem = "was changed after mkc compile wrote it (its digest differs)"
        raise PlanDamagedError(path=path, problem=problem)


def _text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise PlanFolderError(path=folder, problem=f"has no {name}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise PlanDamagedError(path=folder / name, problem=f"cannot be read ({error})") from error
