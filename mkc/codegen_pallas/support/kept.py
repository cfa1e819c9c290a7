"""Recurrent parts over the T rows of a round, whose states are committed in the next round.

The state that streams in is the one before the last round. What that round kept of each of its rows
streams in beside it; the first `kept` rows are committed now. Then this round's rows are computed
from the committed state, and replace the kept ones. See `mkc.ir.ops_spec.KeptDeltaRule`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.accept import real_rows
from mkc.codegen_pallas.support.delta import column
from mkc.codegen_pallas.support.delta import each_key_head
from mkc.codegen_pallas.support.delta import state_rows
from mkc.codegen_pallas.support.products import few_by_many
from mkc.codegen_pallas.support.products import over_few_rows
from mkc.codegen_pallas.support.products import over_lanes_of_few
from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.streams import Stream
from mkc.codegen_pallas.support.streams import StreamCursor
from mkc.codegen_pallas.support.streams import stream_advance
from mkc.codegen_pallas.support.streams import stream_wait
from mkc.codegen_pallas.support.vector import join
from mkc.codegen_pallas.support.vector import round_bf16


def kept_conv(
    history: Stream,
    history_cursor: StreamCursor,
    rows: Stream,
    rows_cursor: StreamCursor,
    x: jax.Array,
    taps: Sequence[jax.Array],
    *,
    kept: Ref,
    positions: Ref,
    batch: int,
    rows_per_sequence: int,
    activation: Callable[[jax.Array], jax.Array] | None,
) -> jax.Array:
    """`activation(sum_t taps[t] * window[t])` for every row and channel, not rounded.

    A row's window ends with its own input; before the sequence's first row lie the committed
    inputs: the history and the first `kept` of the last round's rows. Both streams are changed in
    place; those of sequences that rest keep every bit, and so does the history where `kept` is 0.

    Args:
      history: items `[len(taps) - 1, H, C]` bf16, oldest first, row s for sequence s.
      rows: items `[batch * T, C]` bf16: the inputs of the last round.
      x: the new inputs `[R, C]` f32, bf16 numbers.
      taps: `[1, C]` f32 each, the last one for the newest input.
      kept: `[batch]` i32 in SMEM, at most T.
      positions: `[batch * T]` i32 in SMEM; a sequence whose first one is negative rests.

    Returns:
      `[R, C]` f32; rows from `batch * T` on are zero.
    """
    before = len(taps) - 1
    old = [history.ring[history_cursor.slot, tap].astype(jnp.float32) for tap in range(before)]
    old_rows = rows.ring[rows_cursor.slot].astype(jnp.float32)
    new_rows, totals = [], []
    moved = list(old)
    for sequence in range(batch):
        mine = slice(sequence * rows_per_sequence, (sequence + 1) * rows_per_sequence)
        awake = positions[sequence * rows_per_sequence] >= 0
        inputs = jnp.concatenate(
            [*[one[sequence : sequence + 1] for one in old], old_rows[mine]], axis=0
        )
        committed = _from_row(inputs, kept[sequence])[:before]
        window = jnp.concatenate([committed, x[mine]], axis=0)
        total = window[:rows_per_sequence] * taps[0]
        for tap in range(1, len(taps)):
            total = total + window[tap : tap + rows_per_sequence] * taps[tap]
        totals.append(total)
        new_rows.append(jnp.where(awake, x[mine], old_rows[mine]))
        for tap in range(before):
            row = lax.broadcasted_iota(jnp.int32, moved[tap].shape, 0)
            changes = (row == sequence) & awake
            value = jnp.broadcast_to(committed[tap : tap + 1], moved[tap].shape)
            moved[tap] = jnp.where(changes, value, moved[tap])
    for tap in range(before):
        history.ring[history_cursor.slot, tap] = moved[tap].astype(jnp.bfloat16)
    rows.ring[rows_cursor.slot] = jnp.concatenate(new_rows, axis=0).astype(jnp.bfloat16)
    missing = x.shape[0] - batch * rows_per_sequence
    if missing:
        totals.append(jnp.zeros((missing, x.shape[1]), jnp.float32))
    result = jnp.concatenate(totals, axis=0)
    return activation(result) if activation else result


def _from_row(x: jax.Array, first: Scalar) -> jax.Array:
    """Rows `first` .. of `x` `[n, C]`, moved to the top; what comes behind them means nothing."""
    missing = -x.shape[0] % SUBLANES
    if missing:
        x = jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)], axis=0)
    turn = jnp.where(first == 0, 0, x.shape[0] - first)
    return pltpu.roll(x, turn, 0)


def kept_delta_rule(
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
) -> tuple[StreamCursor, StreamCursor, StreamCursor, StreamCursor]:
    """The gated delta rule over the T rows of every sequence, behind the commit of kept rows.

    With D_i the sum of the decays of rows 0 .. i, per value head, all in f32:

        S <- e^(D_n-1) S + sum_i<n e^(D_n-1 - D_i) k_i u_i^T        over the n = `kept` kept rows
        u_i = beta_i (v_i - e^(D_i) S^T k_i - sum_j<i e^(D_i - D_j) (k_i . k_j) u_j)
        o_i = e^(D_i) S^T q_i + sum_j<=i e^(D_i - D_j) (q_i . k_j) u_j

    and o is rounded to bf16. Rows with a negative position have no key, update or decay. All four
    streams have one item per sequence and are changed in place; a sequence that rests keeps every
    bit of them and its rows of `out`, and with `kept` 0 the state keeps every bit.

    Args:
      state: items `[value_heads * key_dim, value_dim]` f32.
      k_rows: items `[T, key_heads * key_dim]` f32.
      u_rows: items `[T, value_heads * value_dim]` f32.
      decay_rows: items `[T, n]` f32 with n >= value_heads; lanes behind those are not touched.
      positions: `[batch * T]` i32 in SMEM.
      kept: `[batch]` i32 in SMEM, at most T.
      q: `[R, key_heads * key_dim]`, as is `k`; the rows of a sequence are consecutive.
      v: `[R, value_heads * value_dim]`, as is `out`.
      beta: `[R, value_heads]`, as is `decay`.
      key_heads: value head j uses key head `j * key_heads // value_heads`.
    """
    assert value_heads % key_heads == 0, f"{value_heads} value heads over {key_heads} key heads"
    streams = (state, k_rows, u_rows, decay_rows)
    size = rows_per_sequence

    def all_heads(sequence: jax.Array, cursors: Sequence[StreamCursor]) -> None:
        states, old_k, old_u, old_decay = (
            stream.ring.at[cursor.slot] for stream, cursor in zip(streams, cursors, strict=True)
        )
        number = kept[sequence]
        commit = _decays(old_decay[:, 0:value_heads], number)
        real = real_rows(positions, sequence, size)
        betas = first_rows(beta.rows(sequence, size), real)
        decays = first_rows(decay.rows(sequence, size), real)
        total = running_sum(decays)
        old_decay[:, 0:value_heads] = decays

        def key_head(head: Scalar) -> None:
            old_keys = View(ref=old_k, start=0, width=key_heads * key_dim).head(head, key_dim)
            before = first_rows(old_keys.load(), number)
            keys = first_rows(k.head(head, key_dim).rows(sequence, size), real)
            old_keys.store(keys)
            both = jnp.concatenate([keys, q.head(head, key_dim).rows(sequence, size)], axis=0)
            likeness = over_lanes_of_few(both, keys)
            group = value_heads // key_heads
            members = [head * group + member for member in range(group)]
            all_updates = View(ref=old_u, start=0, width=value_heads * value_dim)
            updates = [all_updates.head(one, value_dim) for one in members]
            weighted = [
                first_rows(update.load(), number) * column(commit[0], one)
                for update, one in zip(updates, members, strict=True)
            ]
            added = over_few_rows(before, join(weighted))
            for member, value_head in enumerate(members):
                place = state_rows(value_head, key_dim)
                old = states[place, :]
                grown = old * column(commit[1], value_head)
                grown = grown + added[:, member * value_dim : (member + 1) * value_dim]
                new = jnp.where(number > 0, grown, old)
                states[place, :] = new
                update, result = _rows_of_head(
                    likeness,
                    few_by_many(both, new),
                    v.head(value_head, value_dim).rows(sequence, size),
                    column(betas, value_head),
                    column(total, value_head),
                )
                updates[member].store(update)
                out.head(value_head, value_dim).store_rows(sequence, round_bf16(result))

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


def first_rows(x: jax.Array, count: Scalar) -> jax.Array:
    """Rows 0 .. count - 1 of `x`; the others, which may be NaN, become zero."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 0) < count, x, 0.0)


def running_sum(x: jax.Array) -> jax.Array:
    """Row i becomes the sum of rows 0 .. i of `[T, n]`."""
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    total = jnp.zeros_like(x)
    for index in range(x.shape[0]):
        one = jnp.broadcast_to(x[index : index + 1], x.shape)
        total = total + jnp.where(row >= index, one, 0.0)
    return total


def _decays(decays: jax.Array, number: Scalar) -> tuple[jax.Array, jax.Array]:
    """From each of the first `number` rows to their end, zero for others, and over all of them.

    Args:
      decays: `[T, heads]`.

    Returns:
      Factors `[T, heads]` and `[1, heads]`.
    """
    total = running_sum(first_rows(decays, number))
    last = total[-1:]  # rows that do not count add nothing
    return first_rows(jnp.exp(last - total), number), jnp.exp(last)


def _rows_of_head(
    likeness: jax.Array, from_state: jax.Array, v: jax.Array, beta: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Updates and outputs `[T, dv]` of one value head.

    The equations for the updates are a triangular system, solved row by row from the top: once a
    row is known, its part is taken off all rows below, and added to all outputs that see it.

    Args:
      likeness: `[2 T, T]`: products of keys, then of queries, with every key.
      from_state: `[2 T, dv]`: what the state has for keys, then for queries.
      v: `[T, dv]`.
      beta: `[T, 1]`.
      total: `[T, 1]`, the sums of decays.
    """
    size = v.shape[0]
    row = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    key = lax.broadcasted_iota(jnp.int32, (size, size), 1)
    down = jnp.broadcast_to(total, (size, size))
    across = jnp.sum(jnp.where(row == key, down, 0.0), axis=0, keepdims=True)
    # Masked before the exponential, which overflows for rows still to come.
    left = jnp.exp(jnp.where(row >= key, down - across, 0.0))
    between = jnp.where(row > key, likeness[:size] * left, 0.0) * beta
    seen = jnp.where(row >= key, likeness[size:] * left, 0.0)
    factor = jnp.exp(total)
    updates = (v - from_state[:size] * factor) * beta
    return solved_rows(between, seen, updates, from_state[size:] * factor)


def solved_rows(
    between: jax.Array, seen: jax.Array, updates: jax.Array, outputs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Updates and outputs `[T, dv]` with the parts of the updates of earlier rows.

    Args:
      between: `[T, T]`, what an update takes from each earlier one; zero on and above the diagonal.
      seen: `[T, T]`, what an output takes from each update; zero above the diagonal.
      updates, outputs: `[T, dv]`, as they are without other rows.
    """
    for index in range(updates.shape[0]):
        known = jnp.broadcast_to(updates[index : index + 1], updates.shape)
        updates = updates - known * between[:, index : index + 1]
        outputs = outputs + known * seen[:, index : index + 1]
    return updates, outputs
