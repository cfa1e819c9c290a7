"""Products with matrices in MXFP4 against f64: all codes, all exponents in use, sizes."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mkc.codegen_pallas import support as s
from mkc.ir.mxfp4 import CODES
from mkc.ir.mxfp4 import GROUP
from mkc.ir.mxfp4 import SCALE_BIAS
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run


def packed(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Bytes of matrices as they stand in a checkpoint, `[..., N, K / 2]` and `[..., N, K / 32]`."""
    inner = np.swapaxes(np.concatenate([codes, scales], axis=-1), -1, -2)
    missing = s.packed_rows(2 * codes.shape[-1]) - inner.shape[-2]
    padding = [(0, 0)] * (inner.ndim - 2) + [(0, missing), (0, 0)]
    return np.pad(inner, padding).view(np.int8)


def values(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Numbers `[N, K]` in f64."""
    pairs = CODES[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(len(codes), -1, GROUP)
    factors = np.ldexp(1.0, scales.astype(np.int64) - SCALE_BIAS)
    return (pairs * factors[..., None]).reshape(len(codes), -1)


@pytest.mark.parametrize("mode", [Mode.LATE, Mode.GENERIC])
@pytest.mark.parametrize(
    ("rows", "K", "N"),
    [
        pytest.param(1, 512, 640, id="one row"),
        pytest.param(8, 320, 128, id="a narrow last block"),
        pytest.param(16, 64, 256, id="few groups"),
        pytest.param(1, 192, 128, id="one row, few groups"),
    ],
)
def test_product(rows: int, K: int, N: int, mode: Mode) -> None:
    random = np.random.default_rng(K)
    codes = random.integers(0, 256, size=(N, K // 2), dtype=np.uint8)
    scales = random.integers(SCALE_BIAS - 9, SCALE_BIAS + 9, size=(N, K // GROUP), dtype=np.uint8)
    scales[0, 0], scales[1, 1] = 1, 200  # bytes above 127 are negative ones
    x = random.normal(size=(rows, K)).astype(ml_dtypes.bfloat16).astype(np.float32)

    def body(x: Any, matrix: Any, out: Any) -> None:
        out[...] = s.mxfp4_product(s.spread(x[...]), matrix)

    (out,) = run(
        body,
        operands=[(x, VMEM), (packed(codes, scales), VMEM)],
        results=[((rows, N), jnp.float32, VMEM)],
        mode=mode,
    )
    matrix = values(codes, scales)
    # Of sums in f32 the error is relative to the sum of magnitudes.
    size = np.abs(x.astype(np.float64)) @ np.abs(matrix).T
    assert (np.abs(out - x.astype(np.float64) @ matrix.T) <= 2**-20 * size).all()
