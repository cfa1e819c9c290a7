"""The gated delta rule over recurrent states that stream through VMEM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.streams import Stream
from mkc.codegen_pallas.support.streams import StreamCursor
from mkc.codegen_pallas.support.streams import stream_advance
from mkc.codegen_pallas.support.streams import stream_wait
from mkc.codegen_pallas.support.vector import round_bf16

UNROLLED_HEADS = 12  # above it the key heads become a run-time loop, which keeps the code small


def column(x: jax.Array, index: Scalar) -> jax.Array:
    """Lane `index` of `[n, m]` as `[n, 1]`; `index` may be a run-time value."""
    if isinstance(index, int):
        return x[:, index : index + 1]
    mine = lax.broadcasted_iota(jnp.int32, x.shape, 1) == index
    return jnp.sum(jnp.where(mine, x, 0.0), axis=1, keepdims=True)


def state_rows(value_head: Scalar, key_dim: int) -> Any:
    """Rows of a state that belong to a value head."""
    first = value_head * key_dim
    if not isinstance(first, int) and key_dim % LANES == 0:
        first = pl.multiple_of(first, LANES)
    return pl.ds(first, key_dim)


def each_key_head(key_heads: int, value_heads: int, function: Callable[[Scalar], None]) -> None:
    """Calls `function` for every key head: unrolled, or in a loop where that would be much code."""
    if value_heads <= UNROLLED_HEADS:
        for head in range(key_heads):
            function(head)
        return

    def one_head(head: jax.Array, carry: jax.Array) -> jax.Array:
        function(head)
        return carry

    lax.fori_loop(0, key_heads, one_head, jnp.int32(0))


def down_the_rows(row: jax.Array, columns: int) -> jax.Array:
    """`[1, n]` turned into `[n, columns]` whose every column is the vector."""
    return jnp.transpose(jnp.broadcast_to(row, (columns, row.shape[1])))


def delta_rule(
    stream: Stream,
    cursor: StreamCursor,
    positions: Ref,
    *,
    q: View,
    k: View,
    v: View,
    beta: View,
    decay: View,
    out: View,
    batch: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
) -> StreamCursor:
    """One step of the gated delta rule for every sequence; the states are updated in place.

    Per value head, all in f32: `S <- exp(decay) S`, `p = S^T k`, `S <- S + k (beta (v - p))^T`,
    `o = S^T q`, and `o` is rounded to bf16. A state's rows are keys, so both products are sums
    over rows, which cost less than sums over lanes.

    The state of a sequence that rests passes through the ring unchanged, and its row of `out` is
    kept.

    Args:
      stream: states, one item `[value_heads * key_dim, value_dim]` f32 per sequence, with
        write-back.
      positions: `[batch]` i32 in SMEM; a sequence with a negative one rests.
      q: `[R, key_heads * key_dim]`, as is `k`.
      v: `[R, value_heads * value_dim]`, as is `out`; rows of `out` from `batch` on are kept.
      beta: `[R, value_heads]`, as is `decay`.
      key_heads: value head j uses key head `j * key_heads // value_heads`.
    """
    assert value_heads % key_heads == 0, f"{value_heads} value heads over {key_heads} key heads"
    group = value_heads // key_heads

    def key_head(sequence: Scalar, slot: Scalar, head: Scalar) -> None:
        keys = down_the_rows(k.head(head, key_dim).row(sequence), value_dim)
        queries = down_the_rows(q.head(head, key_dim).row(sequence), value_dim)
        betas = beta.row(sequence)
        factors = jnp.exp(decay.row(sequence))
        for member in range(group):
            value_head = head * group + member
            rows = state_rows(value_head, key_dim)
            state = stream.ring[slot, rows, :] * column(factors, value_head)
            predicted = jnp.sum(state * keys, axis=0, keepdims=True)
            value = v.head(value_head, value_dim).row(sequence)
            update = (value - predicted) * column(betas, value_head)
            state = state + keys * update
            stream.ring[slot, rows, :] = state
            result = jnp.sum(state * queries, axis=0, keepdims=True)
            out.head(value_head, value_dim).store_row(sequence, round_bf16(result))

    def one_sequence(sequence: jax.Array, cursor: StreamCursor) -> StreamCursor:
        stream_wait(stream, cursor)

        @pl.when(positions[sequence] >= 0)
        def _awake() -> None:
            each_key_head(
                key_heads, value_heads, lambda head: key_head(sequence, cursor.slot, head)
            )

        return stream_advance(stream, cursor)

    result: StreamCursor = lax.fori_loop(0, batch, one_sequence, cursor)
    return result
