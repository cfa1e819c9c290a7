"""Plans with their prediction, made once for all tests of pictures."""

from __future__ import annotations

from functools import cache

from mkc.viz.predict import subject_of
from mkc.viz.source import Subject
from tests.plan.plans import plan


@cache
def subject(name: str = "27b", *, ranks: int = 8, rounds: int = 1) -> Subject:
    """The 27B model of 64 layers on eight ranks, unless another is named."""
    return subject_of(plan(name, ranks=ranks, rounds=rounds))
