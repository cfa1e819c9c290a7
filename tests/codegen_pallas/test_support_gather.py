"""Columns of 2, 3 and 8 ranks side by side, whole registers or not."""

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
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run_ranks

STEPS = 2  # loop steps of two exchanges each: every buffer is used again
ROWS = 8


@pytest.mark.parametrize("mode", [Mode.LATE, Mode.EAGER])
@pytest.mark.parametrize(("ranks", "columns"), [(2, 128), (3, 160), (8, 32)])
def test_columns_come_in_rank_order(ranks: int, columns: int, mode: Mode) -> None:
    """Exchange n adds n to what the ranks hold, so that a stale buffer would show."""
    x = np.random.default_rng(ranks).integers(0, 100, (ranks, ROWS, columns)).astype(np.float32)
    padded = -(-columns // 128) * 128

    def body(x: Any, out: Any, send: Any, even: Any, odd: Any, sems: Any) -> None:
        s.entry_barrier(ranks)

        def step(index: jax.Array, carry: jax.Array) -> jax.Array:
            for parity, receive in enumerate((even, odd)):
                exchange = 2 * index + parity
                (gathered,) = s.all_gather(
                    (x[...] + exchange.astype(jnp.float32),),
                    send=send,
                    receive=receive,
                    send_sem=sems.at[2],
                    receive_sem=sems.at[parity],
                    ranks=ranks,
                )
                out[exchange] = gathered
            return carry

        lax.fori_loop(0, STEPS, step, jnp.int32(0))

    receive = VMEM((ranks, ROWS, padded), jnp.bfloat16)
    (found,) = run_ranks(
        body,
        operands=[(x, VMEM)],
        results=[((2 * STEPS, ROWS, ranks * columns), jnp.float32, VMEM)],
        scratch=[
            VMEM((ROWS, padded), jnp.bfloat16),
            receive,
            receive,
            pltpu.SemaphoreType.DMA((3,)),
        ],
        barrier=True,
        mode=mode,
    )
    together = np.concatenate(list(x), axis=1)
    for exchange in range(2 * STEPS):
        expected = (together + exchange).astype(ml_dtypes.bfloat16).astype(np.float32)
        assert (found[:, exchange] == expected).all(), "every rank has all columns"


@pytest.mark.parametrize(("ranks", "widths"), [(2, (28, 112)), (4, (128, 8, 3))])
def test_several_values_travel_together_in_f32(ranks: int, widths: tuple[int, ...]) -> None:
    """Each comes out by itself, with all its bits."""
    x = np.random.default_rng(ranks).standard_normal((ranks, ROWS, sum(widths))).astype(np.float32)
    starts = np.cumsum((0, *widths))
    padded = -(-sum(widths) // 128) * 128

    def body(x: Any, out: Any, send: Any, receive: Any, sems: Any) -> None:
        s.entry_barrier(ranks)
        value = x[...]
        found = s.all_gather(
            [value[:, a:b] for a, b in zip(starts, starts[1:], strict=False)],
            send=send,
            receive=receive,
            send_sem=sems.at[0],
            receive_sem=sems.at[1],
            ranks=ranks,
        )
        out[...] = jnp.concatenate(found, axis=1)

    (found,) = run_ranks(
        body,
        operands=[(x, VMEM)],
        results=[((ROWS, ranks * sum(widths)), jnp.float32, VMEM)],
        scratch=[
            VMEM((ROWS, padded), jnp.float32),
            VMEM((ranks, ROWS, padded), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        barrier=True,
        mode=Mode.LATE,
    )
    parts = [x[:, :, a:b] for a, b in zip(starts, starts[1:], strict=False)]
    expected = np.concatenate([np.concatenate(list(one), axis=1) for one in parts], axis=1)
    assert (found == expected).all()
