"""Verification of a kernel."""

from __future__ import annotations

from typing import ClassVar

from mkc.errors.base import MkcError
from mkc.errors.base import Place
from mkc.errors.base import sentence


class KernelFileError(MkcError):
    """The kernel file to verify cannot be used."""

    code: ClassVar[str] = "E370"

    def __init__(self, *, path: Place, problem: str) -> None:
        super().__init__(
            f"kernel {path}: {sentence(problem)} Expected a kernel.py that mkc compile wrote, "
            f"edited or not. Name such a file, or leave out --kernel."
        )


class LintError(MkcError):
    """The kernel has what works in interpret mode only."""

    code: ClassVar[str] = "E372"

    def __init__(self, *, model: str, issue: str, count: int) -> None:
        super().__init__(
            f"model '{model}': the kernel would not do on a TPU what it does in interpret mode, "
            f"{count} rules are broken. {sentence(issue)} Expected a kernel that passes the lint; "
            f"mkc verify with the same options lists all of it. Other options (--batch, --tp, "
            f"--passes) may lead to one; if none do, please report it as a fault of mkc."
        )


class ProofError(MkcError):
    """The passes made a program that does not hold what it must."""

    code: ClassVar[str] = "E371"

    def __init__(self, *, model: str, issue: str, count: int) -> None:
        super().__init__(
            f"model '{model}': the plan cannot be proven, {count} statements do not hold. "
            f"{sentence(issue)} This is a fault of mkc, not of the model: expected a program that "
            f"passes mkc verify. mkc verify with the same options lists everything; please report "
            f"it. Other options (--batch, --tp, --passes) may lead to a plan that holds."
        )
