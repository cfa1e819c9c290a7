"""MXFP4: 4-bit floats in groups of 32 along a row, each group with a power of two.

Format of the OCP Microscaling Formats (MX) specification 1.0: E2M1 codes, E8M0 scales. Of the two
codes of a byte the low bits hold the even column. Bit 3 of a code is the sign, the others choose a
magnitude. Every value is exact in bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

GROUP = 32  # columns that share a scale
CODES_PER_BYTE = 2
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODES = np.array([*MAGNITUDES, *(-one for one in MAGNITUDES)], np.float32)
SCALE_BIAS = 127
LEAST_SCALE, LARGEST_SCALE = 1, 254  # bytes; 0 is no normal f32 and 255 is NaN
# Of a block that is rewritten in E4M3, the largest magnitude 6 becomes 6 * 2^6 = 384, below the
# largest E4M3 number 448.
FP8_HEADROOM = 6
# The smallest magnitude, 0.5 * 2^(FP8_HEADROOM - 14), is 2^-9, the smallest E4M3 number.
FP8_SPREAD = 14


def bad_scale(scales: NDArray[Any]) -> tuple[int, ...] | None:
    """Index of the first scale byte that is no power of two in f32, None without one."""
    bad = (scales < LEAST_SCALE) | (scales > LARGEST_SCALE)
    return tuple(int(one) for one in np.argwhere(bad)[0]) if bad.any() else None


@dataclass(frozen=True, kw_only=True)
class Fp8Blocks:
    """A matrix in E4M3 with one power of two for each block of rows in a group of columns.

    Attributes:
      values: float8_e4m3fn [N, K].
      scales: bytes u8 [N / rows, K / 32]; the value is that of the element times 2^(byte - 127).
      exact: bool [N / rows, K / 32], whether a block has the same values as before.
    """

    values: NDArray[Any]
    scales: NDArray[np.uint8]
    exact: NDArray[np.bool_]


def exponent_spread(scales: NDArray[np.uint8], rows: int) -> NDArray[np.int64]:
    """Largest minus smallest exponent of each block of `rows` rows: [N / rows, K / 32].

    Up to FP8_SPREAD, `to_fp8` is exact.
    """
    blocks = scales.reshape(-1, rows, scales.shape[1]).astype(np.int64)
    spread: NDArray[np.int64] = blocks.max(axis=1) - blocks.min(axis=1)
    return spread


def to_fp8(codes: NDArray[np.uint8], scales: NDArray[np.uint8], rows: int) -> Fp8Blocks:
    """A matrix rewritten with one scale for `rows` rows of a group, without loss where possible.

    Args:
      codes: [N, K / 2].
      scales: [N, K / 32], bytes from LEAST_SCALE to LARGEST_SCALE.
      rows: of a block; divides N.
    """
    count, groups = scales.shape
    assert count % rows == 0, f"{count} rows in blocks of {rows}"
    assert bad_scale(scales) is None, "scales are checked when they are read"
    blocks = scales.reshape(-1, rows, groups).astype(np.int64)
    common = np.clip(blocks.max(axis=1) - FP8_HEADROOM, LEAST_SCALE, LARGEST_SCALE)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1)
    magnitudes = CODES[pairs].reshape(-1, rows, groups, GROUP)
    wanted = np.ldexp(magnitudes, (blocks - common[:, None])[..., None]).astype(np.float32)
    values = wanted.astype(ml_dtypes.float8_e4m3fn)
    exact = (values.astype(np.float32) == wanted).all(axis=(1, 3))
    return Fp8Blocks(values=values.reshape(count, -1), scales=common.astype(np.uint8), exact=exact)
