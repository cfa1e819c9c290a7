"""An early cut of a block of drafts changes how many there are, not how emitted tokens are
distributed, because a draft's confidence is known before the random number that judges the draft.

A target of a few tokens, whose next token depends on the one before, and a drafter that is often
wrong; twenty thousand sequences side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.ir.acceptance import accept
from mkc.ir.counter_random import ACCEPT
from mkc.ir.counter_random import uniform
from mkc.ir.ops_markov import CutDrafts
from tests.codegen_pallas.round_reference import meaning

VOCAB, ROWS, SEQUENCES = 4, 4, 20_000
LENGTH = 3  # emitted tokens that are looked at, of each sequence
THRESHOLD = 0.5
START = 1  # the first anchor
# [token before, token]: what the target thinks, what the drafter proposes, how sure it is.
LOGITS = np.array([[2, 1, 0, -1], [0, 0.5, 1, 0], [1, -1, 1, 2], [0, 0, 0, 3]], np.float32)
PROPOSED = np.array([0, 1, 3, 2], np.int32)
SURE = np.array([0.9, 0.3, 0.6, 0.2], np.float32)

type Judge = Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], Any]


def by_the_token_before(tokens: NDArray[Any], positions: NDArray[Any], seeds: NDArray[Any]) -> Any:
    """Confidences [sequences, rows], as those of a drafter: of what stands before a draft."""
    return np.concatenate([np.ones_like(SURE[tokens[:, :1]]), SURE[tokens[:, :-1]]], axis=1)


def by_the_random_numbers(
    tokens: NDArray[Any], positions: NDArray[Any], seeds: NDArray[Any]
) -> Any:
    """What a drafter must not look at: those drafts are sure that will be accepted with luck."""
    return 1 - uniform(seeds[:, None], positions, ACCEPT, jnp.zeros_like(positions))


def emitted_by_rounds(judge: Judge, threshold: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """The first tokens of each sequence [sequences, LENGTH]; drafts per round [rounds, sequences].

    Each round looks at the drafts of the round before, as rounds of a scheme do.
    """
    seeds = np.stack([np.arange(SEQUENCES), np.full(SEQUENCES, 7)], axis=1).astype(np.int32)
    ones = np.ones(SEQUENCES, np.float32)
    options = (ones, np.zeros(SEQUENCES, np.int32), ones, 0 * ones, seeds)

    cut = CutDrafts(threshold=threshold, rows=ROWS)
    accepted = jax.jit(partial(accept, rows=ROWS))

    def one_round(anchor: NDArray[Any], first: NDArray[Any]) -> tuple[NDArray[Any], ...]:
        tokens = [anchor]
        for _ in range(ROWS - 1):
            tokens.append(PROPOSED[tokens[-1]])
        block = np.stack(tokens, axis=1)
        positions = (first[:, None] + np.arange(ROWS)).astype(np.int32)
        confidence = np.asarray(judge(block, positions, seeds))
        (kept,), _ = meaning(cut, (positions.reshape(-1), confidence.reshape(-1)))
        logits = LOGITS[block].reshape(-1, VOCAB)
        emitted, count, _ = accepted(logits, block.reshape(-1), kept, *options)
        drafts = (kept.reshape(-1, ROWS)[:, 1:] >= 0).sum(axis=1)
        return np.asarray(emitted).reshape(-1, ROWS), np.asarray(count), drafts

    found = np.full((SEQUENCES, LENGTH + ROWS), -1)
    lengths, drafts = np.zeros(SEQUENCES, np.int32), []
    anchor, everybody = np.full(SEQUENCES, START, np.int32), np.arange(SEQUENCES)
    while lengths.min() < LENGTH:
        emitted, count, there = one_round(anchor, lengths)
        for row in range(ROWS):
            mine = (row < count) & (lengths + row < found.shape[1])
            found[mine, (lengths + row)[mine]] = emitted[mine, row]
        anchor, lengths = emitted[everybody, count - 1], lengths + count
        drafts.append(there)
    return found[:, :LENGTH], np.stack(drafts)


def statistic(tokens: NDArray[Any]) -> float:
    """Chi-squared of whole beginnings, beside decoding one token after another."""
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    total = 0.0
    for beginning in product(range(VOCAB), repeat=LENGTH):
        chain = (START, *beginning)
        expected = SEQUENCES * np.prod([p[one] for one in zip(chain, chain[1:], strict=False)])
        count = (tokens == np.array(beginning)).all(axis=1).sum()
        total += float((count - expected) ** 2 / expected)
    return total


FREEDOM = VOCAB**LENGTH - 1
LIMIT = FREEDOM + 5 * np.sqrt(2 * FREEDOM)


@pytest.mark.parametrize("threshold", [0.0, THRESHOLD, 0.95])
def test_a_cut_leaves_the_distribution_of_plain_decoding(threshold: float) -> None:
    """Without a cut, with one that ends some blocks, and with one that leaves no draft."""
    tokens, drafts = emitted_by_rounds(by_the_token_before, threshold)
    expected = {0.0: {ROWS - 1}, THRESHOLD: {0, 1, 2, 3}, 0.95: {0}}
    assert set(np.unique(drafts)) <= expected[threshold]
    assert statistic(tokens) < LIMIT


def test_cuts_that_know_the_random_numbers_change_it() -> None:
    tokens, _ = emitted_by_rounds(by_the_random_numbers, THRESHOLD)
    assert statistic(tokens) > 10 * LIMIT
