"""Attention to a cache of latent vectors, of which keys and values of all heads are projections.

Nothing is projected per position: a query is folded into the space of latents, and the value of a
head is projected from the weighted sum of latents. So all heads share one stream of the cache, and
the rows of all of them are one product. Tiles and new rows are as in
`mkc.codegen_pallas.support.rows_attention`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

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
from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.rows_attention import NewRows
from mkc.codegen_pallas.support.rows_attention import append_rows
from mkc.codegen_pallas.support.rows_attention import row_number
from mkc.codegen_pallas.support.rows_attention import tiles_before
from mkc.codegen_pallas.support.streams import Stream
from mkc.codegen_pallas.support.streams import StreamCursor
from mkc.codegen_pallas.support.vector import join
from mkc.codegen_pallas.support.vector import round_bf16

PART = 256  # positions that enter the softmax together
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

    def folded() -> tuple[list[jax.Array], list[jax.Array]]:
        """Of each sequence the queries for latents `[m, rank]` and for shared keys `[m, s]`, f32:
        the rows of the first head, those of the second, and so on."""
        rows = q.load().astype(jnp.float32)
        of_latents, of_shared = [], []
        for head in range(heads):
            start = head * (key_dim + shared_dim)
            own = rows[:, start : start + key_dim].astype(jnp.bfloat16)
            key = matrix(head * (key_dim + value_dim), key_dim)
            of_latents.append(jnp.dot(own, key, preferred_element_type=jnp.float32))
            cut = rows[:, start + key_dim : start + key_dim + shared_dim]
            of_shared.append(_padded_lanes(cut, shared_lanes))
        return _by_sequence(of_latents, batch, size), _by_sequence(of_shared, batch, size)

    all_queries = folded()

    def one_turn(
        turn: jax.Array, carry: tuple[KvCursor, list[jax.Array]]
    ) -> tuple[KvCursor, list[jax.Array]]:
        cursor, sums = carry
        sequence = kv.awake[turn]
        start, end = span(sequence)
        new = NewRows(
            k=latent.rows(sequence, size),
            v=_padded_lanes(shared.rows(sequence, size), shared_lanes),
            first=positions[sequence * size],
            count=real_rows(positions, sequence, size),
        )
        of_latents, of_shared = (_chosen(one, sequence) for one in all_queries)
        queries = (_two_pieces(of_latents), of_shared.astype(jnp.bfloat16))

        def wait(slot: Scalar) -> None:
            for copy in fetches(kv, 0, 0, 0, slot):
                copy.wait()

        def whole_tile(_: jax.Array, carry: tuple[KvCursor, Softmax]) -> tuple[KvCursor, Softmax]:
            cursor, softmax = carry
            wait(cursor.slot)
            latents = kv.key_ring[cursor.slot]
            scores = _scores(queries, latents, kv.value_ring[cursor.slot], scale)
            softmax = _attend(softmax, scores, latents)
            return fetch_next(kv, cursor, span), softmax

        softmax = empty_softmax(queries[1].shape[0], rank)
        cursor, softmax = lax.fori_loop(start, end - 1, whole_tile, (cursor, softmax))

        wait(cursor.slot)
        append_rows(kv, layer, sequence, cursor.slot, new)
        before = new.first - (end - 1) * kv.tile  # rows of the last tile that lie before the new
        latents = kv.key_ring[cursor.slot]
        scores = _scores(queries, latents, kv.value_ring[cursor.slot], scale)
        position = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
        scores = jnp.where(position < before, scores, MASKED)
        own, own_shared = (_whole_registers(one).astype(jnp.bfloat16) for one in (new.k, new.v))
        own_scores = _scores(queries, own, own_shared, scale)
        key = lax.broadcasted_iota(jnp.int32, own_scores.shape, 1)
        seen = (key < new.count) & (key <= row_number(own_scores.shape, size))
        softmax = _attend(softmax, jnp.where(seen, own_scores, MASKED), own)
        softmax = _attend(softmax, scores, _first_rows(latents, before))
        sums = _replaced(sums, sequence, softmax.values / softmax.total)
        return fetch_next(kv, cursor, span), sums

    sums = [jnp.zeros((all_queries[0][0].shape[0], rank), jnp.float32)] * batch
    cursor, sums = lax.fori_loop(0, cursor.turns, one_turn, (cursor, sums))
    for head in range(heads):
        rows = [one[head * size : (head + 1) * size] for one in sums]
        value = matrix(head * (key_dim + value_dim) + key_dim, value_dim)
        products = lax.dot_general(
            _two_pieces(_whole_registers(jnp.concatenate(rows, axis=0))),
            value,
            ROWS_TO_LANES,
            preferred_element_type=jnp.float32,
        )
        result = _sum_of_halves(products)[: batch * size]
        result = round_bf16(result) if rounds else result
        _store_awake(out.head(head, value_dim), result, positions, size)
    return cursor._replace(calls=layer + 1)


def _by_sequence(heads: list[jax.Array], batch: int, size: int) -> list[jax.Array]:
    """From the rows of all sequences for each head, `[R, n]`, to those of all heads for each
    sequence, `[m, n]`: `size` of the first head, `size` of the second, and so on."""
    return [
        _whole_registers(jnp.concatenate([one[first : first + size] for one in heads], axis=0))
        for first in range(0, batch * size, size)
    ]


def _chosen(of_sequences: list[jax.Array], sequence: Scalar) -> jax.Array:
    """The one of a run-time sequence: values in registers have no run-time index."""
    found = of_sequences[0]
    for other, value in enumerate(of_sequences[1:], 1):
        found = jnp.where(sequence == other, value, found)
    return found


def _replaced(of_sequences: list[jax.Array], sequence: Scalar, value: jax.Array) -> list[jax.Array]:
    """With another value for a run-time sequence."""
    if len(of_sequences) == 1:
        return [value]
    return [jnp.where(sequence == other, value, old) for other, old in enumerate(of_sequences)]


def _store_awake(out: View, value: jax.Array, positions: Ref, size: int) -> None:
    """Stores rows `[batch * size, n]` of all sequences; rows of those that rest are kept."""
    old = out.load().astype(jnp.float32)
    row = lax.broadcasted_iota(jnp.int32, old.shape, 0)
    mine = row < 0
    for first in range(0, value.shape[0], size):
        end = jnp.where(positions[first] >= 0, first + size, first)
        mine = mine | ((row >= first) & (row < end))
    behind = old[value.shape[0] :]
    whole = jnp.concatenate([value, behind], axis=0) if behind.shape[0] else value
    out.store(jnp.where(mine, whole, old).astype(out.ref.dtype))


def _first_rows(x: jax.Array, count: Scalar) -> jax.Array:
    """`[n, k]` with zeros from row `count` on: their weights are zero, but the cache may have NaN
    there."""
    row = lax.broadcasted_iota(jnp.int32, x.shape, 0)
    return jnp.where(row < count, x, jnp.zeros_like(x))


def _scores(
    queries: tuple[jax.Array, jax.Array], latents: jax.Array, shared: jax.Array, scale: float
) -> jax.Array:
    """Scores `[m, n]` f32 of all heads' rows and n positions.

    As many positions at a time as have one register's lanes: the matrix unit turns such blocks as
    they enter it. Wider ones the compiler turns in the cross-lane unit, which takes longer.

    Args:
      queries: for latents `[2 * m, rank]`, two pieces; for shared keys `[m, s]`; bf16.
      latents: `[n, rank]` bf16.
      shared: `[n, s]` bf16.
    """

    def block(first: int) -> jax.Array:
        of_latents, of_shared = (
            lax.dot_general(
                one, keys[first : first + LANES], ROWS_TO_LANES, preferred_element_type=jnp.float32
            )
            for one, keys in zip(queries, (latents, shared), strict=True)
        )
        return (_sum_of_halves(of_latents) + of_shared) * scale

    return join([block(first) for first in range(0, latents.shape[0], LANES)])


def _attend(old: Softmax, scores: jax.Array, latents: jax.Array) -> Softmax:
    """Adds positions to the softmax of all heads' rows.

    In parts: the products of one fill the pauses in which the next waits for its maximum.

    Args:
      scores: `[m, n]` f32, `MASKED` where a row does not see a position.
      latents: `[n, rank]` bf16, finite.
    """
    for first in range(0, latents.shape[0], PART):
        part = slice(first, first + PART)
        old = _attend_part(old, scores[:, part], latents[part])
    return old


def _attend_part(old: Softmax, scores: jax.Array, latents: jax.Array) -> Softmax:
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
