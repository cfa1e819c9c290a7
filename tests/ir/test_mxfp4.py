"""MXFP4: values of codes and scales, and the rewriting in FP8 that loses nothing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.ir.mxfp4 import FP8_SPREAD
from mkc.ir.mxfp4 import GROUP
from mkc.ir.mxfp4 import bad_scale
from mkc.ir.mxfp4 import exponent_spread
from mkc.ir.mxfp4 import to_fp8
from mkc.ir.reference_experts import decode

RANDOM = np.random.default_rng(3)
type Bytes = NDArray[np.uint8]


def bytes_(low: int, high: int, *shape: int) -> Bytes:
    """Random bytes from `low` to `high`."""
    return RANDOM.integers(low, high + 1, shape).astype(np.uint8)


def values(codes: Bytes, scales: Bytes) -> NDArray[np.float32]:
    return np.asarray(decode(codes, scales))  # type: ignore[arg-type]


def test_every_code() -> None:
    """Two codes of a byte: the even column in the low bits; the sign in bit 3."""
    codes = np.zeros((1, GROUP // 2), np.uint8)
    codes[0, :8] = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    found = values(codes, np.array([[127]], np.uint8))[0, :16]
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert found.tolist() == [*magnitudes, *(-one for one in magnitudes)]


@pytest.mark.parametrize("byte", [1, 2, 126, 127, 128, 254])
def test_a_scale_is_a_power_of_two(byte: int) -> None:
    codes = np.full((1, GROUP // 2), 0x22, np.uint8)  # 1.0
    found = values(codes, np.array([[byte]], np.uint8))
    assert (found == np.ldexp(np.float32(1), byte - 127)).all()


def test_each_group_has_its_own_scale() -> None:
    codes = np.full((2, GROUP), 0x22, np.uint8)
    found = values(codes, np.array([[127, 128], [129, 130]], np.uint8))
    assert found.reshape(2, 2, GROUP).tolist() == [
        [[1.0] * 32, [2.0] * 32],
        [[4.0] * 32, [8.0] * 32],
    ]


def test_values_are_exact_in_bf16() -> None:
    found = values(bytes_(0, 255, 64, 64), bytes_(2, 250, 64, 4))
    assert (found == found.astype(ml_dtypes.bfloat16).astype(np.float32)).all()


def test_bytes_without_a_meaning_are_found() -> None:
    scales = bytes_(1, 254, 6, 4)
    assert bad_scale(scales) is None
    for byte in (0, 255):
        wrong = scales.copy()
        wrong[4, 2] = byte
        assert bad_scale(wrong) == (4, 2)


# FP8.


def rewritten(
    codes: Bytes, scales: Bytes, rows: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Values behind the rewriting, and which blocks claim to be exact."""
    found = to_fp8(codes, scales, rows)
    factors = np.ldexp(np.float32(1), found.scales.astype(int) - 127)
    factors = np.repeat(np.repeat(factors, rows, axis=0), GROUP, axis=1)
    return found.values.astype(np.float32) * factors, found.exact


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_blocks_of_a_small_spread_keep_every_bit(rows: int) -> None:
    """The spread may be FP8_SPREAD: all sixteen codes at both ends of it."""
    codes = bytes_(0, 255, 32, 2 * GROUP)
    scales = bytes_(100, 100 + FP8_SPREAD, 32, 4)
    assert exponent_spread(scales, rows).max() <= FP8_SPREAD
    found, exact = rewritten(codes, scales, rows)
    assert exact.all()
    assert (found == values(codes, scales)).all()


def test_a_wider_block_says_that_it_is_not_exact() -> None:
    """The code 0.5, one exponent too low, lies below the smallest FP8 number."""
    codes = np.full((2, GROUP // 2), 0x11, np.uint8)
    codes[0] = 0x77
    scales = np.array([[100 + FP8_SPREAD + 1], [100]], np.uint8)
    assert exponent_spread(scales, 2).tolist() == [[FP8_SPREAD + 1]]
    found, exact = rewritten(codes, scales, 2)
    assert not exact.any()
    assert (found[0] == values(codes, scales)[0]).all()
    assert (found[1] != values(codes, scales)[1]).all()
    _, apart = rewritten(codes, scales, 1)
    assert apart.all()


def test_a_wide_block_of_lucky_codes_is_exact() -> None:
    """The bound is that of the worst codes: 6 reaches further down."""
    codes = np.full((2, GROUP // 2), 0x77, np.uint8)
    scales = np.array([[118], [100]], np.uint8)
    found, exact = rewritten(codes, scales, 2)
    assert exact.all() == bool((found == values(codes, scales)).all())


def test_exactness_is_told_for_each_block() -> None:
    codes = np.full((4, GROUP), 0x11, np.uint8)
    scales = np.array([[120, 120], [120, 100], [120, 120], [120, 119]], np.uint8)
    _, exact = rewritten(codes, scales, 2)
    assert exact.tolist() == [[True, False], [True, True]]


def test_scales_stay_powers_of_two_at_the_low_end() -> None:
    """XLA has no numbers below 2^-126, the code 0.5 with the scale byte 2."""
    codes, scales = bytes_(0, 255, 2, GROUP // 2), np.array([[2], [4]], np.uint8)
    found, exact = rewritten(codes, scales, 2)
    assert exact.all()
    assert (found == values(codes, scales)).all()
