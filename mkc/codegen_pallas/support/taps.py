"""What layers show to a drafter, side by side in one buffer."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar


def store_tap(value: jax.Array, buffer: Ref, execution: Scalar, places: Sequence[int]) -> None:
    """Stores what a layer shows in its place of the tap buffer.

    Args:
      value: `[R, width]` f32, width a multiple of 128.
      buffer: `[R, n * width]` bf16 in VMEM.
      execution: how many taps ran before this one in this round.
      places: place of every execution; most share the last one, where nobody reads.
    """
    width = value.shape[1]
    assert width % LANES == 0, f"taps of {width} lanes"
    unread = buffer.shape[1] // width - 1
    place: Scalar = jnp.int32(unread)
    for number, one in enumerate(places):
        if one != unread:
            place = jnp.where(execution == number, one, place)
    lanes = pl.ds(pl.multiple_of(place * width, LANES), width)
    buffer[:, lanes] = value.astype(buffer.dtype)
