"""Masks of tokens against plain numpy: every column sees its own bit, wherever the logits lie."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from mkc.schedule.program import mask_lanes
from tests.codegen_pallas.support_run import HBM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

LANES, BITS = 128, 32


def words_of(allowed: np.ndarray) -> np.ndarray:
    """Bit j of word b * 128 + l is column (b * 32 + j) * 128 + l; i32 `[rows, words]`."""
    rows, columns = allowed.shape
    words = np.zeros((rows, mask_lanes(columns)), np.uint32)
    for column in range(columns):
        register, lane = divmod(column, LANES)
        block, bit = divmod(register, BITS)
        words[:, block * LANES + lane] |= allowed[:, column].astype(np.uint32) << np.uint32(bit)
    return words.view(np.int32)


@pytest.mark.parametrize("mode", [Mode.LATE, Mode.GENERIC])
@pytest.mark.parametrize(
    ("columns", "start"),
    [
        pytest.param(96, 0, id="part of a register"),
        pytest.param(256, 16, id="two registers at an odd lane"),
        pytest.param(4096, 0, id="one block"),
        pytest.param(9000, 128, id="two blocks and a rest"),
    ],
)
def test_columns_without_their_bit_become_minus_infinity(
    columns: int, start: int, mode: Mode
) -> None:
    random = np.random.default_rng(columns)
    allowed = random.uniform(size=(8, columns)) < 0.5
    allowed[1], allowed[2] = False, True
    width = start + columns + 8
    logits = random.normal(size=(8, width)).astype(np.float32)

    def body(logits: Any, masks: Any, out: Any, block: Any, sems: Any) -> None:
        s.fetch_masks(masks, block, sems.at[0])
        out[...] = logits[...]
        view = s.View(ref=out, start=start, width=columns)
        s.mask_tokens(view, masks, block, sems.at[0])

    masks = words_of(allowed)
    (out,) = run(
        body,
        operands=[(logits, VMEM), (masks, HBM)],
        results=[(logits.shape, jnp.float32, VMEM)],
        scratch=[VMEM(masks.shape, jnp.int32), pltpu.SemaphoreType.DMA((1,))],
        mode=mode,
    )
    expected = logits.copy()
    expected[:, start : start + columns][~allowed] = -np.inf
    np.testing.assert_array_equal(out, expected)
