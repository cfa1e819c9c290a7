"""What two kernels touch is compared between waits, array by array."""

from __future__ import annotations

import pytest

from mkc.schedule.verify.accesses import READ
from mkc.schedule.verify.accesses import WRITE
from mkc.schedule.verify.accesses import Access
from mkc.schedule.verify.accesses import access_difference

LEFT, RIGHT = ((0, 8), (0, 128)), ((0, 8), (128, 128))
WAIT = Access(kind="wait", array="", part=("ring", 0))


def read(array: str, part: tuple[object, ...] = LEFT) -> Access:
    return Access(kind=READ, array=array, part=part)


def write(array: str, part: tuple[object, ...] = LEFT) -> Access:
    return Access(kind=WRITE, array=array, part=part)


KERNEL = [read("a"), write("b", LEFT), write("b", RIGHT), WAIT, read("b"), write("c")]


@pytest.mark.parametrize(
    "other",
    [
        KERNEL,
        [write("b", LEFT), read("a"), write("b", RIGHT), WAIT, read("b"), write("c")],
        [read("a"), read("a"), write("b", LEFT), write("b", RIGHT), WAIT, write("c")],
    ],
    ids=["the same", "another order of arrays", "reads left out and repeated"],
)
def test_the_same(other: list[Access]) -> None:
    assert access_difference(KERNEL, other) is None


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ([read("b"), *KERNEL], "before copy or wait 0 it reads b (0, 8) (0, 128)"),
        ([read("a", RIGHT), *KERNEL], "before copy or wait 0 it reads a (0, 8) (128, 128)"),
        ([KERNEL[0], KERNEL[2], KERNEL[1], *KERNEL[3:]], "it writes b (0, 8) (128, 128)"),
        (KERNEL[:-1], "before copy or wait 1 it does not write c"),
        ([*KERNEL, write("d")], "before copy or wait 1 it writes d"),
        ([*KERNEL[:4], KERNEL[5], read("c")], "before copy or wait 1 it reads c"),
        ([*KERNEL[:3], *KERNEL[4:]], "before copy or wait 0 it reads b"),
        (KERNEL[:3], "copy or wait 0 is another"),
        ([*KERNEL, WAIT], "copy or wait 1 is another"),
    ],
)
def test_something_else(other: list[Access], told: str) -> None:
    problem = access_difference(KERNEL, other)
    assert problem is not None
    assert told in problem
