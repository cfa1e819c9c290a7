"""Drafts corrected by the token before, over several ranks, and their cut, against their reference
meaning."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from mkc.ir.ops_markov import CutDrafts
from mkc.ir.ops_markov import MarkovWalk
from mkc.ir.types import DType
from tests.codegen_pallas.round_reference import meaning
from tests.codegen_pallas.round_reference import padded
from tests.codegen_pallas.support_run import HBM
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import run
from tests.codegen_pallas.support_run import run_ranks

RANK, WIDTH = 16, 40  # of the correction; of hidden


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("ranks", "batch", "rows", "rounds"),
    [
        pytest.param(1, 1, 8, True, id="one rank"),
        pytest.param(4, 2, 3, True, id="four ranks"),
        pytest.param(2, 9, 2, False, id="more sequences than a register has rows"),
    ],
)
def test_walk(ranks: int, batch: int, rows: int, rounds: bool) -> None:
    check_walk(ranks, batch, rows, rounds)


def check_walk(ranks: int, batch: int, rows: int, rounds: bool) -> None:
    """Corrections are as large as logits, and both have few values, so that there are ties."""
    random = np.random.default_rng(ranks)
    columns = 128
    vocabulary = ranks * columns
    logits = random.integers(-6, 6, size=(batch * rows, vocabulary)).astype(np.float32)
    predecessor, successor = (
        bf16(random.integers(-1, 2, size=(vocabulary, RANK)).astype(np.float32) / scale)
        for scale in (1, 2)
    )
    hidden = random.normal(size=(batch * rows, WIDTH)).astype(np.float32)
    head = random.normal(size=(1, WIDTH + RANK)).astype(np.float32)
    bias = np.array([0.25], np.float32)
    tokens = random.integers(0, vocabulary, size=batch * rows).astype(np.int32)
    height = -(-batch // 8) * 8
    exchanged = (2 * height, 128)

    def body(tokens: Any, logits: Any, hidden: Any, head: Any, bias: Any, *rest: Any) -> None:
        successor, predecessor, out, confidence, previous, scores, *buffers, sems = rest
        send, receive, exchanged = buffers
        s.entry_barrier(ranks)
        s.markov_walk(
            s.View(ref=logits, start=0, width=columns),
            s.View(ref=hidden, start=0, width=WIDTH),
            judge=(s.View(ref=confidence, start=0, width=128), head[...], bias[...]),
            predecessor=predecessor,
            successor=successor,
            previous=previous,
            scores=scores,
            sems=sems,
            exchanges=tuple(
                s.Exchange(
                    send=send.at[turn],
                    receive=receive.at[turn],
                    send_sem=exchanged.at[turn, 0],
                    receive_sem=exchanged.at[turn, 1],
                )
                for turn in range(2 if ranks > 1 else 0)
            ),
            tokens=tokens,
            out=out,
            batch=batch,
            rows_per_sequence=rows,
            ranks=ranks,
            rounds=rounds,
        )

    def everywhere(x: np.ndarray) -> np.ndarray:
        return np.stack([x] * ranks)

    shards = np.split(padded(logits), ranks, axis=1)
    out, confidence = run_ranks(
        body,
        operands=[
            (everywhere(tokens), SMEM),
            (np.stack(shards), VMEM),
            (everywhere(padded(hidden)), VMEM),
            (everywhere(head), VMEM),
            (everywhere(bias[None]), VMEM),
            (np.stack(np.split(successor, ranks)), VMEM),
            (everywhere(predecessor), HBM),
        ],
        results=[
            ((batch * rows,), jnp.int32, SMEM),
            ((len(padded(hidden)), 128), jnp.float32, VMEM),
        ],
        scratch=[
            VMEM((batch, 16, RANK), jnp.bfloat16),
            VMEM((height, columns), jnp.float32),
            VMEM((2, *exchanged), jnp.int32),
            VMEM((2, ranks, *exchanged), jnp.int32),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SemaphoreType.DMA((1,)),
        ],
        barrier=ranks > 1,
    )
    dtype = DType.BF16 if rounds else DType.F32
    (expected, expected_confidence), _ = meaning(
        MarkovWalk(rows=rows),
        (logits, predecessor, successor, tokens, hidden, head, bias),
        operand_dtype=dtype,
    )
    for rank in range(ranks):
        np.testing.assert_array_equal(out[rank], expected)
        got = confidence[rank, : batch * rows]
        np.testing.assert_allclose(got[:, 0], expected_confidence, rtol=1e-5)
        np.testing.assert_array_equal(got, np.broadcast_to(got[:, :1], got.shape))


def test_cut() -> None:
    check_cut()


def check_cut() -> None:
    """Nothing cut, everything, from the middle on; row 0 stays; padding stays padding."""
    rows, threshold = 4, 0.5
    confidence = np.array(
        [[1, 0.9, 0.5, 0.6], [1, 0.4, 0.9, 0.9], [0.1, 0.6, 0.2, 0.9], [1, 0.9, 0.9, 0.9]],
        np.float32,
    )
    positions = np.array([[7, 8, 9, 10], [0, 1, 2, 3], [4, 5, 6, 7], [3, 4, -1, -1]], np.int32)
    batch = len(positions)
    wide = np.repeat(padded(confidence.reshape(-1, 1)), 128, axis=1)

    def body(positions: Any, confidence: Any, out: Any) -> None:
        s.cut_drafts(
            positions,
            s.View(ref=confidence, start=0, width=128),
            out,
            threshold=threshold,
            batch=batch,
            rows_per_sequence=rows,
        )

    (out,) = run(
        body,
        operands=[(positions.reshape(-1), SMEM), (wide, VMEM)],
        results=[((batch * rows,), jnp.int32, SMEM)],
    )
    op = CutDrafts(threshold=threshold, rows=rows)
    (expected,), _ = meaning(op, (positions.reshape(-1), confidence.reshape(-1)))
    np.testing.assert_array_equal(out, expected)
    assert (out.reshape(batch, rows) >= 0).sum(1).tolist() == [4, 1, 2, 2]
