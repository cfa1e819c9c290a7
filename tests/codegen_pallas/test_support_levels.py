"""Sums within groups of ranks and then between them, against sums in that order by numpy."""

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
from mkc.ir.types import DType
from mkc.schedule.exchange_plan import ExchangePlan
from mkc.schedule.exchange_plan import exchange_buffers
from mkc.schedule.exchange_plan import scattered_columns
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run_ranks

RANKS, GROUP, WIDTH, STEPS = 4, 2, 320, 3
NUMPY = {DType.F32: np.dtype(np.float32), DType.BF16: np.dtype(ml_dtypes.bfloat16)}


def in_levels(x: np.ndarray, wire: DType) -> np.ndarray:
    """The sum over the first axis: of a group, then of all groups; parts travel as `wire`."""
    sent = x.astype(NUMPY[wire]).astype(np.float32).reshape(-1, GROUP, *x.shape[1:])
    sums = sent[:, 0]
    for place in range(1, GROUP):
        sums = sums + sent[:, place]
    sums = sums.astype(NUMPY[wire]).astype(np.float32)
    total = sums[0]
    for group in range(1, len(sums)):
        total = total + sums[group]
    return total


@pytest.mark.parametrize("wire", [DType.F32, DType.BF16])
@pytest.mark.parametrize(("kind", "rows"), [("two_level", 8), ("two_step", 1)])
def test_parts_travel_as_the_buffers_say(kind: str, rows: int, wire: DType) -> None:
    """Two sets of buffers in turn; nothing of an earlier exchange is left in the sum."""
    columns = scattered_columns(WIDTH, GROUP)
    plan = ExchangePlan(
        name="", kind=kind, rows=rows, columns=columns, safe_because="", group=GROUP, wire=wire
    )
    buffers = exchange_buffers(plan, RANKS)
    names = [suffix for suffix, *_ in buffers]
    x = np.random.default_rng(1).normal(size=(RANKS, rows, WIDTH)).astype(np.float32)

    def body(x: Any, out: Any, *scratch: Any) -> None:
        s.entry_barrier(RANKS)
        half = len(scratch) // 2

        def turns(index: jax.Array, carry: jax.Array) -> jax.Array:
            for parity in (0, 1):
                *arrays, sems = scratch[parity * half : (parity + 1) * half]
                number = 2 * index + parity
                sum_of = getattr(s, f"all_reduce_{kind}")
                out[number] = sum_of(
                    x[...] * (1.0 + number.astype(jnp.float32)),
                    **dict(zip(names, arrays, strict=True)),
                    sems=sems,
                    ranks=RANKS,
                    group=GROUP,
                )
            return carry

        lax.fori_loop(0, STEPS, turns, jnp.int32(0))

    one_set = [
        *(VMEM(shape, jnp.dtype(NUMPY[dtype])) for _, shape, dtype in buffers),
        pltpu.SemaphoreType.DMA((plan.semaphores,)),
    ]
    (out,) = run_ranks(
        body,
        operands=[(x, VMEM)],
        results=[((2 * STEPS, rows, WIDTH), jnp.float32, VMEM)],
        scratch=[*one_set, *one_set],
        barrier=True,
        mode=Mode.LATE,
    )
    for number in range(2 * STEPS):
        expected = in_levels(x * np.float32(1 + number), wire)
        for rank in range(RANKS):
            np.testing.assert_array_equal(out[rank, number], expected)
