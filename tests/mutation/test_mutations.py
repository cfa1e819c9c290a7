"""Every kind of mistake is found, and by the check that is meant to find it.

`docs/verifier.md` has the table of kinds and checks; it is compared with what happens here.
"""

from __future__ import annotations

import re
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
HEADING = ("| mistake | found by | also by |", "|---|---|---|")
CODE = re.compile(r"\bV\d\d\d\b")
KINDS_WANTED = 25


@cache
def codes(mutation: Mutation, name: str) -> tuple[str, ...]:
    """The checks that name a mutant, in order of their codes."""
    mutant = mutation.make(subject(name))
    proof = prove(mutant.programs, load_target(TARGET), edit=mutant.edit)
    return tuple(sorted({one.code for one in proof.issues}))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_mutant_is_found(mutation: Mutation) -> None:
    """In every program, by the check that is meant to find it, and by those that the page names."""
    for name in mutation.subjects:
        assert mutation.code in codes(mutation, name), name
    assert row(mutation) in rows_of_the_page()


@pytest.mark.parametrize("name", sorted({name for one in MUTATIONS for name in one.subjects}))
def test_the_sound_programs_are_proven(name: str) -> None:
    program = subject(name)
    proof = prove([program] * program.ranks, load_target(TARGET))
    assert proof.issues == ()
    assert all(proof.checks().values())


def test_there_are_many_kinds_and_every_check_kills_one() -> None:
    assert len(MUTATIONS) >= KINDS_WANTED
    assert len({one.name for one in MUTATIONS}) == len(MUTATIONS)
    # `test_a_mutant_is_found` has seen that these do.
    killers = {code for one in rows_of_the_page()[len(HEADING) :] for code in CODE.findall(one)}
    assert CODES.keys() - killers == set()


def row(mutation: Mutation) -> str:
    found = {code for name in mutation.subjects for code in codes(mutation, name)}
    others = ", ".join(sorted(found - {mutation.code}))
    return f"| {mutation.story} | {mutation.code} | {others} |"


def table() -> str:
    """The section of the page: kinds of mistakes, and the checks that find them."""
    return "\n".join([*HEADING, *map(row, MUTATIONS)]) + "\n"


@cache
def rows_of_the_page() -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].splitlines()


def test_the_table_on_the_page_is_this_one() -> None:
    """To renew it: print `table()` and put it between the two marks. `test_a_mutant_is_found` has
    looked at what else finds a mistake."""
    heading, rows = rows_of_the_page()[: len(HEADING)], rows_of_the_page()[len(HEADING) :]
    assert heading == list(HEADING)
    kinds = [tuple(one.split(" | ")[:2]) for one in rows]
    assert kinds == [(f"| {one.story}", one.code) for one in MUTATIONS]
