"""Element-wise and per-head arithmetic on `[R, n]` f32 values.

Values of bf16 graph tensors are f32 numbers that were rounded by `round_bf16`. Nothing here rounds
unless its docstring says so.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar


def round_bf16(x: jax.Array) -> jax.Array:
    """The nearest bf16 numbers, kept as f32."""
    return x.astype(jnp.bfloat16).astype(jnp.float32)


def round_first_lanes(x: jax.Array, count: Scalar) -> jax.Array:
    """The nearest bf16 numbers in the first `count` lanes, kept as f32; the others as they are."""
    lane = lax.broadcasted_iota(jnp.int32, x.shape, 1)
    return jnp.where(lane < count, round_bf16(x), x)


def vector(ring: Ref, slot: Scalar, row: int, length: int) -> jax.Array:
    """The vector that starts at row `row` of page `slot`, as `[1, length]` f32.

    Args:
      ring: pages `[slots, page_rows, 128]` f32; a vector fills `ceil(length / 128)` rows.
    """
    rows = pl.cdiv(length, LANES)
    pieces = [ring[slot, pl.ds(row + index, 1), :] for index in range(rows)]
    return join(pieces)[:, :length]


def join(pieces: list[jax.Array]) -> jax.Array:
    """Pieces `[R, n_i]` side by side."""
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=1)


def per_head(function: Callable[[jax.Array], jax.Array], x: jax.Array, heads: int) -> jax.Array:
    """`function` applied to every head's lanes `[R, n / heads]`, results side by side."""
    size = x.shape[1] // heads
    return join([function(x[:, head * size : (head + 1) * size]) for head in range(heads)])


def slice_heads(x: jax.Array, heads: int, start: int, size: int) -> jax.Array:
    """Lanes `start` .. `start + size` of every head, side by side: `[R, heads * size]`."""
    return per_head(lambda head: head[:, start : start + size], x, heads)


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    zero_centred: bool,
    round_inner: bool,
    heads: int = 1,
) -> jax.Array:
    """`x * rsqrt(mean(x^2) + eps)` over each head's lanes, times the weight; not rounded.

    Args:
      x: `[R, n]`.
      weight: `[1, n / heads]`, the same for every head; `1 + weight` scales when `zero_centred`.
      round_inner: round the normalised value to bf16 before the weight.
    """
    scale = 1.0 + weight if zero_centred else weight

    def one_head(head: jax.Array) -> jax.Array:
        mean_square = jnp.mean(head * head, axis=1, keepdims=True)
        normalised = head * lax.rsqrt(mean_square + eps)
        if round_inner:
            normalised = round_bf16(normalised)
        return normalised * scale

    return per_head(one_head, x, heads)


def l2_norm(x: jax.Array, *, eps: float, heads: int) -> jax.Array:
    """`x * rsqrt(sum(x^2) + eps)` over each head's lanes of `[R, n]`."""

    def one_head(head: jax.Array) -> jax.Array:
        return head * lax.rsqrt(jnp.sum(head * head, axis=1, keepdims=True) + eps)

    return per_head(one_head, x, heads)


def positions_column(positions: Ref, batch: int, rows: int) -> jax.Array:
    """Positions `[batch]` i32 in SMEM as a column `[rows, 1]` f32, -1 from row `batch` on."""
    row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    column = jnp.full((rows, 1), -1.0, jnp.float32)
    for index in range(batch):
        column = jnp.where(row == index, positions[index].astype(jnp.float32), column)
    return column


def rotary_table(positions: jax.Array, inverse_frequency: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of `positions [R, 1] * inverse_frequency [1, d / 2]`, each `[R, d / 2]`."""
    shape = (positions.shape[0], inverse_frequency.shape[1])
    angle = jnp.broadcast_to(positions, shape) * inverse_frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotary(x: jax.Array, cos: jax.Array, sin: jax.Array, *, heads: int, round: bool) -> jax.Array:
    """Rotates the pairs `(i, i + d / 2)` of the first `d` channels of each head.

    Pairs meet by turning whole registers, so no lane slice at an odd offset is needed.

    Args:
      x: `[R, heads * n]` with `n >= d`.
      cos: `[R, d / 2]`, as is `sin`.
      round: round the two products and their sum to bf16.
    """
    rounded = round_bf16 if round else lambda value: value
    half = cos.shape[1]
    size = x.shape[1] // heads
    whole_registers = pl.cdiv(2 * half, LANES) * LANES
    block = whole_registers if size % LANES == 0 else size
    rest = jnp.zeros((cos.shape[0], block - 2 * half), jnp.float32)
    tail = [rest] if block > 2 * half else []
    cosine = join([cos, cos, *tail])
    sine = join([-sin, sin, *tail])

    def one_head(head: jax.Array) -> jax.Array:
        turned = head[:, :block]
        lane = lax.broadcasted_iota(jnp.int32, turned.shape, 1)
        upper = pltpu.roll(turned, block - half, 1)  # lane i holds channel i + d / 2
        lower = pltpu.roll(turned, half, 1)  # lane i holds channel i - d / 2
        partner = jnp.where(lane < half, upper, lower)
        result = rounded(rounded(turned * cosine) + rounded(partner * sine))
        result = jnp.where(lane < 2 * half, result, turned)
        return result if block == size else join([result, head[:, block:]])

    return per_head(one_head, x, heads)


def silu(x: jax.Array) -> jax.Array:
    """`x * sigmoid(x)`."""
    return x * sigmoid(x)


def sigmoid(x: jax.Array) -> jax.Array:
    """`1 / (1 + exp(-x))`."""
    return 1.0 / (1.0 + jnp.exp(-x))


def softplus(x: jax.Array) -> jax.Array:
    """`log(1 + exp(x))` without overflow."""
    return jnp.maximum(x, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(x)))


def exp(x: jax.Array) -> jax.Array:
    """`e ** x`."""
    return jnp.exp(x)


def tanh(x: jax.Array) -> jax.Array:
    """Hyperbolic tangent."""
    return jnp.tanh(x)


def gelu_tanh(x: jax.Array) -> jax.Array:
    """The tanh form of the Gaussian error linear unit."""
    inner = (2.0 / jnp.pi) ** 0.5 * (x + 0.044715 * (x * x * x))
    return x * (0.5 * (1.0 + jnp.tanh(inner)))


def negate(x: jax.Array) -> jax.Array:
    """`-x`."""
    return -x
