"""The list of all kinds of mutants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mkc.schedule.program import Program
from tests.mutation.edits import Mutant


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One kind of mistake.

    Attributes:
      story: what is wrong, for the table of `docs/verifier.md`.
      code: the check that must name it; others may, too.
      subjects: sound programs that it is made in.
    """

    story: str
    code: str
    subjects: tuple[str, ...]
    make: Callable[[Program], Mutant]

    @property
    def name(self) -> str:
        return self.make.__name__


MUTATIONS: list[Mutation] = []


def mutation(
    story: str, code: str, *subjects: str
) -> Callable[[Callable[[Program], Mutant]], Callable[[Program], Mutant]]:
    def register(make: Callable[[Program], Mutant]) -> Callable[[Program], Mutant]:
        MUTATIONS.append(Mutation(story=story, code=code, subjects=subjects, make=make))
        return make

    return register
