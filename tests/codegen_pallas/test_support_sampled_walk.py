"""Drafts that are drawn inside a kernel, and what they were drawn from."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from mkc.codegen_pallas.support.sampled_walk import sampled_walk
from mkc.ir.acceptance import walk
from tests.codegen_pallas.round_reference import padded
from tests.codegen_pallas.support_run import HBM
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

VOCABULARY = 64


@pytest.mark.parametrize(
    ("rank", "k", "mode"), [(32, 12, Mode.LATE), (16, 16, Mode.GENERIC), (16, 3, Mode.GENERIC)]
)
def test_a_walk_draws_what_the_reference_draws(rank: int, k: int, mode: Mode) -> None:
    """Four sequences: two that sample, a cold one and a greedy one; some positions rest."""
    batch, rows = 4, 5
    random = np.random.default_rng(k)
    books = [random.normal(size=(VOCABULARY, rank)).astype(ml_dtypes.bfloat16) for _ in range(2)]
    count = batch * rows
    values = random.normal(size=(count, k)).astype(np.float32)
    ids = np.stack([random.permutation(VOCABULARY)[:k] for _ in range(count)]).astype(np.int32)
    hidden = random.normal(size=(count, rank)).astype(ml_dtypes.bfloat16).astype(np.float32)
    tokens = random.integers(VOCABULARY, size=count).astype(np.int32)
    positions = (np.arange(count) + 70).astype(np.int32)
    positions[-2:] = -1
    temperature = np.array([4.0, 9.0, 0.02, 0.0], np.float32)
    seed = random.integers(-(2**31), 2**31, size=(batch, 2)).astype(np.int32)

    def body(tokens: Any, positions: Any, temperature: Any, seed: Any, *rest: Any) -> None:
        values, ids, hidden, predecessor, successor, out, proposal, *scratch = rest
        names = ("candidate_ids", "previous", "candidates", "sems")
        sampled_walk(
            s.View(ref=values, start=0, width=128),
            s.View(ref=ids, start=0, width=128),
            s.View(ref=hidden, start=0, width=rank),
            proposal=s.View(ref=proposal, start=0, width=k),
            temperature=temperature,
            seed=seed,
            positions=positions,
            predecessor=predecessor,
            successor=successor,
            tokens=tokens,
            out=out,
            batch=batch,
            rows_per_sequence=rows,
            k=k,
            **dict(zip(names, scratch, strict=True)),
        )

    wide_values, wide_ids = (
        np.full((count, 128), np.nan, np.float32),
        np.full((count, 128), 1 << 30),
    )
    wide_values[:, :k], wide_ids[:, :k] = values, ids
    size = -(-count // 8) * 8
    found, proposal = run(
        body,
        operands=[
            *[(one, SMEM) for one in (tokens, positions, temperature, seed.reshape(-1))],
            *[(padded(one), VMEM) for one in (wide_values, wide_ids, hidden)],
            *[(book, HBM) for book in books],
        ],
        results=[((count,), jnp.int32, SMEM), ((size, k), jnp.float32, VMEM)],
        scratch=[
            SMEM((size, 128), jnp.int32),
            VMEM((batch, 16, rank), jnp.bfloat16),
            VMEM((2, batch * k * 16, rank), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((4,)),
        ],
        mode=mode,
    )
    operands = (values, ids, hidden, *books, tokens, positions, temperature, seed)
    wanted, wanted_proposal = walk(*(jnp.asarray(one) for one in operands), rows=rows)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_allclose(proposal[:count], wanted_proposal, rtol=1e-5, atol=1e-7)
    greedy, _ = walk(*(jnp.asarray(one) for one in operands[:-2]), rows=rows)
    same = (found == np.asarray(greedy)).reshape(batch, rows).all(1)
    assert same.tolist() == [False, False, True, True]  # what is drawn is not the best
