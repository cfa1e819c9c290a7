"""Long lists of tensor names, written shortly and completely."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from re import split

import pytest
from hypothesis import HealthCheck
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

from mkc.errors.tensor_names import grouped_names

NUMBERS = strategies.integers(0, 12)
NAMES = strategies.one_of(
    strategies.builds("layers.{}.experts.{}.w".format, NUMBERS, NUMBERS),
    strategies.builds("layers.{}.norm".format, NUMBERS),
    strategies.sampled_from(["lm_head", "7", "a..b", "layers.07.norm", "x.٣", ""]),
)


def expanded(written: str) -> Iterable[str]:
    """The names that a group stands for."""
    parts = [_choices(one) for one in split(r"(\{[^}]*\})", written)]
    return ["".join(one) for one in product(*parts)]


def _choices(part: str) -> list[str]:
    if not part.startswith("{"):
        return [part]
    found: list[str] = []
    for run in part.strip("{}").split(","):
        first, _, last = run.partition("..")
        found += [str(one) for one in range(int(first), int(last or first) + 1)]
    return found


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(strategies.sets(NAMES, max_size=20))
def test_groups_are_exactly_the_names(names: set[str]) -> None:
    groups = grouped_names(sorted(names))
    found = [name for written, _ in groups for name in expanded(written)]
    assert sorted(found) == sorted(names)
    assert [count for _, count in groups] == [len(list(expanded(one))) for one, _ in groups]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([f"layers.{n}.w" for n in range(93)], [("layers.{0..92}.w", 93)]),
        (["layers.3.w"], [("layers.3.w", 1)]),
        ([f"layers.{n}.w" for n in (0, 1, 2, 4, 5, 9)], [("layers.{0..2,4..5,9}.w", 6)]),
        (["a.0.b", "a.1.c"], [("a.0.b", 1), ("a.1.c", 1)]),
    ],
)
def test_numbers_of_one_place(names: list[str], expected: list[tuple[str, int]]) -> None:
    assert grouped_names(names) == expected


def test_several_places() -> None:
    names = [f"layers.{layer}.experts.{one}.w" for layer in range(93) for one in range(896)]
    assert grouped_names(names) == [("layers.{0..92}.experts.{0..895}.w", 93 * 896)]
    names.remove("layers.7.experts.12.w")
    assert grouped_names(names) == [
        ("layers.{0..6,8..92}.experts.{0..895}.w", 92 * 896),
        ("layers.7.experts.{0..11,13..895}.w", 895),
    ]
