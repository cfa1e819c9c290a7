"""What the host does with a round that the kernel did not decide."""

from __future__ import annotations

import numpy as np
import pytest

from mkc.ir.acceptance import accept
from mkc.runtime.finish_round import SequenceSampling
from mkc.runtime.finish_round import decided_tokens
from mkc.runtime.finish_round import forced_tokens
from mkc.runtime.finish_round import undecided

ROWS, VOCAB, CANDIDATES = 4, 50, 3
RANDOM = np.random.default_rng(6)


@pytest.mark.parametrize("proposed", [True, False], ids=["proposal", "certain drafts"])
def test_the_tokens_are_those_of_the_reference(proposed: bool) -> None:
    """Of a sequence among others, which it does not depend on."""
    batch = 5
    logits = RANDOM.normal(size=(batch * ROWS, VOCAB)).astype(np.float32)
    candidates = np.argsort(-np.roll(logits, 1, axis=0), axis=1)[:, :CANDIDATES].astype(np.int32)
    proposal = RANDOM.dirichlet(np.ones(CANDIDATES), batch * ROWS).astype(np.float32)
    tokens = candidates[:, 0].copy()
    positions = np.tile(np.arange(ROWS, dtype=np.int32) + 9, batch)
    positions[-1] = -1
    heat, top_k = np.full(batch, 0.8, np.float32), np.full(batch, 20, np.int32)
    top_p, min_p = np.full(batch, 0.9, np.float32), np.full(batch, 0.01, np.float32)
    seed = RANDOM.integers(-(2**31), 2**31, size=(batch, 2)).astype(np.int32)
    extra = (candidates, proposal) if proposed else ()
    options = (heat, top_k, top_p, min_p, seed)
    emitted, count, _ = accept(logits, tokens, positions, *options, *extra, rows=ROWS)
    wanted = np.asarray(emitted).reshape(batch, ROWS)
    for sequence in range(batch):
        rows = slice(sequence * ROWS, (sequence + 1) * ROWS)
        found = decided_tokens(
            logits[rows],
            tokens[rows],
            positions[rows],
            SequenceSampling(
                temperature=0.8,
                top_k=20,
                top_p=0.9,
                min_p=0.01,
                seed=(int(seed[sequence, 0]), int(seed[sequence, 1])),
            ),
            (candidates[rows], proposal[rows]) if proposed else None,
        )
        np.testing.assert_array_equal(found, wanted[sequence, : count[sequence]])
    assert len(set(np.asarray(count).tolist())) > 1


def test_who_was_left_to_the_host() -> None:
    """0 emitted, 1 did not, 2 ended before, 3 has had its rounds."""
    counts = np.array([[2, 1, 1, 1], [1, 0, 0, 0]], np.int32)
    positions = np.array([5, 6, 9, 10, -1, -1, 7, 8], np.int32)
    assert undecided(counts, positions, [2, 2, 2, 1]) == [1]
    assert undecided(counts[:1], positions, [2, 2, 2, 1]) == []
    assert undecided(counts[:0], positions, [2, 2, 2, 1]) == []


def test_what_the_next_launch_is_told() -> None:
    found = forced_tokens(3, 4, {1: np.array([7, 8]), 2: np.array([1, 2, 3, 4])})
    assert found.tolist() == [-1] * 4 + [7, 8, -1, -1] + [1, 2, 3, 4]
