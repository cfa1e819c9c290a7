"""Every kind of mistake is found, and by the check that is meant to find it.

`docs/verifier.md` has the table of kinds and checks; it is compared with what happens here.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from mkc.schedule.verify import CODES
from mkc.schedule.verify import prove
from mkc.targets import load_target
from tests.mutation.mutations import MUTATIONS
from tests.mutation.mutations import Mutation
from tests.mutation.subjects import subject

TARGET = "tpu7x:2x2x1"
PAGE = Path(__file__).parents[2] / "docs" / "verifier.md"
BEGIN, END = "<!-- mutants -->\n", "<!-- end of mutants -->"
KINDS_WANTED = 25


@cache
def codes(mutation: Mutation, name: str) -> tuple[str, ...]:
    """The checks that name a mutant, in order of their codes."""
    mutant = mutation.make(subject(name))
    proof = prove(mutant.programs, load_target(TARGET), edit=mutant.edit)
    return tuple(sorted({one.code for one in proof.issues}))


PAIRS = [(one, name) for one in MUTATIONS for name in one.subjects]


@pytest.mark.parametrize(
    ("mutation", "name"), PAIRS, ids=[f"{one.name}-{name}" for one, name in PAIRS]
)
def test_a_mutant_is_found(mutation: Mutation, name: str) -> None:
    assert mutation.code in codes(mutation, name)


@pytest.mark.parametrize("name", sorted({name for one in MUTATIONS for name in one.subjects}))
def test_the_sound_programs_are_proven(name: str) -> None:
    program = subject(name)
    proof = prove([program] * program.ranks, load_target(TARGET))
    assert proof.issues == ()
    assert all(proof.checks().values())


def test_there_are_many_kinds_and_every_check_kills_one() -> None:
    assert len(MUTATIONS) >= KINDS_WANTED
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS)
    killers = {code for one, name in PAIRS for code in codes(one, name)}
    assert CODES.keys() - killers == set()


def table() -> str:
    """The section of the page: kinds of mistakes, and the checks that find them."""
    lines = ["| mistake | found by | also by |", "|---|---|---|"]
    for one in MUTATIONS:
        others = sorted({code for name in one.subjects for code in codes(one, name)} - {one.code})
        lines.append(f"| {one.story} | {one.code} | {', '.join(others)} |")
    return "\n".join(lines) + "\n"


def test_the_table_on_the_page_is_this_one() -> None:
    """To renew it: print `table()` and put it between the two marks."""
    text = PAGE.read_text(encoding="utf-8")
    section = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert section == table()
