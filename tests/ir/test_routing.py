"""How many experts a step reads, and how many of them fall on one group of devices."""

from __future__ import annotations

from itertools import combinations
from itertools import product
from math import comb

import pytest

from mkc.ir.cost_experts import distinct_experts
from mkc.ir.routing import Routing
from mkc.ir.routing import distinct_distribution
from mkc.ir.routing import mean_distinct
from mkc.ir.routing import mean_fullest


def enumerated(experts: int, chosen: int, rows: int, groups: int) -> tuple[float, float]:
    """Mean number of different experts, and of those in the fullest group, over all choices."""
    size = experts // groups
    distinct = fullest = 0
    sets = list(combinations(range(experts), chosen))
    for choice in product(sets, repeat=rows):
        found = set().union(*choice)
        distinct += len(found)
        fullest += max(sum(one // size == group for one in found) for group in range(groups))
    return distinct / len(sets) ** rows, fullest / len(sets) ** rows


@pytest.mark.parametrize(
    ("experts", "chosen", "rows", "groups"),
    [(6, 2, 1, 3), (6, 2, 2, 2), (8, 3, 2, 4), (6, 1, 3, 6), (4, 4, 2, 2)],
)
def test_means_are_those_of_all_choices(experts: int, chosen: int, rows: int, groups: int) -> None:
    distinct, fullest = enumerated(experts, chosen, rows, groups)
    assert mean_distinct(experts, chosen, rows, Routing.UNIFORM) == pytest.approx(distinct)
    assert mean_fullest(experts, chosen, rows, groups, Routing.UNIFORM) == pytest.approx(fullest)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, {1: 16, 2: 9.6, 4: 6.1, 8: 4.2, 16: 3.1, 32: 2.3}),
        (8, {1: 120, 2: 64, 4: 35, 8: 20, 16: 12.2, 32: 7.8}),
    ],
)
def test_means_of_published_draws(rows: int, expected: dict[int, float]) -> None:
    """A Monte Carlo simulation of 896 experts with 16 active, which had a figure or two less."""
    for groups, fullest in expected.items():
        found = mean_fullest(896, 16, rows, groups, Routing.UNIFORM)
        assert found == pytest.approx(fullest, abs=0.5 if fullest > 19 else 0.1)


def test_rows_that_are_alike_read_what_one_row_reads() -> None:
    for groups in (1, 4, 8):
        alike = mean_fullest(64, 6, 8, groups, Routing.ALIKE)
        assert alike == pytest.approx(mean_fullest(64, 6, 1, groups, Routing.UNIFORM))
        assert alike < mean_fullest(64, 6, 8, groups, Routing.UNIFORM)


def test_a_distribution_has_its_closed_mean_and_sums_to_one() -> None:
    for experts, chosen, rows in ((896, 16, 8), (32, 4, 3), (5, 5, 4)):
        found = distinct_distribution(experts, chosen, rows, Routing.UNIFORM)
        assert sum(found) == pytest.approx(1.0)
        closed = distinct_experts(experts, chosen, rows)
        assert mean_distinct(experts, chosen, rows, Routing.UNIFORM) == pytest.approx(closed)


def test_one_row_splits_as_the_hypergeometric_distribution_says() -> None:
    """Two groups of 448: at most m of 16 in either, in closed form."""
    expected = 0.0
    for first in range(17):
        ways = comb(448, first) * comb(448, 16 - first) / comb(896, 16)
        expected += max(first, 16 - first) * ways
    assert mean_fullest(896, 16, 1, 2, Routing.UNIFORM) == pytest.approx(expected)
