"""The largest logits of each row over all ranks, against `lax.top_k`: order, ties, columns."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import run_ranks


def found_by_kernel(
    logits: np.ndarray, *, k: int, start: int, valid: int
) -> tuple[np.ndarray, np.ndarray]:
    """Values and columns `[ranks, R, k]` of logits `[ranks, R, n]` that begin at lane `start`."""
    ranks, rows, width = logits.shape

    def body(logits: Any, values: Any, ids: Any, send: Any, receive: Any, sems: Any) -> None:
        s.entry_barrier(ranks)
        view = s.View(ref=logits, start=start, width=width - start)
        values[...], ids[...] = s.sharded_top_k(
            *s.local_top_k(view, k, valid),
            k=k,
            send=send,
            receive=receive,
            send_sem=sems.at[0],
            receive_sem=sems.at[1],
            ranks=ranks,
            columns_per_rank=valid,
        )

    values, ids = run_ranks(
        body,
        operands=[(logits, VMEM)],
        results=[((rows, 128), jnp.float32, VMEM), ((rows, 128), jnp.int32, VMEM)],
        scratch=[
            VMEM((2 * rows, 128), jnp.int32),
            VMEM((ranks, 2 * rows, 128), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        barrier=ranks > 1,
    )
    return values[..., :k], ids[..., :k]


@pytest.mark.parametrize(
    ("ranks", "rows", "width", "start", "valid", "k"),
    [
        pytest.param(1, 8, 600, 0, 600, 16, id="one rank"),
        pytest.param(1, 16, 512 + 130, 128, 500, 16, id="padding and a narrow tail"),
        pytest.param(1, 8, 2600, 0, 2600, 8, id="many columns"),
        pytest.param(2, 8, 128, 0, 100, 4, id="fewer columns than a step"),
        pytest.param(8, 8, 300, 44, 250, 16, id="eight ranks"),
    ],
)
@pytest.mark.parametrize("kind", ["ties", "distinct", "one lane", "masked"])
def test_top_k(
    ranks: int, rows: int, width: int, start: int, valid: int, k: int, kind: str
) -> None:
    random = np.random.default_rng(width)
    logits = random.normal(size=(ranks, rows, width)).astype(np.float32)
    if kind == "ties":  # the larger, the fewer
        logits = random.geometric(0.5, size=logits.shape).astype(np.float32)
    if kind == "one lane":  # where the search looks at many columns, one behind the other
        logits[:, :, start + 5 :: 256] += 10
    if kind == "masked":  # fewer than k are left, of some rows in one rank only
        logits[:, :, start + 3 :] = -np.inf
        logits[1:, ::2] = -np.inf
    logits[:, :, start + valid :] = np.inf  # must not count
    logits[:, :, :start] = np.inf
    everywhere = np.concatenate(list(logits[:, :, start : start + valid]), axis=1)
    expected, columns = (np.asarray(one) for one in lax.top_k(everywhere, k))
    values, ids = found_by_kernel(logits, k=k, start=start, valid=valid)
    for rank in range(ranks):
        np.testing.assert_array_equal(values[rank], expected)
        there = expected > -np.inf
        np.testing.assert_array_equal(ids[rank][there], columns[there])
        assert (ids[rank] >= 0).all(), "columns decide addresses"


def test_columns_exist_where_there_are_no_numbers() -> None:
    """Columns decide addresses, so they stay in range whatever the logits are."""
    logits = np.full((1, 8, 300), np.nan, np.float32)
    _, ids = found_by_kernel(logits, k=8, start=0, valid=300)
    assert ((ids >= 0) & (ids < 300)).all()
