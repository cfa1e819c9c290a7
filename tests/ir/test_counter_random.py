"""Random numbers that are functions of what they are for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mkc.ir.counter_random import ACCEPT
from mkc.ir.counter_random import CHOICE
from mkc.ir.counter_random import DRAFT
from mkc.ir.counter_random import exponential
from mkc.ir.counter_random import race
from mkc.ir.counter_random import threefry
from mkc.ir.counter_random import uniform
from mkc.ir.counter_random import words

DRAWS = 100_000
ALL_ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ALL_ONES, ALL_ONES), (ALL_ONES, ALL_ONES), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(
    key: tuple[int, int], counter: tuple[int, int], expected: tuple[int, int]
) -> None:
    """The vectors that the authors of the generator published for 20 rounds."""
    found = threefry(
        (jnp.uint32(key[0]), jnp.uint32(key[1])), (jnp.uint32(counter[0]), jnp.uint32(counter[1]))
    )
    assert tuple(int(one) for one in found) == expected


def numbers(stream: int = CHOICE) -> tuple[jax.Array, jax.Array, int, jax.Array]:
    """Arguments for DRAWS numbers: positions of one seed."""
    return jnp.array([7, -3], jnp.int32), jnp.arange(DRAWS), stream, jnp.zeros(DRAWS, jnp.int32)


def test_uniform_numbers_fill_the_range() -> None:
    found = np.asarray(uniform(*numbers()))
    assert 0 <= found.min() < 1e-4
    assert 1 - 1e-4 < found.max() < 1
    counts, _ = np.histogram(found, bins=100, range=(0, 1))
    assert chi_squared(counts, np.full(100, 0.01)) < CHI_SQUARED_99


# With 99 degrees of freedom a sum of squares above this has probability 1e-6.
CHI_SQUARED_99 = 180.8


def chi_squared(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float((((counts - expected) ** 2)[expected > 0] / expected[expected > 0]).sum())


def test_every_argument_matters() -> None:
    seed, place = jnp.array([1, 2], jnp.int32), jnp.int32(5)
    base = words(seed, place, DRAFT, jnp.int32(9))
    others = [
        words(jnp.array([2, 2], jnp.int32), place, DRAFT, jnp.int32(9)),
        words(jnp.array([1, 3], jnp.int32), place, DRAFT, jnp.int32(9)),
        words(seed, jnp.int32(6), DRAFT, jnp.int32(9)),
        words(seed, place, ACCEPT, jnp.int32(9)),
        words(seed, place, DRAFT, jnp.int32(10)),
    ]
    assert all(int(one[0]) != int(base[0]) for one in others)


def test_streams_are_independent() -> None:
    first, second = (np.asarray(uniform(*numbers(one))) for one in (ACCEPT, CHOICE))
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(DRAWS)


def test_exponential_numbers() -> None:
    """Mean and variance 1; the smallest of many is not rounded to zero."""
    found = np.asarray(exponential(*numbers()), np.float64)
    assert found.min() > 0
    assert abs(found.mean() - 1) < 5 / np.sqrt(DRAWS)
    assert abs(found.var() - 1) < 5 * np.sqrt(8 / DRAWS)


def test_a_race_draws_from_the_distribution() -> None:
    probabilities = np.array([0.5, 0.0, 0.3, 0.15, 0.049, 0.001], np.float32)
    seed, positions, stream, _ = numbers()
    drawn = jax.jit(race, static_argnums=3)(
        jnp.broadcast_to(probabilities, (DRAWS, 6)),
        jnp.broadcast_to(seed, (DRAWS, 2)),
        positions,
        stream,
        jnp.arange(6),
    )
    counts = np.bincount(np.asarray(drawn), minlength=6)
    assert counts[1] == 0
    assert chi_squared(counts, probabilities) < 35  # 4 degrees of freedom, probability 5e-7


def test_a_race_does_not_depend_on_how_the_tokens_are_spread() -> None:
    """Each rank finds its own winner; the smallest time of all ranks wins."""
    p = np.random.default_rng(0).random(64, np.float32)
    seed, ids = jnp.array([3, 4], jnp.int32), jnp.arange(64)
    for position in range(20):
        place = jnp.int32(position)
        whole = int(race(jnp.asarray(p), seed, place, CHOICE, ids))
        times = np.asarray(exponential(seed, place, CHOICE, ids)) / p
        shards = [(times[s].min(), 16 * n + times[s].argmin()) for n, s in enumerate(SHARDS)]
        assert min(shards)[1] == whole


SHARDS = [slice(16 * rank, 16 * rank + 16) for rank in range(4)]
