"""Plan folders, and what is shown of them."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar

from mkc.errors.base import MkcError
from mkc.errors.base import Place
from mkc.errors.base import listed


class PlanFolderError(MkcError):
    """A folder that `mkc compile` did not write, or not completely."""

    code: ClassVar[str] = "E340"

    def __init__(self, *, path: Place, problem: str) -> None:
        super().__init__(
            f"plan folder {path}: {problem}; expected a folder that mkc compile wrote. "
            f"Name the folder that it printed as 'written to', or compile again."
        )


class PlanVersionError(MkcError):
    """A plan of another version of mkc."""

    code: ClassVar[str] = "E341"

    def __init__(self, *, path: Place, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}; expected a plan in the form that this mkc writes. "
            f"Compile again, or use the mkc that wrote it."
        )


class PlanDamagedError(MkcError):
    """A file of a plan folder is truncated, or was changed."""

    code: ClassVar[str] = "E342"

    def __init__(self, *, path: Place, problem: str) -> None:
        super().__init__(
            f"{path}: {problem}; expected the file as mkc compile wrote it. Compile again; "
            f"to change a plan, change the options of mkc compile."
        )


class UnknownDecisionError(MkcError):
    """A name that no decision of the plan has."""

    code: ClassVar[str] = "E343"

    def __init__(self, *, name: str, path: Place, known: Iterable[str]) -> None:
        names = list(known)
        close = get_close_matches(name, names, n=3, cutoff=0.4)
        super().__init__(
            f"no decision of plan {path} is named '{name}'; expected the name of a decision, or a "
            f"part of it.{listed('similar', close)} `mkc explain {path}` lists all {len(names)}."
        )


class PicturesError(MkcError):
    """The folder for pictures cannot be written."""

    code: ClassVar[str] = "E345"

    def __init__(self, *, path: Place, problem: str) -> None:
        super().__init__(
            f"pictures cannot be written to {path}: {problem}; expected a folder, or a place where "
            f"one can be made. Choose another with --out."
        )


class EmitError(MkcError):
    """The file for `--emit` cannot be written."""

    code: ClassVar[str] = "E346"

    def __init__(self, *, path: Place, problem: str) -> None:
        super().__init__(
            f"--out {path} cannot be written: {problem}; with --emit, expected the name of a file "
            f"in a folder that can be written. Choose another, or leave --out out to print."
        )


class MissingPackageError(MkcError):
    """A feature needs a Python package that is not installed."""

    code: ClassVar[str] = "E344"

    def __init__(self, *, feature: str, package: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs the package {package}, which is not installed; expected mkc to be "
            f"installed with its extra '{extra}'. Run: pip install 'mkc-tpu[{extra}]'"
        )
