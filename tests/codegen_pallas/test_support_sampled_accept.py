"""Acceptance by sampling inside a kernel: the reference's tokens, and the target's distribution."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mkc.codegen_pallas.support import sampled_accept
from mkc.codegen_pallas.support.race import race
from mkc.ir.acceptance import distribution
from tests.codegen_pallas.sampled_kernel import Drawn
from tests.codegen_pallas.sampled_kernel import certain
from tests.codegen_pallas.sampled_kernel import joined
from tests.codegen_pallas.sampled_kernel import meaning_of
from tests.codegen_pallas.sampled_kernel import random_drawn
from tests.codegen_pallas.sampled_kernel import run_accept
from tests.codegen_pallas.support_run import Mode

Arrays = dict[str, np.ndarray]
Results = tuple[np.ndarray, ...]


def mixed(random: np.random.Generator, shape: tuple[int, int]) -> Arrays:
    """Filters that are off or on, and sequences that are greedy."""
    return {
        "temperature": random.choice([0, 0.5, 1, 1.7], shape).astype(np.float32),
        "top_k": random.choice([0, 0, 1, 6, 20], shape).astype(np.int32),
        "top_p": random.choice([1, 1, 0.9, 0.5], shape).astype(np.float32),
        "min_p": random.choice([0, 0, 0.05], shape).astype(np.float32),
    }


def alike(**values: float) -> Any:
    """The same options for all sequences; what is not named is off."""
    kinds = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def options(_: np.random.Generator, shape: tuple[int, int]) -> Arrays:
        return {name: np.full(shape, (off | values)[name], kinds[name]) for name in off}

    return options


def assert_same(drawn: Drawn, found: Results, *, undecided: float) -> None:
    """Tokens of the reference for every sequence with a margin, but for some that are undecided."""
    wanted = meaning_of(drawn)
    shape = drawn.top_k.shape
    stuck = (found[1] == 0) & (wanted[1] > 0)
    compared = certain(drawn) & ~stuck
    assert stuck.mean() <= undecided
    assert compared.mean() > 0.97 - undecided
    for got, expected in zip(found, wanted, strict=True):
        same = (got == expected).reshape(*shape, -1).all(-1)
        assert same[compared].all()
    assert (found[0].reshape(*shape, -1)[stuck] == -1).all()
    assert (found[2][stuck] == -1).all()


# Launches of several cases. Those of one rank are one launch, because they take long to compile.

SHAPE: dict[str, Any] = {"batch": 6, "length": 4, "vocab": 1000, "candidates": 4}
LISTED = 128
COMBINATIONS = np.array(
    list(product([0, 0.6, 1.4], [0, 1, 7, 9999], [1, 0.8, 0.3], [0, 0.04, 0.5])), np.float32
)


def every_combination(_: np.random.Generator, shape: tuple[int, int]) -> Arrays:
    """Of filters, one for each sequence."""
    each = (one.reshape(shape) for one in COMBINATIONS.T)
    found = dict(zip(("temperature", "top_k", "top_p", "min_p"), each, strict=True))
    return found | {"top_k": found["top_k"].astype(np.int32)}


def flat_options(_: np.random.Generator, shape: tuple[int, int]) -> Arrays:
    """Three sequences that need more than `LISTED` of many nearly equal logits, three that do not.

    Temperature 0 needs one, top-k says how many, and without filters nothing needs to be looked at.
    """
    each = {
        "temperature": [1, 1, 1, 0, 1, 1],
        "top_k": [0, LISTED + 1, 0, 0, LISTED, 0],
        "top_p": [0.9, 1, 1, 0.9, 0.9, 1],
        "min_p": [0, 0, 0.5, 0.5, 0.5, 0],
    }
    dtype = {"top_k": np.int32}
    return {
        name: np.broadcast_to(np.array(one, dtype.get(name, np.float32)), shape)
        for name, one in each.items()
    }


def unneeded_row() -> Drawn:
    """A sharp row whose draft is impossible, and a flat one behind it."""
    drawn = random_drawn(cases=4, options=alike(top_p=0.9), **SHAPE)
    rows = drawn.tokens.shape
    logits = drawn.logits * np.float32(0.001)
    logits[:, :: SHAPE["length"], 1] = 40
    return replace(
        drawn,
        logits=logits,
        tokens=np.full(rows, 7, np.int32),
        positions=np.tile(np.arange(4, dtype=np.int32), (4, 6)),
        candidates=np.tile(np.array([7, 8, 9, 10], np.int32), (*rows, 1)),
    )


def told() -> Drawn:
    """Flat rows; sequence 0 is told two tokens, 1 is told four, 2 rests, 3 is told nothing."""
    drawn = random_drawn(cases=2, options=alike(top_p=0.9), spread=0.01, **SHAPE)
    positions = [[5, 6, -1, -1], [3, 4, 5, 6], [-1] * 4, [8, -1, -1, -1], [-1] * 4, [-1] * 4]
    forced = [[31, 32, -1, -1], [41, 42, 43, 44], [51, 52, -1, -1], *[[-1] * 4] * 3]
    return replace(
        drawn,
        positions=np.tile(np.array(positions, np.int32).reshape(-1), (2, 1)),
        forced=np.tile(np.array(forced, np.int32).reshape(-1), (2, 1)),
    )


def masked(drawn: Drawn, *, allowed: int) -> Drawn:
    """At most so many tokens of each row are allowed, often the draft behind it is one of them.

    Everything is allowed in a quarter of the rows, a single token in another one.
    """
    random = np.random.default_rng(6)
    cases, rows, vocab = drawn.logits.shape
    some = random.integers(1, vocab, (cases, rows, allowed))
    some[:, :, 0] = np.where(random.random((cases, rows)) < 0.6, np.roll(drawn.tokens, -1, 1), 0)
    kind = random.integers(0, 4, (cases, rows, 1))
    some = np.where(kind == 0, some[:, :, :1], some)
    mask = np.zeros(drawn.logits.shape, bool)
    np.put_along_axis(mask, some, True, axis=2)
    return replace(drawn, logits=np.where(mask | (kind == 1), drawn.logits, np.float32(-np.inf)))


@cache
def launched() -> dict[str, tuple[Drawn, Results]]:
    """All of the following, by name, with what the kernel made of it."""
    everything = {
        "mixed": random_drawn(cases=100, options=mixed, **SHAPE),
        "combinations": random_drawn(cases=18, options=every_combination, number=4, **SHAPE),
        "flat": random_drawn(cases=6, options=flat_options, spread=0.01, number=5, **SHAPE),
        "masked": masked(random_drawn(cases=50, options=mixed, number=7, **SHAPE), allowed=30),
        "unneeded": unneeded_row(),
        "told": told(),
    }
    found = run_accept(joined(list(everything.values())), ranks=1, listed=LISTED)
    ends = np.cumsum([len(one.tokens) for one in everything.values()])[:-1]
    parts = zip(*(np.split(one, ends) for one in found), strict=True)
    return dict(zip(everything, zip(everything.values(), parts, strict=True), strict=True))


def test_tokens_are_those_of_the_reference() -> None:
    """600 sequences with options of their own; columns that fill no register, and drafts."""
    drawn, found = launched()["mixed"]
    assert_same(drawn, found, undecided=0.05)
    assert (np.bincount(found[1].reshape(-1), minlength=5) > 0).all()


def test_all_combinations_of_filters() -> None:
    """And temperature 0 is greedy, whatever the filters say."""
    drawn, found = launched()["combinations"]
    assert_same(drawn, found, undecided=0.05)
    cold = drawn.temperature == 0
    assert cold.sum() == len(COMBINATIONS) / 3
    greedy = meaning_of(replace(drawn, temperature=np.zeros_like(drawn.temperature)))
    np.testing.assert_array_equal(found[1][cold], greedy[1][cold])
    np.testing.assert_array_equal(found[2][cold], greedy[2][cold])


def test_flat_rows_are_undecided_where_filters_need_more() -> None:
    """Then nothing is emitted; the other sequences are as ever."""
    drawn, (emitted, count, last) = launched()["flat"]
    wanted = meaning_of(drawn)
    assert (wanted[1][:, :3] > 0).any(0).all()
    assert not count[:, :3].any()
    assert (emitted.reshape(6, 6, -1)[:, :3] == -1).all()
    assert (last[:, :3] == -1).all()
    np.testing.assert_array_equal(count[:, 3:], wanted[1][:, 3:])
    np.testing.assert_array_equal(last[:, 3:], wanted[2][:, 3:])


def test_masked_tokens_are_never_drawn() -> None:
    """Fewer tokens than are looked at, so that every row which is masked is decided."""
    drawn, found = launched()["masked"]
    assert_same(drawn, found, undecided=0.03)
    assert (np.bincount(found[1].reshape(-1), minlength=5)[:4] > 0).all()


def test_a_row_that_is_not_needed_need_not_be_decided() -> None:
    _, (_, count, last) = launched()["unneeded"]
    assert (count == 1).all()
    assert (last == 1).all()


def test_what_is_forced_is_emitted() -> None:
    """By sequences that do not rest, also where nothing is decided."""
    _, (emitted, count, last) = launched()["told"]
    assert emitted.tolist() == [[31, 32, -1, -1, 41, 42, 43, 44, *[-1] * 16]] * 2
    assert count.tolist() == [[2, 4, 0, 0, 0, 0]] * 2
    assert last.tolist() == [[32, 44, -1, -1, -1, -1]] * 2


def test_drafts_may_be_certain() -> None:
    drawn = random_drawn(
        cases=60, batch=2, length=3, vocab=300, candidates=None, options=mixed, number=3
    )
    assert_same(drawn, run_accept(drawn, ranks=1, listed=LISTED), undecided=0.05)


@pytest.mark.parametrize(("ranks", "mode"), [(2, Mode.LATE), (3, Mode.EAGER), (4, Mode.LATE)])
def test_tokens_do_not_depend_on_the_ranks(ranks: int, mode: Mode) -> None:
    """Several cases in one launch, so that every buffer is used again.

    In half of them few tokens are allowed, in many rows none of some rank.
    """
    shape: dict[str, Any] = {"batch": 3, "length": 3, "vocab": 80 * ranks, "candidates": 5}
    plain, other = (
        random_drawn(cases=4, options=mixed, number=number, **shape)
        for number in (ranks, 10 + ranks)
    )
    drawn = joined([plain, masked(other, allowed=3)])
    assert (drawn.logits[:, :, :80] == -np.inf).all(2).any(), "no rank has nothing"
    found = run_accept(drawn, ranks=ranks, listed=LISTED // ranks, mode=mode)
    assert_same(drawn, found, undecided=0.1)


def test_equal_logits_are_kept_by_their_ids() -> None:
    """top-k cuts between tokens of the same logit, also between those of two ranks."""
    drawn = random_drawn(
        cases=12, batch=8, length=1, vocab=64, candidates=None, options=alike(top_k=5)
    )
    logits = np.where(np.arange(64) % 16 < 4, 2.0, 1.0) * np.ones_like(drawn.logits)
    positions = np.arange(drawn.positions.size).reshape(drawn.positions.shape)
    drawn = replace(drawn, logits=logits.astype(np.float32), positions=positions.astype(np.int32))
    found = run_accept(drawn, ranks=2, listed=16, mode=Mode.EAGER)
    for got, expected in zip(found, meaning_of(drawn), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert set(found[2].reshape(-1)) == {0, 1, 2, 3, 16}


# Distributions. The bounds on sums of squares have probability below 1e-6.

VOCAB, LENGTH, BATCH = 12, 2, 16
DRAWS = 50_400  # of each pair
RANDOM = np.random.default_rng(8)
LOGITS = (RANDOM.normal(size=(LENGTH, VOCAB)) * 2).astype(np.float32)
PROPOSALS = {
    "near": np.exp(LOGITS[0].astype(np.float64) * 0.7),
    "flat": np.ones(VOCAB),
    "far": np.exp(-LOGITS[0].astype(np.float64)),
}
FILTERS: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.1},
]
PAIRS = [("near", FILTERS[1]), ("flat", FILTERS[2]), ("far", FILTERS[0])]


def many_draws(draws: int, pairs: list[tuple[str, dict[str, float]]]) -> Drawn:
    """`draws` sequences for each pair of proposal and filters; the logits are LOGITS for all."""
    cases = len(pairs) * draws // BATCH
    shape, rows = (cases, BATCH), BATCH * LENGTH
    filters = [alike(**options)(RANDOM, (draws // BATCH, BATCH)) for _, options in pairs]
    q = np.stack([PROPOSALS[kind] / PROPOSALS[kind].sum() for kind, _ in pairs])
    chosen = np.concatenate([RANDOM.choice(VOCAB, (draws // BATCH, BATCH), p=one) for one in q])
    seed = np.stack([np.arange(cases * BATCH), np.full(cases * BATCH, 3)], axis=1)
    proposal = np.repeat(q.astype(np.float32), draws // BATCH, axis=0)
    return Drawn(
        logits=np.broadcast_to(np.tile(LOGITS, (BATCH, 1)), (1, rows, VOCAB)),
        tokens=np.stack([0 * chosen, chosen], axis=2).reshape(cases, rows).astype(np.int32),
        positions=np.tile(np.array([5, 6], np.int32), (cases, BATCH)),
        seed=seed.reshape(*shape, 2).astype(np.int32),
        candidates=np.broadcast_to(np.arange(VOCAB, dtype=np.int32), (1, rows, VOCAB)),
        proposal=np.repeat(proposal[:, None], rows, axis=1),
        forced=np.full((cases, rows), -1, np.int32),
        **{name: np.concatenate([one[name] for one in filters]) for name in filters[0]},
    )


def chi_squared(tokens: np.ndarray, probabilities: np.ndarray) -> float:
    counts = np.bincount(tokens.reshape(-1), minlength=VOCAB)
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    return float(((counts - expected)[some] ** 2 / expected[some]).sum())


def target(options: dict[str, float]) -> np.ndarray:
    """The reference distribution behind each row, [LENGTH, VOCAB]."""
    each = alike(**options)(RANDOM, (LENGTH, 1))
    names = ("temperature", "top_k", "top_p", "min_p")
    p = distribution(jnp.asarray(LOGITS), *(jnp.asarray(each[name][:, 0]) for name in names))
    return np.asarray(p, np.float64)


@cache
def drawn_tokens() -> tuple[np.ndarray, np.ndarray]:
    """Tokens [pairs, DRAWS, LENGTH], and those of drafts from "far" that are taken for flat."""
    right, wrong = many_draws(DRAWS, PAIRS), many_draws(8000, [("far", FILTERS[0])])
    wrong = replace(wrong, proposal=np.full_like(wrong.proposal, 1 / VOCAB))
    emitted, _, _ = run_accept(joined([right, wrong]), ranks=1, listed=VOCAB)
    tokens = emitted.reshape(-1, LENGTH)
    return tokens[: DRAWS * len(PAIRS)].reshape(len(PAIRS), DRAWS, LENGTH), tokens[-8000:]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_emitted_tokens_have_the_targets_distribution(pair: tuple[str, dict[str, float]]) -> None:
    """The first token always, the second one whenever the draft was accepted.

    And as many drafts are accepted as two distributions have in common.
    """
    kind, options = pair
    tokens = drawn_tokens()[0][PAIRS.index(pair)]
    p, q = target(options), PROPOSALS[kind] / PROPOSALS[kind].sum()
    assert len(tokens) >= 50_000
    assert chi_squared(tokens[:, 0], p[0]) < 55  # at most 11 degrees of freedom
    second = tokens[tokens[:, 1] >= 0, 1]
    assert chi_squared(second, p[1]) < 55
    assert abs(len(second) / DRAWS - np.minimum(p[0], q).sum()) < 5 * np.sqrt(0.25 / DRAWS)


def test_a_wrong_proposal_shows() -> None:
    """Drafts of one distribution, acceptance with another one."""
    assert chi_squared(drawn_tokens()[1][:, 0], target(FILTERS[0])[0]) > 1000


def test_a_race_without_the_proposal_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a rejected draft the token comes from what p has more than q, not from p."""

    def without(logits: Any, runner: Any, **sizes: Any) -> Any:
        return race(logits, replace(runner, proposal=0 * runner.proposal), **sizes)

    monkeypatch.setattr(sampled_accept, "race", without)
    emitted, _, _ = run_accept(many_draws(24_000, [("flat", FILTERS[0])]), ranks=1, listed=VOCAB)
    assert chi_squared(emitted.reshape(-1, LENGTH)[:, 0], target(FILTERS[0])[0]) > 1000
