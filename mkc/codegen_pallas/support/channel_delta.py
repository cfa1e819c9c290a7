"""The delta rule with a decay of each key channel, over states that stream through VMEM.

As `mkc.codegen_pallas.support.delta` and `mkc.codegen_pallas.support.kept`, whose decay is one
number for a head. Decays are logarithms and at most zero, however far below.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mkc.codegen_pallas.support.accept import real_rows
from mkc.codegen_pallas.support.delta import column
from mkc.codegen_pallas.support.delta import down_the_rows
from mkc.codegen_pallas.support.delta import each_key_head
from mkc.codegen_pallas.support.delta import state_rows
from mkc.codegen_pallas.support.kept import first_rows
from mkc.codegen_pallas.support.kept import running_sum
from mkc.codegen_pallas.support.kept import solved_rows
from mkc.codegen_pallas.support.products import few_by_many
from mkc.codegen_pallas.support.products import over_few_rows
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.streams import Stream
from mkc.codegen_pallas.support.streams import StreamCursor
from mkc.codegen_pallas.support.streams import stream_advance
from mkc.codegen_pallas.support.streams import stream_wait
from mkc.codegen_pallas.support.vector import round_bf16


def channel_delta_rule(
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
    rounds: bool = True,
) -> StreamCursor:
    """One step for every sequence; the states are updated in place.

    As `delta_rule`, but `S <- exp(decay) S` multiplies row c of a state by the decay of channel c.

    Args:
      decay: `[R, value_heads * key_dim]` f32; everything else is as in `delta_rule`.
      rounds: round outputs to bf16.
    """
    assert value_heads % key_heads == 0, f"{value_heads} value heads over {key_heads} key heads"
    group = value_heads // key_heads

    def key_head(sequence: Scalar, slot: Scalar, head: Scalar) -> None:
        keys = down_the_rows(k.head(head, key_dim).row(sequence), value_dim)
        queries = down_the_rows(q.head(head, key_dim).row(sequence), value_dim)
        betas = beta.row(sequence)
        for member in range(group):
            value_head = head * group + member
            rows = state_rows(value_head, key_dim)
            factors = jnp.exp(decay.head(value_head, key_dim).row(sequence))
            state = stream.ring[slot, rows, :] * down_the_rows(factors, value_dim)
            predicted = jnp.sum(state * keys, axis=0, keepdims=True)
            value = v.head(value_head, value_dim).row(sequence)
            update = (value - predicted) * column(betas, value_head)
            state = state + keys * update
            stream.ring[slot, rows, :] = state
            result = jnp.sum(state * queries, axis=0, keepdims=True)
            out.head(value_head, value_dim).store_row(
                sequence, round_bf16(result) if rounds else result
            )

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


def kept_channel_delta_rule(
    state: Stream,
    state_cursor: StreamCursor,
    k_rows: Stream,
    k_cursor: StreamCursor,
    u_rows: Stream,
    u_cursor: StreamCursor,
    decay_rows: Stream,
    decay_cursor: StreamCursor,
    positions: Ref,
    kept: Ref,
    *,
    q: View,
    k: View,
    v: View,
    beta: View,
    decay: View,
    out: View,
    batch: int,
    rows_per_sequence: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    rounds: bool = True,
) -> tuple[StreamCursor, StreamCursor, StreamCursor, StreamCursor]:
    """The T rows of every sequence, behind the commit of kept rows.

    As `kept_delta_rule`, whose equations hold with D_i a vector of key channels: e^D multiplies the
    rows of S, and the channels of the products with keys:

        S <- e^(D_n-1) S + sum_i<n (e^(D_n-1 - D_i) k_i) u_i^T
        u_i = beta_i (v_i - S^T (e^(D_i) k_i) - sum_j<i (sum_c e^(D_ic - D_jc) k_ic k_jc) u_j)
        o_i = S^T (e^(D_i) q_i) + sum_j<=i (sum_c e^(D_ic - D_jc) q_ic k_jc) u_j

    Args:
      decay_rows: items `[T, value_heads * key_dim]` f32.
      decay: `[R, value_heads * key_dim]` f32; everything else is as in `kept_delta_rule`.
      rounds: round outputs to bf16.
    """
    assert value_heads % key_heads == 0, f"{value_heads} value heads over {key_heads} key heads"
    streams = (state, k_rows, u_rows, decay_rows)
    size = rows_per_sequence
    group = value_heads // key_heads

    def all_heads(sequence: jax.Array, cursors: Sequence[StreamCursor]) -> None:
        states, old_k, old_u, old_decay = (
            stream.ring.at[cursor.slot] for stream, cursor in zip(streams, cursors, strict=True)
        )
        number = kept[sequence]
        real = real_rows(positions, sequence, size)
        betas = first_rows(beta.rows(sequence, size), real)
        all_keys = View(ref=old_k, start=0, width=key_heads * key_dim)
        all_updates = View(ref=old_u, start=0, width=value_heads * value_dim)
        all_decays = View(ref=old_decay, start=0, width=value_heads * key_dim)

        def key_head(head: Scalar) -> None:
            kept_keys = all_keys.head(head, key_dim)
            before = first_rows(kept_keys.load(), number)
            keys = first_rows(k.head(head, key_dim).rows(sequence, size), real)
            queries = q.head(head, key_dim).rows(sequence, size)
            kept_keys.store(keys)
            for member in range(group):
                value_head = head * group + member
                updates = all_updates.head(value_head, value_dim)
                decays = all_decays.head(value_head, key_dim)
                place = state_rows(value_head, key_dim)
                old = states[place, :]
                grown = _committed(
                    old,
                    before,
                    first_rows(updates.load(), number),
                    first_rows(decays.load(), number),
                )
                new = jnp.where(number > 0, grown, old)
                states[place, :] = new
                own = first_rows(decay.head(value_head, key_dim).rows(sequence, size), real)
                decays.store(own)
                update, result = _rows_of_head(
                    new,
                    keys,
                    queries,
                    v.head(value_head, value_dim).rows(sequence, size),
                    column(betas, value_head),
                    running_sum(own),
                )
                updates.store(update)
                out.head(value_head, value_dim).store_rows(
                    sequence, round_bf16(result) if rounds else result
                )

        each_key_head(key_heads, value_heads, key_head)

    def one_sequence(
        sequence: jax.Array, cursors: tuple[StreamCursor, ...]
    ) -> tuple[StreamCursor, ...]:
        for stream, cursor in zip(streams, cursors, strict=True):
            stream_wait(stream, cursor)

        @pl.when(positions[sequence * size] >= 0)
        def _awake() -> None:
            all_heads(sequence, cursors)

        return tuple(stream_advance(*pair) for pair in zip(streams, cursors, strict=True))

    cursors = (state_cursor, k_cursor, u_cursor, decay_cursor)
    result: tuple[StreamCursor, StreamCursor, StreamCursor, StreamCursor]
    result = lax.fori_loop(0, batch, one_sequence, cursors)
    return result


def _committed(
    state: jax.Array, keys: jax.Array, updates: jax.Array, decays: jax.Array
) -> jax.Array:
    """The state `[dk, dv]` after the rows that count; the others are zero.

    Args:
      keys: `[T, dk]`, as is `decays`.
      updates: `[T, dv]`.
    """
    total = running_sum(decays)
    last = total[-1:]  # rows that do not count add nothing
    added = over_few_rows(keys * jnp.exp(last - total), updates)
    return state * down_the_rows(jnp.exp(last), state.shape[1]) + added


def _rows_of_head(
    state: jax.Array,
    keys: jax.Array,
    queries: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    total: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Updates and outputs `[T, dv]` of one value head.

    e^(D_i - D_j) does not split into a factor of row i and one of row j: e^(-D_j) overflows. So the
    products of rows are formed channel by channel, for one j after the other, of as many rows as a
    register has.

    Args:
      state: `[dk, dv]`.
      keys: `[T, dk]`, as are `queries` and the sums of decays `total`.
      v: `[T, dv]`.
      beta: `[T, 1]`.
    """
    size = keys.shape[0]
    row = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column_number = lax.broadcasted_iota(jnp.int32, (size, size), 1)
    between = jnp.zeros((size, size), jnp.float32)
    seen = jnp.zeros((size, size), jnp.float32)
    for index in range(size):
        # Infinite in rows before this one, which are not chosen below.
        weighted = jnp.exp(total - total[index : index + 1]) * keys[index : index + 1]
        of_keys = jnp.sum(keys * weighted, axis=1, keepdims=True)
        of_queries = jnp.sum(queries * weighted, axis=1, keepdims=True)
        here = column_number == index
        between = jnp.where(here & (row > index), of_keys, between)
        seen = jnp.where(here & (row >= index), of_queries, seen)
    decayed = jnp.exp(total)
    both = jnp.concatenate([keys * decayed, queries * decayed], axis=0)
    from_state = few_by_many(both, state)
    return solved_rows(between * beta, seen, (v - from_state[:size]) * beta, from_state[size:])
