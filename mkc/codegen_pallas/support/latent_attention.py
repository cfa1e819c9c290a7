"""Attention to a cache of latent vectors, of which keys and values of all heads are projections.

Nothing is projected per position: a query is folded into the space of latents, and the value of a
head is projected from the weighted sum of latents. So all heads share one stream of the cache, and
the rows of all of them are one product. Tiles and new rows are as in
`mkc.codegen_pallas.support.rows_attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mkc.codegen_pallas.support.accept import real_rows
from mkc.codegen_pallas.support.attention import MASKED
from mkc.codegen_pallas.support.attention import KvCursor
from mkc.codegen_pallas.support.attention import KvStream
from mkc.codegen_pallas.support.attention import Softmax
from mkc.codegen_pallas.support.attention import empty_softmax
from mkc.codegen_pallas.support.attention import fetch_next
from mkc.codegen_pallas.support.attention import fetches
from mkc.codegen_pallas.support.products import pieces
from mkc.codegen_pallas.support.refs import BF16_ROWS
from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.rows_attention import NewRows
from mkc.codegen_pallas.support.rows_attention import append_rows
from mkc.codegen_pallas.support.rows_attention import clear_behind
from mkc.codegen_pallas.support.rows_attention import row_number
from mkc.codegen_pallas.support.rows_attention import tiles_before
from mkc.codegen_pallas.support.streams import Stream
from mkc.codegen_pallas.support.streams import StreamCursor
from mkc.codegen_pallas.support.vector import join
from mkc.codegen_pallas.support.vector import round_bf16

ROWS_TO_LANES = (((1,), (1,)), ((), ()))  # of a product with a transposed matrix


def latent_attention(
    kv: KvStream,
    cursor: KvCursor,
    up: Stream,
    up_cursor: StreamCursor,
    positions: Ref,
    *,
    q: View,
    latent: View,
    shared: View,
    out: View,
    heads: int,
    key_dim: int,
    shared_dim: int,
    value_dim: int,
    rank: int,
    batch: int,
    rows_per_sequence: int,
    scale: float,
    rounds: bool = True,
) -> KvCursor:
    """Writes latents and shared keys of the rows to the cache; attends up to their own positions.

    See `mkc.ir.ops_mixing.LatentAttention`. Folded queries, the weights of the softmax and the sums
    of latents have the precision of two bf16 numbers; scores and softmax are f32. Padding rows are
    seen by nobody, and what they get means nothing. Sequences that rest are left out: their rows of
    `out` are kept. Call once per layer.

    Args:
      kv: latents in the place of keys, `[layers, batch, context, rank]` bf16; shared keys in the
        place of values, `[layers, batch, context, s]` bf16 with s >= `shared_dim` and zeros behind
        those. No window. Its blocks of new rows are `[batch, 32, ...]`.
      cursor: from `rows_prologue`.
      up: items `[heads * (key_dim + value_dim), rank]` bf16; the one at the cursor has arrived.
      positions: `[batch * T]` i32 in SMEM, consecutive ones, padding behind.
      q: `[R, heads * (key_dim + shared_dim)]` bf16 numbers: of every head its query, then the one
        that meets the shared key. The T rows of a sequence are consecutive.
      latent: `[R, rank]` bf16 numbers.
      shared: `[R, shared_dim]` bf16 numbers.
      out: `[R, heads * value_dim]`.
      rounds: round the result to bf16.
    """
    assert rows_per_sequence <= BF16_ROWS, f"{rows_per_sequence} rows are more than a block has"
    size, layer = rows_per_sequence, cursor.calls
    span = tiles_before(kv, positions, size)
    shared_lanes = kv.value_ring.shape[2]

    def matrix(first: int, count: int) -> jax.Array:
        rows: jax.Array = up.ring[up_cursor.slot, first : first + count, :]
        return rows

    def folded(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries for latents, two pieces below one another, and for shared keys; bf16."""
        of_latents, of_shared = [], []
        for head in range(heads):
            start = head * (key_dim + shared_dim)
            own = rows[:, start : start + key_dim].astype(jnp.bfloat16)
            key = matrix(head * (key_dim + value_dim), key_dim)
            of_latents.append(jnp.dot(own, key, preferred_element_type=jnp.float32))
            of_shared.append(rows[:, start + key_dim : start + key_dim + shared_dim])
        return (
            _two_pieces(_whole_registers(jnp.concatenate(of_latents, axis=0))),
            _padded_lanes(
                _whole_registers(jnp.concatenate(of_shared, axis=0)), shared_lanes
            ).astype(jnp.bfloat16),
        )

    def one_turn(turn: jax.Array, cursor: KvCursor) -> KvCursor:
        sequence = kv.awake[turn]
        start, end = span(sequence)
        first = positions[sequence * size]
        count = real_rows(positions, sequence, size)
        new = NewRows(
            k=latent.rows(sequence, size),
            v=_padded_lanes(shared.rows(sequence, size), shared_lanes),
            first=first,
            count=count,
        )
        queries = folded(q.rows(sequence, size))

        def one_tile(tile: jax.Array, carry: tuple[KvCursor, Softmax]) -> tuple[KvCursor, Softmax]:
            cursor, softmax = carry
            slot = cursor.slot
            for copy in fetches(kv, 0, 0, 0, slot):
                copy.wait()
            before = first - tile * kv.tile  # rows of this tile that lie before the new ones

            @pl.when(tile == end - 1)
            def _last_tile() -> None:
                append_rows(kv, layer, sequence, slot, new)
                clear_behind(kv.key_ring, slot, before)

            def visible(shape: tuple[int, ...]) -> jax.Array:
                seen: jax.Array = lax.broadcasted_iota(jnp.int32, shape, 1) < before
                return seen

            softmax = _attend(
                queries, kv.key_ring[slot], kv.value_ring[slot], visible, scale, softmax
            )
            return fetch_next(kv, cursor, span), softmax

        def own_visible(shape: tuple[int, ...]) -> jax.Array:
            key = lax.broadcasted_iota(jnp.int32, shape, 1)
            seen: jax.Array = (key < count) & (key <= row_number(shape, size))
            return seen

        empty = empty_softmax(queries[1].shape[0], rank)
        cursor, softmax = lax.fori_loop(start, end, one_tile, (cursor, empty))
        softmax = _attend(
            queries,
            _whole_registers(new.k).astype(jnp.bfloat16),
            _whole_registers(new.v).astype(jnp.bfloat16),
            own_visible,
            scale,
            softmax,
        )
        mixed = softmax.values / softmax.total
        for head in range(heads):
            parts = _two_pieces(_whole_registers(mixed[head * size : (head + 1) * size]))
            value = matrix(head * (key_dim + value_dim) + key_dim, value_dim)
            products = lax.dot_general(
                parts, value, ROWS_TO_LANES, preferred_element_type=jnp.float32
            )
            result = _sum_of_halves(products)[:size]
            own_lanes = out.head(head, value_dim)
            own_lanes.store_rows(sequence, round_bf16(result) if rounds else result)
        return cursor

    cursor = lax.fori_loop(0, cursor.turns, one_turn, cursor)
    return cursor._replace(calls=layer + 1)


def _attend(
    queries: tuple[jax.Array, jax.Array],
    latents: jax.Array,
    shared: jax.Array,
    visible: Callable[[tuple[int, ...]], jax.Array],
    scale: float,
    old: Softmax,
) -> Softmax:
    """Adds positions to the softmax of all heads' rows.

    Args:
      queries: for latents `[2 * m, rank]`, two pieces; for shared keys `[m, s]`; bf16.
      latents: `[n, rank]` bf16, finite.
      shared: `[n, s]` bf16.
      visible: from the shape `[m, n]` to which positions each row sees.
    """
    of_latents, of_shared = (
        lax.dot_general(one, keys, ROWS_TO_LANES, preferred_element_type=jnp.float32)
        for one, keys in zip(queries, (latents, shared), strict=True)
    )
    scores = (_sum_of_halves(of_latents) + of_shared) * scale
    scores = jnp.where(visible(scores.shape), scores, MASKED)
    maximum = jnp.maximum(old.maximum, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - maximum)
    correction = jnp.exp(old.maximum - maximum)
    added = jnp.dot(_two_pieces(weights), latents, preferred_element_type=jnp.float32)
    return Softmax(
        maximum=maximum,
        total=old.total * correction + jnp.sum(weights, axis=1, keepdims=True),
        values=old.values * correction + _sum_of_halves(added),
    )


def _two_pieces(x: jax.Array) -> jax.Array:
    """Two bf16 numbers for each of `[m, n]` f32, whose sum it nearly is: `[2 * m, n]`."""
    upper = pieces(x)[0]
    return jnp.concatenate([upper, x - upper], axis=0).astype(jnp.bfloat16)


def _sum_of_halves(x: jax.Array) -> jax.Array:
    """`[2 * m, n]` -> `[m, n]`; the small half first."""
    half = x.shape[0] // 2
    return x[half:] + x[:half]


def _whole_registers(x: jax.Array) -> jax.Array:
    """`[m, n]` with zero rows behind, up to a multiple of 8."""
    missing = -x.shape[0] % SUBLANES
    if not missing:
        return x
    return jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)], axis=0)


def _padded_lanes(x: jax.Array, lanes: int) -> jax.Array:
    """`[m, n]` with zero lanes behind."""
    missing = lanes - x.shape[1]
    return join([x, jnp.zeros((x.shape[0], missing), x.dtype)]) if missing else x
