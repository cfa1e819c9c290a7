"""How many different experts a step reads, and how unevenly they fall on groups of devices.

Which experts rows choose depends on data. Two assumptions stand for it: `uniform`, where every set
of experts is equally likely and rows choose independently, and `alike`, where all rows choose the
same experts.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from math import comb
from math import exp
from math import lgamma
from math import log
from math import log1p

import numpy as np
from numpy.typing import NDArray

type Row = NDArray[np.float64]

CERTAIN = 1e-12  # what is missing of a probability of one


class Routing(StrEnum):
    """What is assumed of the choice of experts."""

    UNIFORM = "uniform"
    ALIKE = "alike"


@cache
def distinct_distribution(
    experts: int, chosen: int, rows: int, routing: Routing
) -> tuple[float, ...]:
    """Probability of d = 0, 1, .. different experts of `rows` rows that choose `chosen` each."""
    most = min(experts, chosen * rows)
    found = np.zeros(most + 1)
    found[chosen] = 1.0
    if routing is Routing.ALIKE:
        return tuple(found)
    for _ in range(1, rows):
        before, found = found, np.zeros(most + 1)
        for count in np.flatnonzero(before):
            rest = experts - int(count)
            for new in range(min(chosen, rest) + 1):
                old = chosen - new
                if old <= count and count + new <= most:
                    ways = comb(rest, new) * comb(int(count), old) / comb(experts, chosen)
                    found[count + new] += before[count] * ways
    return tuple(found)


def mean_distinct(experts: int, chosen: int, rows: int, routing: Routing) -> float:
    """Expected number of different experts."""
    found = distinct_distribution(experts, chosen, rows, routing)
    return sum(count * probability for count, probability in enumerate(found))


@cache
def mean_fullest(experts: int, chosen: int, rows: int, groups: int, routing: Routing) -> float:
    """Expected number of different experts in the group that has most of them.

    Of `experts`, `groups` equal groups of consecutive ones. Given how many different experts there
    are, all sets of so many are equally likely; the fraction of these with at most m in every group
    is a coefficient of a power of a polynomial. Its terms are those of independent choices with the
    right mean, which keeps them in the range of a float and changes no fraction.
    """
    distinct = np.array(distinct_distribution(experts, chosen, rows, routing))
    size = experts // groups
    share = mean_distinct(experts, chosen, rows, routing) / experts
    terms = np.array(_binomial(size, share)[: len(distinct)])
    all_ways = _power(terms, groups, len(distinct))
    total = 0.0
    for most in range(min(size, len(distinct) - 1)):
        ways = _power(terms[: most + 1], groups, len(distinct))
        fits = np.divide(ways, all_ways, out=np.zeros_like(ways), where=all_ways > 0)
        above = 1.0 - float(distinct @ fits)
        total += above
        if above < CERTAIN:
            break
    return total


def _binomial(trials: int, share: float) -> list[float]:
    """Probability of each number of successes."""
    if share >= 1.0:
        return [0.0] * trials + [1.0]
    return [
        exp(
            lgamma(trials + 1)
            - lgamma(count + 1)
            - lgamma(trials - count + 1)
            + count * log(share)
            + (trials - count) * log1p(-share)
        )
        for count in range(trials + 1)
    ]


def _power(terms: Row, exponent: int, length: int) -> Row:
    """The first `length` coefficients of a polynomial to the power of `exponent`."""
    result: Row = np.zeros(length)
    result[0] = 1.0
    while exponent:
        if exponent & 1:
            result = np.convolve(result, terms)[:length]
        terms = np.convolve(terms, terms)[:length]
        exponent >>= 1
    return np.pad(result, (0, length - len(result)))
