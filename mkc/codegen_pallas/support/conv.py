"""The short causal convolution over a history that streams through VMEM."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from mkc.codegen_pallas.support.streams import Stream
from mkc.codegen_pallas.support.streams import StreamCursor


def causal_conv(
    stream: Stream,
    cursor: StreamCursor,
    x: jax.Array,
    taps: Sequence[jax.Array],
    *,
    positions: jax.Array,
    activation: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """`activation(sum_t taps[t] * window[t])` for every row and channel, not rounded.

    The window is the history and the new input, oldest first; the history moves on by one, but for
    rows that rest.

    Args:
      stream: histories, items `[len(taps) - 1, R, C]` bf16, changed in place.
      x: the new input `[R, C]` f32, bf16 numbers.
      taps: `[1, C]` f32 each, the last one for the new input.
      positions: `[R, 1]` f32; a row with a negative one rests.
    """
    window = [stream.ring[cursor.slot, index].astype(jnp.float32) for index in range(len(taps) - 1)]
    window.append(x)
    total = window[0] * taps[0]
    for value, tap in zip(window[1:], taps[1:], strict=True):
        total = total + value * tap
    awake = jnp.broadcast_to(positions, x.shape) >= 0.0
    for index, value in enumerate(window[1:]):
        moved = jnp.where(awake, value, window[index])
        stream.ring[cursor.slot, index] = moved.astype(jnp.bfloat16)
    return activation(total) if activation else total
