"""Exchanges between 1, 2, 3 and 8 ranks: sums bit-identical and in rank order, global argmax."""

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
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run
from tests.codegen_pallas.support_run import run_ranks

MODES = pytest.mark.parametrize("mode", [Mode.LATE, Mode.EAGER])
RANKS = pytest.mark.parametrize("ranks", [1, 2, 3, 8])
STEPS = 2  # loop steps of two exchanges each: every buffer is used again


def in_rank_order(values: np.ndarray) -> np.ndarray:
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


@MODES
@RANKS
@pytest.mark.parametrize("rows", [1, 8])
def test_one_shot_sums_in_rank_order(rows: int, ranks: int, mode: Mode) -> None:
    """Exchange n adds n to what the ranks hold, so that a stale buffer would show."""
    width = 256
    x = np.random.default_rng(ranks).normal(size=(ranks, rows, width)).astype(np.float32)

    def body(x: Any, out: Any, send: Any, even: Any, odd: Any, sems: Any) -> None:
        s.entry_barrier(ranks)

        def step(index: jax.Array, carry: jax.Array) -> jax.Array:
            for parity, receive in enumerate((even, odd)):
                exchange = 2 * index + parity
                out[exchange] = s.all_reduce_one_shot(
                    x[...] + exchange.astype(jnp.float32),
                    send=send,
                    receive=receive,
                    send_sem=sems.at[2],
                    receive_sem=sems.at[parity],
                    ranks=ranks,
                )
            return carry

        lax.fori_loop(0, STEPS, step, jnp.int32(0))

    receive = VMEM((ranks, rows, width), jnp.float32)
    (out,) = run_ranks(
        body,
        operands=[(x, VMEM)],
        results=[((2 * STEPS, rows, width), jnp.float32, VMEM)],
        scratch=[
            VMEM((rows, width), jnp.float32),
            receive,
            receive,
            pltpu.SemaphoreType.DMA((3,)),
        ],
        barrier=ranks > 1,
        mode=mode,
    )
    for exchange in range(2 * STEPS):
        expected = in_rank_order(x + np.float32(exchange))
        for rank in range(ranks):
            np.testing.assert_array_equal(out[rank, exchange], expected)


@MODES
@RANKS
@pytest.mark.parametrize("rounded", [False, True])
def test_two_phase_rounds_the_sum_once(rounded: bool, ranks: int, mode: Mode) -> None:
    """The same buffers serve consecutive exchanges. Partial sums are `rounded` where they have a
    buffer to be sent from."""
    sent = jnp.bfloat16 if rounded else jnp.float32
    width = 128 * ranks
    x = np.random.default_rng(ranks).normal(size=(ranks, 8, width)).astype(np.float32)

    def body(x: Any, out: Any, *scratch: Any) -> None:
        partial, parts, scattered, send, gathered, sems = scratch
        s.entry_barrier(ranks)

        def step(index: jax.Array, carry: jax.Array) -> jax.Array:
            partial[...] = x[...] + index.astype(jnp.float32)
            out[index] = s.all_reduce_two_phase(
                partial,
                parts=parts if rounded else None,
                scattered=scattered,
                send=send,
                gathered=gathered,
                scatter_send_sem=sems.at[0],
                scatter_receive_sem=sems.at[1],
                gather_send_sem=sems.at[2],
                gather_receive_sem=sems.at[3],
                ranks=ranks,
            )
            return carry

        lax.fori_loop(0, 2 * STEPS, step, jnp.int32(0))

    columns = width // ranks
    (out,) = run_ranks(
        body,
        operands=[(x, VMEM)],
        results=[((2 * STEPS, 8, width), jnp.float32, VMEM)],
        scratch=[
            VMEM((8, width), jnp.float32),
            VMEM((8, width), jnp.bfloat16),
            VMEM((ranks, 8, columns), sent),
            VMEM((8, columns), jnp.bfloat16),
            VMEM((ranks, 8, columns), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((4,)),
        ],
        barrier=ranks > 1,
        mode=mode,
    )
    for exchange in range(2 * STEPS):
        partial_sums = x + np.float32(exchange)
        if rounded and ranks > 1:
            partial_sums = partial_sums.astype(ml_dtypes.bfloat16).astype(np.float32)
        expected = in_rank_order(partial_sums).astype(ml_dtypes.bfloat16)
        for rank in range(ranks):
            np.testing.assert_array_equal(out[rank, exchange], expected.astype(np.float32))


@pytest.mark.parametrize("mode", [Mode.LATE, Mode.GENERIC])
@pytest.mark.parametrize(
    ("start", "width", "valid"),
    [(0, 1024, 1024), (128, 512, 300), (0, 300, 300), (64, 40, 33), (0, 768, 1)],
)
def test_local_argmax(start: int, width: int, valid: int, mode: Mode) -> None:
    """The lowest of equal columns wins; columns from `valid` on and the neighbours do not count."""
    random = np.random.default_rng(width)
    x = random.integers(-4, 4, size=(8, 1152)).astype(np.float32)
    view = x[:, start : start + width]
    x[:, start + width :] = 99
    x[:, :start] = 99
    view[:, valid:] = 50
    view[1, :] = -np.inf
    view[2, valid - 1] = 40
    view[3, [0, valid // 2, valid - 1]] = 41

    def body(x: Any, best: Any, index: Any) -> None:
        best[...], index[...] = s.local_argmax(s.View(ref=x, start=start, width=width), valid)

    best, index = run(
        body,
        operands=[(x, VMEM)],
        results=[((8, 1), jnp.float32, VMEM), ((8, 1), jnp.int32, VMEM)],
        mode=mode,
    )
    np.testing.assert_array_equal(index[:, 0], view[:, :valid].argmax(1))
    np.testing.assert_array_equal(best[:, 0], view[:, :valid].max(1))


@MODES
@pytest.mark.parametrize(("ranks", "batch"), [(1, 8), (2, 3), (3, 8), (8, 1), (8, 8)])
def test_sharded_argmax_agrees_on_all_ranks(batch: int, ranks: int, mode: Mode) -> None:
    """Two exchanges with different buffers; the second one sees negated values."""
    columns = 256
    random = np.random.default_rng(ranks)
    x = random.integers(-9, 9, size=(ranks, 8, columns)).astype(np.float32)  # many ties
    x[0, 0] = -20
    x[-1, 0, 7] = 20

    def body(x: Any, first: Any, second: Any, send: Any, even: Any, odd: Any, sems: Any) -> None:
        s.entry_barrier(ranks)
        logits = s.View(ref=x, start=0, width=columns)
        for parity, (receive, out) in enumerate(((even, first), (odd, second))):
            best, index = s.local_argmax(logits, columns)
            index = s.sharded_argmax(
                best,
                index,
                send=send,
                receive=receive,
                send_sem=sems.at[2],
                receive_sem=sems.at[parity],
                ranks=ranks,
                columns_per_rank=columns,
            )
            s.store_tokens(index, out, batch)
            x[...] = -x[...]

    receive = VMEM((ranks, 16, 128), jnp.int32)
    results = run_ranks(
        body,
        operands=[(x, VMEM)],
        results=[((batch,), jnp.int32, SMEM)] * 2,
        scratch=[
            VMEM((16, 128), jnp.int32),
            receive,
            receive,
            pltpu.SemaphoreType.DMA((3,)),
        ],
        barrier=ranks > 1,
        mode=mode,
    )
    joined = np.concatenate(x, axis=1)[:batch]
    for got, values in zip(results, (joined, -joined), strict=True):
        for rank in range(ranks):
            np.testing.assert_array_equal(got[rank], values.argmax(1))
