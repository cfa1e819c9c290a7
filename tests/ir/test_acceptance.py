"""Acceptance of drafts and the draft walk: exact cases, and distributions over many draws."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.ir.acceptance import accept
from mkc.ir.acceptance import distribution
from mkc.ir.acceptance import walk
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.sampling import kept_tokens

DRAWS = 60_000
VOCAB, ROWS = 12, 3
RANDOM = np.random.default_rng(8)
LOGITS = RANDOM.normal(size=(ROWS, VOCAB)).astype(np.float32) * 2
ACCEPT = jax.jit(partial(accept, rows=ROWS))


def run(
    tokens: list[list[int]],
    positions: list[list[int]],
    logits: NDArray[Any] | None = None,
    *,
    temperature: float | list[float] = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    candidates: NDArray[Any] | None = None,
    proposal: NDArray[Any] | None = None,
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Accepts for a batch; a sequence's number is its seed. Logits are LOGITS for all."""
    batch = len(tokens)
    rows = np.tile(LOGITS, (batch, 1)) if logits is None else logits
    optional = () if candidates is None else (candidates, proposal)
    emitted, count, last = ACCEPT(
        rows,
        np.array(tokens, np.int32).reshape(-1),
        np.array(positions, np.int32).reshape(-1),
        np.broadcast_to(np.array(temperature, np.float32), batch),
        np.full(batch, top_k, np.int32),
        np.full(batch, top_p, np.float32),
        np.full(batch, min_p, np.float32),
        np.stack([np.arange(batch), np.zeros(batch)], axis=1).astype(np.int32),
        *optional,
    )
    return np.asarray(emitted).reshape(batch, -1), np.asarray(count), np.asarray(last)


BEST: list[int] = LOGITS.argmax(-1).tolist()
OTHER = next(one for one in range(VOCAB) if one not in BEST)


# Greedy.


@pytest.mark.parametrize(
    ("drafts", "expected"),
    [
        (BEST[:2], BEST),
        ([BEST[0], OTHER], BEST[:2]),
        ([OTHER, BEST[1]], BEST[:1]),  # what comes behind a wrong draft does not count
    ],
)
def test_greedy_acceptance(drafts: list[int], expected: list[int]) -> None:
    emitted, count, last = run([[4, *drafts]], [[9, 10, 11]])
    assert count.tolist() == [len(expected)]
    assert emitted[0].tolist() == expected + [-1] * (ROWS - len(expected))
    assert last.tolist() == expected[-1:]


def test_padding_rows_are_no_drafts() -> None:
    """Also when their token is the right one; a sequence of padding emits nothing."""
    tokens = [[4, *BEST[:2]]] * 3
    emitted, count, last = run(tokens, [[9, 10, -1], [9, -1, -1], [-1, -1, -1]])
    assert count.tolist() == [2, 1, 0]
    assert emitted.tolist() == [[*BEST[:2], -1], [BEST[0], -1, -1], [-1, -1, -1]]
    assert last.tolist() == [BEST[1], BEST[0], -1]


def test_ties_take_the_lowest_id() -> None:
    _, _, last = run([[0, 1, 2]], [[0, -1, -1]], np.zeros((ROWS, VOCAB), np.float32))
    assert last.tolist() == [0]


def test_greedy_and_sampled_sequences_side_by_side() -> None:
    tokens, positions = [[4, *BEST[:2]]] * 2, [[9, 10, 11]] * 2
    emitted, _, _ = run(tokens, positions, temperature=[0.0, 1.0])
    alone, _, _ = run(tokens[:1], positions[:1])
    assert emitted[0].tolist() == alone[0].tolist()


# What is drawn from.


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 4},
        {"temperature": 1.3, "top_p": 0.7},
        {"temperature": 0.9, "min_p": 0.1},
        {"temperature": 1.5, "top_k": 9, "min_p": 0.05, "top_p": 0.8},
        {"temperature": 1e-3},
        {"temperature": 5.0, "top_p": 1e-6},
        {"temperature": 2.0, "top_k": 1},
    ],
)
def test_filters_are_those_of_sampling_on_the_host(params: dict[str, Any]) -> None:
    """Same tokens, same probabilities; some logits are equal."""
    logits = np.round(RANDOM.normal(size=(20, 50)) * 4).astype(np.float32) / 2
    rows = len(logits)
    found = distribution(
        jnp.asarray(logits),
        jnp.full(rows, params["temperature"], jnp.float32),
        jnp.full(rows, params.get("top_k", 0), jnp.int32),
        jnp.full(rows, params.get("top_p", 1.0), jnp.float32),
        jnp.full(rows, params.get("min_p", 0.0), jnp.float32),
    )
    for row, mine in zip(logits, np.asarray(found), strict=True):
        ids, probabilities = kept_tokens(row, SamplingParams(**params))
        kept = np.flatnonzero(mine > 0)
        assert set(kept) <= set(ids)
        # An f32 underflows where an f64 does not.
        assert mine[np.setdiff1d(ids, kept)].sum() == 0
        np.testing.assert_allclose(mine[ids], probabilities, rtol=2e-5, atol=1e-30)


# Distributions. The bounds on sums of squares have probability below 1e-6.


def target(rows: NDArray[Any] = LOGITS, **params: Any) -> NDArray[np.float64]:
    """The distribution behind each row, [rows, vocab]."""
    found = np.zeros((ROWS, VOCAB))
    for row, logits in zip(found, rows, strict=True):
        ids, probabilities = kept_tokens(logits, SamplingParams(**params))
        row[ids] = probabilities
    return found


def chi_squared(counts: NDArray[Any], probabilities: NDArray[Any]) -> float:
    expected = probabilities * counts.sum()
    assert counts[expected == 0].sum() == 0
    some = expected > 0
    return float(((counts - expected)[some] ** 2 / expected[some]).sum())


def draws(q: NDArray[Any]) -> NDArray[Any]:
    """One draft per sequence and row from q [rows, vocab], [DRAWS, rows]."""
    return np.stack([RANDOM.choice(VOCAB, DRAWS, p=one / one.sum()) for one in q], axis=1)


PROPOSALS = {
    "near": np.exp(LOGITS * 0.7),
    "flat": np.ones((ROWS, VOCAB)),
    "narrow": np.where(np.arange(VOCAB) < 3, 1.0, 0.0) * np.ones((ROWS, 1)),
    "far": np.exp(-LOGITS),
}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.1},
]


@pytest.mark.parametrize("params", SAMPLINGS, ids=str)
@pytest.mark.parametrize("kind", [*PROPOSALS, "certain", "none"])
def test_emitted_tokens_have_the_targets_distribution(kind: str, params: dict[str, Any]) -> None:
    """The first token always, and the second one whenever the first draft was accepted.

    The logits do not depend on the drafts here, so the second token's distribution must be that of
    row 1 for every first token.
    """
    p = target(**params)
    ids = np.tile(np.arange(VOCAB), (DRAWS * ROWS, 1)).astype(np.int32)
    positions = np.tile([5, 6, 7], (DRAWS, 1))
    extra: dict[str, Any] = {}
    if kind == "none":
        drafts, positions[:, 1:] = np.zeros((DRAWS, ROWS), int), -1
    elif kind == "certain":
        drafts = np.tile([0, BEST[0], BEST[1]], (DRAWS, 1))
    else:
        q = PROPOSALS[kind] / PROPOSALS[kind].sum(-1, keepdims=True)
        drafts = draws(q)
        extra = {"candidates": ids, "proposal": np.tile(q, (DRAWS, 1)).astype(np.float32)}
    emitted, count, _ = run(drafts.tolist(), positions.tolist(), **params, **extra)
    first = np.bincount(emitted[:, 0], minlength=VOCAB)
    assert chi_squared(first, p[0]) < 55  # at most 11 degrees of freedom
    if kind == "none":
        assert (count == 1).all()
        return
    second = emitted[count >= 2, 1]
    assert chi_squared(np.bincount(second, minlength=VOCAB), p[1]) < 55
    if not second.size:
        assert kind == "narrow"  # whose tokens the filters may all remove
        return
    # Both together: what was emitted first says nothing about what comes second.
    pairs = np.bincount(emitted[count >= 2, 0] * VOCAB + second, minlength=VOCAB**2)
    marginal = np.bincount(emitted[count >= 2, 0], minlength=VOCAB) / (count >= 2).sum()
    joint = np.outer(marginal, p[1]).reshape(-1)
    likely = joint * pairs.sum() > 5
    expected = joint[likely] * pairs.sum()
    statistic = float(((pairs[likely] - expected) ** 2 / expected).sum())
    freedom = max(1, likely.sum() - 1)
    assert statistic < freedom + 7 * np.sqrt(2 * freedom)
    if kind != "certain":
        shared = np.minimum(p[0], q[1]).sum()
        assert abs((count >= 2).mean() - shared) < 5 * np.sqrt(0.25 / DRAWS)


ALLOWED = np.array([np.arange(VOCAB) % 3 != row for row in range(ROWS)])


@pytest.mark.parametrize("params", SAMPLINGS, ids=str)
def test_masked_rows_have_the_masked_distribution(params: dict[str, Any]) -> None:
    """Drafts are made without masks: many are not allowed, and none of these is accepted.

    A mask depends on the drafts before its row, which are those that are accepted where it counts.
    So row 1 allows all behind an even draft, and what `ALLOWED` says behind an odd one.
    """
    q = PROPOSALS["near"] / PROPOSALS["near"].sum(-1, keepdims=True)
    drafts = draws(q)
    minus = np.float32(-np.inf)
    masked = np.where(ALLOWED, LOGITS, minus)
    rows = np.tile(masked, (DRAWS, 1, 1))
    rows[drafts[:, 1] % 2 == 0, 1] = LOGITS[1]
    emitted, count, _ = run(
        drafts.tolist(),
        np.tile([5, 6, 7], (DRAWS, 1)).tolist(),
        rows.reshape(DRAWS * ROWS, VOCAB),
        candidates=np.tile(np.arange(VOCAB), (DRAWS * ROWS, 1)).astype(np.int32),
        proposal=np.tile(q, (DRAWS, 1)).astype(np.float32),
        **params,
    )
    first = np.bincount(emitted[:, 0], minlength=VOCAB)
    assert chi_squared(first, target(masked, **params)[0]) < 55
    assert (~ALLOWED[0, drafts[:, 1]]).mean() > 0.05, "all drafts were allowed"
    for parity, logits in ((0, LOGITS), (1, masked)):
        mine = emitted[(count >= 2) & (emitted[:, 0] % 2 == parity), 1]
        assert len(mine) > 1000
        p = target(logits, **params)[1]
        assert chi_squared(np.bincount(mine, minlength=VOCAB), p) < 55


def test_a_wrong_proposal_shows() -> None:
    """Half the probability that a draft was drawn with: it is accepted too often."""
    q = PROPOSALS["flat"] / VOCAB
    emitted, _, _ = run(
        draws(q).tolist(),
        np.tile([5, 6, 7], (DRAWS, 1)).tolist(),
        temperature=1.0,
        candidates=np.tile(np.arange(VOCAB), (DRAWS * ROWS, 1)).astype(np.int32),
        proposal=np.tile(q * 0.5, (DRAWS, 1)).astype(np.float32),
    )
    counts = np.bincount(emitted[:, 0], minlength=VOCAB)
    assert chi_squared(counts, target(temperature=1.0)[0]) > 1000


# The walk.


def walked(temperature: float, batch: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Tokens and proposals of a walk over 4 candidates; and its ids."""
    random = np.random.default_rng(3)
    values = np.tile(np.sort(random.normal(size=(ROWS, 4)))[:, ::-1], (batch, 1))
    ids = np.tile(np.stack([random.permutation(VOCAB)[:4] for _ in range(ROWS)]), (batch, 1))
    hidden = np.tile(random.normal(size=(ROWS, 5)), (batch, 1))
    books = random.normal(size=(2, VOCAB, 5))
    tokens, proposal = jax.jit(partial(walk, rows=ROWS))(
        *(one.astype(np.float32) for one in (values,)),
        ids.astype(np.int32),
        hidden.astype(np.float32),
        books[0].astype(np.float32),
        books[1].astype(np.float32),
        np.full(batch * ROWS, 7, np.int32),
        np.tile(np.arange(ROWS) + 20, batch).astype(np.int32),
        np.full(batch, temperature, np.float32),
        np.stack([np.arange(batch), np.ones(batch)], axis=1).astype(np.int32),
    )
    shape = (batch, ROWS)
    assert (np.asarray(tokens).reshape(shape)[:, 0] == 7).all()
    return np.asarray(tokens).reshape(shape), np.asarray(proposal).reshape(*shape, 4), ids[:ROWS]


def test_a_sampled_walk_draws_from_its_proposal() -> None:
    """Each row from the proposal that it reports, given the token before it."""
    tokens, proposal, ids = walked(0.8, DRAWS)
    for row in range(1, ROWS):
        previous = tokens[:, row - 1]
        for before in np.unique(previous):
            mine = previous == before
            q = proposal[mine, row]
            assert np.ptp(q, axis=0).max() == 0
            if mine.sum() < 1000:
                continue
            counts = (tokens[mine, row][:, None] == ids[row]).sum(0)
            assert counts.sum() == mine.sum()
            assert chi_squared(counts, q[0].astype(np.float64)) < 35  # 3 degrees of freedom


def test_a_greedy_walk_is_the_limit_of_a_cold_one() -> None:
    greedy, certain, _ = walked(0.0, 3)
    cold, _, _ = walked(1e-4, 3)
    assert greedy.tolist() == cold.tolist()
    assert certain[:, 1:].max(-1).tolist() == [[1.0] * (ROWS - 1)] * 3
    assert certain.sum() == 3 * (ROWS - 1)
