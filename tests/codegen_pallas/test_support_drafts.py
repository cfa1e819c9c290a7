"""What only a drafter's layers and its selector need, against their reference meaning."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from mkc.ir.acceptance import walk
from mkc.ir.ops_spec import DynamicConv
from mkc.ir.types import DType
from tests.codegen_pallas.round_reference import meaning
from tests.codegen_pallas.round_reference import padded
from tests.codegen_pallas.support_run import HBM
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

VOCABULARY = 160


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


def walked(
    values: np.ndarray,
    ids: np.ndarray,
    hidden: np.ndarray,
    books: tuple[np.ndarray, np.ndarray],
    tokens: np.ndarray,
    *,
    rows: int,
    mode: Mode = Mode.LATE,
) -> np.ndarray:
    """The kernel's choices, i32 [batch * rows]."""
    count, k = values.shape
    batch = count // rows
    rank = hidden.shape[1]
    wide_ids = np.full((count, 128), 2**30, np.int32)  # who reads another lane is out of bounds
    wide_ids[:, :k] = ids
    wide_values = np.full((count, 128), np.nan, np.float32)
    wide_values[:, :k] = values

    def body(tokens: Any, values: Any, ids: Any, hidden: Any, *rest: Any) -> None:
        predecessor, successor, out, candidate_ids, previous, candidates, sems = rest
        s.selector_walk(
            s.View(ref=values, start=0, width=128),
            s.View(ref=ids, start=0, width=128),
            s.View(ref=hidden, start=0, width=rank),
            predecessor=predecessor,
            successor=successor,
            candidate_ids=candidate_ids,
            previous=previous,
            candidates=candidates,
            sems=sems,
            tokens=tokens,
            out=out,
            batch=batch,
            rows_per_sequence=rows,
            k=k,
        )

    size = len(padded(wide_ids))
    (found,) = run(
        body,
        operands=[
            (tokens, SMEM),
            (padded(wide_values), VMEM),
            (padded(wide_ids), VMEM),
            (padded(hidden), VMEM),
            *[(book, HBM) for book in books],
        ],
        results=[((count,), jnp.int32, SMEM)],
        scratch=[
            SMEM((size, 128), jnp.int32),
            VMEM((batch, 16, rank), jnp.bfloat16),
            VMEM((2, batch * k * 16, rank), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((4,)),
        ],
        mode=mode,
    )
    return found


@pytest.mark.parametrize(
    ("batch", "rows", "rank", "k", "mode"),
    [
        pytest.param(1, 8, 128, 16, Mode.LATE, id="one sequence"),
        pytest.param(3, 8, 32, 5, Mode.EAGER, id="three sequences"),
        pytest.param(2, 3, 16, 8, Mode.GENERIC, id="short blocks"),
    ],
)
def test_selector_walk(batch: int, rows: int, rank: int, k: int, mode: Mode) -> None:
    random = np.random.default_rng(batch)
    books = tuple(bf16(random.normal(size=(VOCABULARY, rank))) for _ in range(2))
    values = random.normal(size=(batch * rows, k)).astype(np.float32)
    ids = np.stack([random.permutation(VOCABULARY)[:k] for _ in range(batch * rows)])
    ids = ids.astype(np.int32)
    hidden = bf16(random.normal(size=(batch * rows, rank))).astype(np.float32)
    tokens = random.integers(VOCABULARY, size=batch * rows).astype(np.int32)
    found = walked(values, ids, hidden, (books[0], books[1]), tokens, rows=rows, mode=mode)
    expected, _ = walk(
        values, ids, jnp.asarray(hidden), *(jnp.asarray(one) for one in books),
        tokens, np.zeros_like(tokens), rows=rows,
    )  # fmt: skip
    np.testing.assert_array_equal(found, np.asarray(expected))
    moved = [row for row in range(batch * rows) if row % rows and found[row] != ids[row, 0]]
    assert moved, "only first candidates: this proves nothing"


def test_selector_walk_takes_the_first_of_equal_candidates() -> None:
    """In each row's order, not in that of their ids; and a sequence may have no anchor."""
    books = (np.ones((VOCABULARY, 16)), np.ones((VOCABULARY, 16)))
    ids = np.arange(8 * 4, dtype=np.int32)[::-1].reshape(8, 4)
    values = np.zeros((8, 4), np.float32)
    values[:, 0] = -1
    tokens = np.full(8, -1, np.int32)
    found = walked(
        values, ids, np.ones((8, 16), np.float32), (bf16(books[0]), bf16(books[1])), tokens, rows=8
    )
    np.testing.assert_array_equal(found[1:], ids[1:, 1])
    assert found[0] == -1


@pytest.mark.parametrize(
    ("batch", "rows", "channels", "group", "taps"),
    [
        pytest.param(1, 8, 512, 16, 2, id="as published"),
        pytest.param(3, 8, 96, 8, 3, id="less than a register"),
        pytest.param(2, 3, 384, 128, 2, id="a kernel per register"),
        pytest.param(2, 4, 256, 1, 2, id="a kernel per channel"),
    ],
)
@pytest.mark.parametrize("side", [0, 1])
def test_dynamic_conv(
    batch: int, rows: int, channels: int, group: int, taps: int, side: int
) -> None:
    random = np.random.default_rng(channels)
    x = bf16(random.normal(size=(batch * rows, channels)))
    kernels = bf16(random.normal(size=(batch * rows, 2 * taps * channels // group)))
    base = bf16(random.normal(size=(2, taps, channels)))

    def body(x: Any, kernels: Any, base: Any, out: Any) -> None:
        out[...] = s.dynamic_conv(
            x[...],
            kernels[...],
            [base[tap : tap + 1] for tap in range(taps)],
            side=side,
            group=group,
            rows_per_sequence=rows,
        )

    wide = padded(x.astype(np.float32))
    (found,) = run(
        body,
        operands=[
            (wide, VMEM),
            (padded(kernels.astype(np.float32)), VMEM),
            (base[side].astype(np.float32), VMEM),
        ],
        results=[(wide.shape, jnp.float32, VMEM)],
        mode=Mode.GENERIC,
    )
    op = DynamicConv(side=side, group=group, rows=rows)
    (expected,), _ = meaning(op, (x, kernels, base), dtype=DType.F32)
    np.testing.assert_allclose(found[: batch * rows], expected, rtol=1e-6, atol=1e-6)


def test_taps() -> None:
    """Each execution has its place; those that nobody reads do no harm."""
    width, places = 128, (2, 1, 2, 0, 2)
    shown = np.arange(len(places), dtype=np.float32)[:, None, None] + np.ones(
        (8, width), np.float32
    )

    def body(shown: Any, out: Any, taps: Any) -> None:
        def layer(index: jax.Array, carry: jax.Array) -> jax.Array:
            s.store_tap(shown[index], taps, index, places)
            return carry

        lax.fori_loop(0, len(places), layer, jnp.int32(0))
        out[...] = taps[:, 0 : 2 * width].astype(jnp.float32)

    (found,) = run(
        body,
        operands=[(shown, VMEM)],
        results=[((8, 2 * width), jnp.float32, VMEM)],
        scratch=[VMEM((8, 3 * width), jnp.bfloat16)],
    )
    np.testing.assert_array_equal(found, np.concatenate([shown[3], shown[1]], axis=1))
