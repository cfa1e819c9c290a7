"""Short convolutions along the rows of a block, with kernels of their own for every row."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.vector import join


def dynamic_conv(
    x: jax.Array,
    kernels: jax.Array,
    base: Sequence[jax.Array],
    *,
    side: int,
    group: int,
    rows_per_sequence: int,
) -> jax.Array:
    """`y[t, c] = sum_j (base_j[c] + kernels[t, side, j, c // group]) x[t - j, c]`, not rounded.

    Rows before a sequence's first one are zero.

    Args:
      x: `[R, C]` f32; the T rows of a sequence are consecutive.
      kernels: `[R, sides * taps * C / group]` f32.
      base: `[1, C]` f32 of each tap of this side; tap 0 is for the row itself.
      group: channels that share a kernel; it divides C, and 128 or is a multiple of it.
    """
    channels = x.shape[1]
    groups = channels // group
    total = None
    for tap, weight in enumerate(base):
        factor = _spread(kernels, (side * len(base) + tap) * groups, groups, group) + weight
        part = factor * _rows_before(x, tap, rows_per_sequence)
        total = part if total is None else total + part
    assert total is not None, "a convolution without taps"
    return total


def _rows_before(x: jax.Array, distance: int, rows_per_sequence: int) -> jax.Array:
    """Row t becomes row t - distance of its sequence, zero where there is none."""
    if distance == 0:
        return x
    moved = pltpu.roll(x, distance, 0)
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    starts = row < distance
    for first in range(rows_per_sequence, x.shape[0], rows_per_sequence):
        starts = starts | ((row >= first) & (row < first + distance))
    return jnp.where(starts, 0.0, moved)


def _spread(x: jax.Array, start: int, groups: int, group: int) -> jax.Array:
    """Lanes `start` .. `start + groups` of `x`, each repeated `group` times: `[R, groups * group]`.

    The lanes of a register are gathered from a register, so each result is made of whole ones.
    """
    assert LANES % group == 0 or group % LANES == 0, f"{group} channels share a kernel"
    rows, count = x.shape
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    local = lane >> group.bit_length() - 1 if group < LANES else jnp.zeros_like(lane)
    pieces = []
    for first in range(0, groups * group, LANES):
        source = start + first // group
        register = source // LANES * LANES
        if source + LANES // group > register + LANES:
            register = source  # those that are needed lie in two registers
        register = max(0, min(register, count - LANES))
        held = x[:, register : register + LANES]
        if count < LANES:
            held = join([held, jnp.zeros((rows, LANES - count), x.dtype)])
        index = jnp.minimum(local + (source - register), LANES - 1)
        pieces.append(jnp.take_along_axis(held, index, axis=1))
    return join(pieces)[:, : groups * group]
