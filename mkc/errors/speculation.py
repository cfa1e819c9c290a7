"""Errors of speculative decoding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from mkc.errors.base import MkcError
from mkc.errors.base import listed
from mkc.errors.base import sentence


class DraftMismatchError(MkcError):
    """A drafter was made for another target."""

    code: ClassVar[str] = "E112"

    def __init__(self, *, drafter: str, problem: str) -> None:
        super().__init__(
            f"drafter '{drafter}' does not fit the target: {problem}. Choose the drafter that was "
            "trained for this target, or decode without one"
        )


class SchemeOptionError(MkcError):
    """Options that name no speculative scheme."""

    code: ClassVar[str] = "E113"

    def __init__(self, *, problem: str, known: Iterable[str]) -> None:
        super().__init__(
            f"{problem}; expected --spec NAME --draft CHECKPOINT, or --spec none."
            f"{listed('schemes', known)}"
        )


class NoDraftsError(MkcError):
    """Speculative decoding was asked of what decodes without drafts."""

    code: ClassVar[str] = "E114"

    def __init__(self, *, what: str, hint: str) -> None:
        super().__init__(
            f"{what} has no drafts yet: rounds with drafts run in one process. {sentence(hint)}"
        )
