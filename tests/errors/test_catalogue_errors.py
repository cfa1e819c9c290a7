"""Rules for all errors together: codes, constructors, and a test for each."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter
from inspect import signature
from pathlib import Path
from re import findall
from re import fullmatch

import pytest

from mkc import errors
from mkc.errors import MkcError

HERE = Path(__file__).parent


def subclasses(of: type[MkcError]) -> Iterator[type[MkcError]]:
    for one in of.__subclasses__():
        yield one
        yield from subclasses(one)


ALL = sorted(set(subclasses(MkcError)), key=lambda one: one.__name__)
RAISED = [one for one in ALL if not one.__subclasses__()]


def test_every_error_is_defined_in_the_one_module() -> None:
    """`mkc.errors` has them all, whichever of its files defines them."""
    assert {one.__module__.rpartition(".")[0] for one in ALL} == {errors.__name__}
    assert [one.__name__ for one in ALL if getattr(errors, one.__name__, None) is not one] == []


def test_codes_are_unique_and_well_formed() -> None:
    codes = [one.code for one in ALL]
    assert len(set(codes)) == len(codes)
    assert [code for code in codes if not fullmatch(r"E[1-9]\d\d", code)] == []
    assert [one.__name__ for one in ALL if "code" not in vars(one)] == []


@pytest.mark.parametrize("error", RAISED, ids=lambda one: one.__name__)
def test_constructors_take_keywords_only(error: type[MkcError]) -> None:
    parameters = list(signature(error).parameters.values())
    assert parameters
    assert {one.kind for one in parameters} == {Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("error", RAISED, ids=lambda one: one.__name__)
def test_every_error_has_a_program_in_this_folder(error: type[MkcError]) -> None:
    programs = "".join(
        path.read_text(encoding="utf-8")
        for path in sorted(HERE.glob("test_*.py"))
        if path != Path(__file__)
    )
    # Imported, and named again where it is expected.
    assert len(findall(rf"\b{error.__name__}\b", programs)) >= 2


def test_the_report_has_the_code_and_the_message() -> None:
    error = errors.BatchError(batch=9)
    assert error.report() == f"error[E131]: {error}"
    assert str(error) == error.message
