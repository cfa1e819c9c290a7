"""Vector arithmetic against plain numpy, in a kernel on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

MODES = pytest.mark.parametrize("mode", [Mode.LATE, Mode.GENERIC])


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def apply(
    function: Callable[..., Any], *operands: np.ndarray, width: int, mode: Mode = Mode.LATE
) -> np.ndarray:
    """`function` of whole VMEM buffers, computed in a kernel, as `[8, width]`."""

    def body(*refs: Any) -> None:
        refs[-1][...] = function(*(ref[...] for ref in refs[:-1]))

    (out,) = run(
        body,
        operands=[(operand, VMEM) for operand in operands],
        results=[((8, width), jnp.float32, VMEM)],
        mode=mode,
    )
    return out


@MODES
def test_round_bf16_rounds_to_nearest_even(mode: Mode) -> None:
    x = normal(8, 128)
    x[0, :3] = 1 + 2**-8, 1 + 3 * 2**-8, 1e-30
    out = apply(s.round_bf16, x, width=128, mode=mode)
    np.testing.assert_array_equal(out, bf16(x))
    assert out[0, 0] == 1.0 and out[0, 1] == 1 + 2**-6


@pytest.mark.parametrize("count", [-5, 0, 100, 200, 256])
def test_the_first_lanes_are_rounded(count: int) -> None:
    x = normal(8, 256)
    out = apply(lambda x: s.round_first_lanes(x, count), x, width=256)
    first = max(count, 0)
    np.testing.assert_array_equal(out[:, :first], bf16(x[:, :first]))
    np.testing.assert_array_equal(out[:, first:], x[:, first:])


@MODES
@pytest.mark.parametrize(("length", "row"), [(128, 0), (300, 1), (6, 3), (640, 2)])
def test_vector_reads_rows_of_a_page(length: int, row: int, mode: Mode) -> None:
    pages = normal(2, 8, 128)

    def body(slot: Any, ring: Any, out: Any) -> None:
        out[...] = s.vector(ring, slot[0], row, length)

    (out,) = run(
        body,
        operands=[(np.array([1], np.int32), SMEM), (pages, VMEM)],
        results=[((1, length), jnp.float32, VMEM)],
        mode=mode,
    )
    np.testing.assert_array_equal(out[0], pages[1, row:].reshape(-1)[:length])


@MODES
@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("round_inner", [False, True])
@pytest.mark.parametrize(("heads", "size"), [(1, 256), (3, 128), (4, 32)])
def test_rms_norm(heads: int, size: int, round_inner: bool, zero_centred: bool, mode: Mode) -> None:
    x, weight = normal(8, heads * size), normal(1, size, seed=1)
    out = apply(
        lambda x, weight: s.rms_norm(
            x,
            weight,
            eps=1e-3,
            zero_centred=zero_centred,
            round_inner=round_inner,
            heads=heads,
        ),
        x,
        weight,
        width=heads * size,
        mode=mode,
    )
    wide = x.reshape(8, heads, size).astype(np.float64)
    normalised = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3)
    scale = 1 + weight[0] if zero_centred else weight[0]
    exact = (normalised * scale).reshape(8, -1)
    if not round_inner:
        np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)
        return
    # half a bf16 step is 2^-9 relative
    np.testing.assert_allclose(out, exact, rtol=2**-8, atol=1e-6)
    inner = bf16(normalised.astype(np.float32))
    same = np.isclose(out, (inner * scale).reshape(8, -1), rtol=1e-6, atol=1e-7)
    assert same.mean() > 0.99  # a value next to a rounding border may fall on either side
    assert not np.allclose(out, exact, rtol=1e-4)


@MODES
@pytest.mark.parametrize(("heads", "size"), [(2, 128), (4, 32)])
def test_l2_norm(heads: int, size: int, mode: Mode) -> None:
    x = normal(8, heads * size)
    x[2] = 0
    out = apply(lambda x: s.l2_norm(x, eps=1e-6, heads=heads), x, width=heads * size, mode=mode)
    wide = x.reshape(8, heads, size).astype(np.float64)
    expected = wide / np.sqrt((wide**2).sum(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(out, expected.reshape(8, -1), rtol=1e-5, atol=1e-6)


@MODES
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_rotary_table_of_positions_in_smem(batch: int, mode: Mode) -> None:
    positions = np.array([5, 0, 4095, 17, 131071, 1, 2, 3], np.int32)[:batch]
    frequency = (10000.0 ** -(np.arange(16) / 16)).astype(np.float32)[None]

    def body(positions: Any, frequency: Any, cos: Any, sin: Any) -> None:
        column = s.positions_column(positions, batch, 8)
        cos[...], sin[...] = s.rotary_table(column, frequency[...])

    cos, sin = run(
        body,
        operands=[(positions, SMEM), (frequency, VMEM)],
        results=[((8, 16), jnp.float32, VMEM)] * 2,
        mode=mode,
    )
    angle = np.tile(-frequency, (8, 1))
    angle[:batch] = positions[:, None].astype(np.float32) * frequency
    np.testing.assert_allclose(cos, np.cos(angle.astype(np.float64)), atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(angle.astype(np.float64)), atol=1e-5)


@MODES
@pytest.mark.parametrize("round", [False, True])
@pytest.mark.parametrize(
    ("heads", "size", "half"), [(2, 256, 32), (3, 128, 64), (4, 32, 4), (2, 64, 32), (1, 512, 96)]
)
def test_rotary(heads: int, size: int, half: int, round: bool, mode: Mode) -> None:
    rounded = bf16 if round else lambda x: x
    x = rounded(normal(8, heads * size))
    angle = normal(8, half, seed=1)
    cos, sin = rounded(np.cos(angle)), rounded(np.sin(angle))
    out = apply(
        lambda x, cos, sin: s.rotary(x, cos, sin, heads=heads, round=round),
        x,
        cos,
        sin,
        width=heads * size,
        mode=mode,
    )
    wide = x.reshape(8, heads, size)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    cos, sin = cos[:, None], sin[:, None]
    expected = wide.copy()
    expected[..., :half] = rounded(rounded(first * cos) + rounded(-second * sin))
    expected[..., half : 2 * half] = rounded(rounded(second * cos) + rounded(first * sin))
    expected = expected.reshape(8, -1)
    if round:
        np.testing.assert_array_equal(out, expected)
    else:
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


@MODES
@pytest.mark.parametrize(("heads", "size"), [(3, 256), (2, 32)])
def test_slice_heads_keeps_the_order_of_heads(heads: int, size: int, mode: Mode) -> None:
    x = normal(8, heads * size)
    half = size // 2
    out = apply(lambda x: s.slice_heads(x, heads, half, half), x, width=heads * half, mode=mode)
    expected = x.reshape(8, heads, size)[:, :, half:].reshape(8, -1)
    np.testing.assert_array_equal(out, expected)


@MODES
def test_per_head_gives_each_head_its_lanes(mode: Mode) -> None:
    x = normal(8, 96)
    out = apply(
        lambda x: s.per_head(lambda head: head[:, ::-1] + head[:, :1], x, 3), x, width=96, mode=mode
    )
    heads = x.reshape(8, 3, 32)
    np.testing.assert_array_equal(out, (heads[:, :, ::-1] + heads[:, :, :1]).reshape(8, -1))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


REFERENCES = {
    "silu": lambda x: x * sigmoid(x),
    "sigmoid": sigmoid,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "exp": np.exp,
    "tanh": np.tanh,
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "negate": np.negative,
}


@MODES
@pytest.mark.parametrize("name", REFERENCES)
def test_activation(name: str, mode: Mode) -> None:
    x = normal(8, 128) * 4
    x[0, :4] = 0, 30, -30, 1e-4
    out = apply(getattr(s, name), x, width=128, mode=mode)
    expected = REFERENCES[name](x.astype(np.float64))
    np.testing.assert_allclose(out, expected, rtol=3e-6, atol=1e-6)


def test_activations_of_large_arguments_are_finite() -> None:
    x = np.full((8, 128), 200.0, np.float32)
    x[1] = -200.0
    for name, high, low in (("softplus", 200, 0), ("sigmoid", 1, 0), ("silu", 200, 0)):
        out = apply(getattr(s, name), x, width=128)
        np.testing.assert_allclose(out[0], high, err_msg=name)
        np.testing.assert_allclose(out[1], low, atol=1e-30, err_msg=name)


@MODES
def test_view_reads_and_writes_one_run_time_row(mode: Mode) -> None:
    x = normal(8, 256)
    x[3] = np.nan  # a neighbour's NaN must stay with the neighbour

    def body(row: Any, x: Any, out: Any, scratch: Any) -> None:
        source = s.View(ref=x, start=32, width=64)
        scratch[...] = jnp.zeros_like(scratch)
        s.View(ref=scratch, start=16, width=64).store_row(row[1], source.row(row[0]))
        out[...] = scratch[...]

    (out,) = run(
        body,
        operands=[(np.array([5, 2], np.int32), SMEM), (x, VMEM)],
        results=[((8, 128), jnp.float32, VMEM)],
        scratch=[pltpu.VMEM((8, 128), jnp.float32)],
        mode=mode,
    )
    expected = np.zeros((8, 128), np.float32)
    expected[2, 16:80] = x[5, 32:96]
    np.testing.assert_array_equal(out, expected)


def test_view_refuses_lanes_beyond_its_width() -> None:
    with pytest.raises(AssertionError, match=r"lanes 64\+128 of a view of 128"):
        s.View(ref=None, start=0, width=128).lanes(64, 128)
