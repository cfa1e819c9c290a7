"""The index of the largest logit, and its way out of the kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View

CHUNK = 256  # columns per step of the search
NO_COLUMN = 2**31 - 1  # above every column


def local_argmax(logits: View, valid: Scalar) -> tuple[jax.Array, jax.Array]:
    """The largest of columns 0 .. valid - 1 per row and its column, the lowest one on ties.

    Every lane keeps its own best through all chunks; lanes are compared once, at the end.

    Args:
      logits: `[R, n]`.
      valid: columns that count, at least 1.

    Returns:
      `[R, 1]` f32 and `[R, 1]` i32.
    """
    rows = logits.ref.shape[0]
    chunks = logits.width // CHUNK
    lane = lax.broadcasted_iota(jnp.int32, (rows, CHUNK), 1)

    def one_chunk(
        chunk: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        best, index = carry
        first = logits.start + chunk * CHUNK
        if logits.start % LANES == 0:
            first = pl.multiple_of(first, LANES)
        value = logits.ref[:, pl.ds(first, CHUNK)]
        column = lane + chunk * CHUNK
        better = (value > best) & (column < valid)
        return jnp.where(better, value, best), jnp.where(better, column, index)

    lowest = jnp.full((rows, CHUNK), -jnp.inf, jnp.float32)
    best, index = over_lanes(*lax.fori_loop(0, chunks, one_chunk, (lowest, lane)))
    rest = logits.width % CHUNK
    if not rest:
        return best, index
    tail = logits.lanes(chunks * CHUNK, rest).load()
    column = lax.broadcasted_iota(jnp.int32, (rows, rest), 1) + chunks * CHUNK
    tail_best, tail_index = over_lanes(jnp.where(column < valid, tail, -jnp.inf), column)
    better = tail_best > best
    return jnp.where(better, tail_best, best), jnp.where(better, tail_index, index)


def over_lanes(value: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest value per row `[R, 1]` and the lowest index that goes with it."""
    best = jnp.max(value, axis=1, keepdims=True)
    candidates = jnp.where(value == best, index, NO_COLUMN)
    return best, jnp.min(candidates, axis=1, keepdims=True)


def store_tokens(index: jax.Array, out: Ref, batch: int) -> None:
    """Stores the first `batch` rows of `index` `[R, 1]` i32 in `out` `[batch]` i32 in SMEM."""
    for row in range(batch):
        out[row] = index[row, 0]
