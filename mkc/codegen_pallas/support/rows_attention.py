"""Attention of the T rows of a round to a cache that streams through VMEM, and to fresh rows.

The cache's tiles hold what lies before the round's first position, so they are known when the round
begins. Keys and values that are newer are seen where they are computed, in VMEM. They enter the
cache as one or two aligned blocks of 16 rows; what these blocks hold behind the new rows is dead.
"""

from __future__ import annotations

from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.accept import real_rows
from mkc.codegen_pallas.support.attention import KvCursor
from mkc.codegen_pallas.support.attention import KvStream
from mkc.codegen_pallas.support.attention import Softmax
from mkc.codegen_pallas.support.attention import Span
from mkc.codegen_pallas.support.attention import attend
from mkc.codegen_pallas.support.attention import empty_softmax
from mkc.codegen_pallas.support.attention import fetch_next
from mkc.codegen_pallas.support.attention import fetches
from mkc.codegen_pallas.support.attention import start_tiles
from mkc.codegen_pallas.support.refs import BF16_ROWS
from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.streams import AHEAD_OF_TAPE
from mkc.codegen_pallas.support.vector import round_bf16

BLOCKS = 2  # of 16 rows that T new rows may touch


def tiles_before(kv: KvStream, positions: Ref, rows_per_sequence: int) -> Span:
    """The tiles with rows before the first position that some row of the round sees, at least one:
    where nothing lies before, a tile is fetched of which nobody sees anything."""

    def of(sequence: Scalar) -> tuple[Scalar, Scalar]:
        position = positions[sequence * rows_per_sequence]
        tile = jnp.int32(kv.tile)
        end = lax.div(jnp.maximum(position - 1, 0), tile) + 1
        if kv.window is None:
            return 0, end
        return lax.div(jnp.maximum(position + 1 - kv.window, 0), tile), end

    return of


def rows_prologue(kv: KvStream, positions: Ref, batch: int, rows_per_sequence: int) -> KvCursor:
    """Starts the first `slots` tiles, or all when there are fewer.

    Args:
      kv: with `key_new` and `value_new` `[batch, 32, kv_heads * head_dim]`.
      positions: `[batch * T]` i32 in SMEM, each below the context: the first rows of the round. A
        sequence rests whose first one is negative.
    """
    span = tiles_before(kv, positions, rows_per_sequence)
    return start_tiles(kv, positions, span, batch=batch, rows_per_sequence=rows_per_sequence)


class NewRows(NamedTuple):
    """Rows of a sequence that enter the cache.

    Attributes:
      k, v: `[T, kv_heads * head_dim]` f32.
      first: the position of the first one.
      count: how many are real.
    """

    k: jax.Array
    v: jax.Array
    first: Scalar
    count: Scalar


def _each_write(
    kv: KvStream, layer: Scalar, sequence: Scalar, first: Scalar, count: Scalar, *, wait: bool
) -> None:
    """Starts or awaits the copies of the blocks that hold rows first .. first + count - 1.

    None where the count is 0: a sequence whose round was not decided has no rows to remember.
    """
    aligned = first & -BF16_ROWS
    for block in range(BLOCKS):

        @pl.when((count > 0) & (first + count > aligned + block * BF16_ROWS))
        def _block(block: int = block) -> None:
            start = pl.multiple_of(aligned + block * BF16_ROWS, BF16_ROWS)
            rows = pl.ds(start, BF16_ROWS)
            mine = pl.ds(block * BF16_ROWS, BF16_ROWS)
            both = ((kv.key_new, kv.key_hbm), (kv.value_new, kv.value_hbm))
            for index, (new, hbm) in enumerate(both):
                copy = pltpu.make_async_copy(
                    new.at[sequence, mine, :],
                    hbm.at[layer, sequence, rows, :],
                    kv.written.at[index, sequence],
                )
                if wait:
                    copy.wait()
                else:
                    copy.start(priority=AHEAD_OF_TAPE)


def append_rows(kv: KvStream, layer: Scalar, sequence: Scalar, slot: Scalar, new: NewRows) -> None:
    """Starts new rows on their way to the cache. The last tile, in `slot`, has the rows that lie
    before them in their first block."""

    @pl.when(layer > 0)
    def _previous() -> None:
        _each_write(kv, 0, sequence, new.first, new.count, wait=True)

    offset = new.first & (BF16_ROWS - 1)
    in_tile = lax.rem(new.first, jnp.int32(kv.tile))
    old_rows = pl.ds(pl.multiple_of(in_tile & -BF16_ROWS, BF16_ROWS), BF16_ROWS)
    for ring, blocks, fresh in (
        (kv.key_ring, kv.key_new, new.k),
        (kv.value_ring, kv.value_new, new.v),
    ):
        size, width = fresh.shape
        behind = jnp.zeros((BLOCKS * BF16_ROWS - size, width), jnp.float32)
        moved = pltpu.roll(jnp.concatenate([fresh, behind], axis=0), offset, 0)
        row = lax.broadcasted_iota(jnp.int32, (BF16_ROWS, width), 0)
        old = ring[slot, old_rows, :].astype(jnp.float32)
        first_block = jnp.where(row < offset, old, moved[:BF16_ROWS])
        blocks[sequence, 0:BF16_ROWS, :] = first_block.astype(jnp.bfloat16)
        blocks[sequence, BF16_ROWS:, :] = moved[BF16_ROWS:].astype(jnp.bfloat16)
    _each_write(kv, layer, sequence, new.first, new.count, wait=False)


def clear_behind(values: Ref, slot: Scalar, count: Scalar) -> None:
    """Value rows from `count` on become zero: their weights are, but the cache may have NaN."""
    tile = values[slot]
    visible = lax.broadcasted_iota(jnp.int32, tile.shape, 0) < count
    values[slot] = jnp.where(visible, tile, jnp.zeros_like(tile))


def _query_group(rows: jax.Array, heads: list[int], head_dim: int) -> jax.Array:
    """Heads of `[T, n]` one below the other, as bf16 `[rows, head_dim]`, rows a multiple of 8."""
    parts = [rows[:, head * head_dim : (head + 1) * head_dim] for head in heads]
    padding = -len(heads) * rows.shape[0] % SUBLANES
    if padding:
        parts.append(jnp.zeros((padding, head_dim), jnp.float32))
    return jnp.concatenate(parts, axis=0).astype(jnp.bfloat16)


def row_number(shape: tuple[int, ...], rows: int) -> jax.Array:
    """Which of the T rows a row of a query group is."""
    number = lax.broadcasted_iota(jnp.int32, shape, 0)
    result = number
    for first in range(rows, shape[0], rows):
        result = jnp.where(number >= first, number - first, result)
    return result


def rows_attention(
    kv: KvStream,
    cursor: KvCursor,
    first_positions: Ref,
    *,
    q: View,
    k: View,
    v: View,
    positions: Ref,
    remembered: tuple[View, View, Ref] | None,
    out: View,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
    causal: bool,
    window: int | None,
    anchored: bool = False,
    batch: int,
    rows_per_sequence: int,
) -> KvCursor:
    """Attends to the cache and to fresh rows, and starts new rows on their way to the cache.

    Without `remembered` the rows' own keys and values enter the cache. With it those of the
    remembered rows do, which every row sees; the block's own are seen and not written. Padding
    rows are seen by nobody, and what they get means nothing. Sequences that rest are left out.

    Rounding is that of `attention`. Call once per layer.

    Args:
      kv: its window is None or `window`.
      first_positions: as given to `rows_prologue`; entry s * T is the position of the first row
        that enters the cache.
      q: `[R, heads * head_dim]`, as is `out`; the T rows of a sequence are consecutive.
      k: `[R, kv_heads * head_dim]`, as is `v`.
      positions: `[batch * T]` i32 in SMEM, of the rows; consecutive, padding behind.
      remembered: keys, values and positions of other rows, in the same form.
      kv_heads: query head h reads key head `h * kv_heads // heads`.
      causal: a row sees only the rows of its block up to itself.
      window: a row sees keys nearer than this, None for all.
      anchored: keys are as near to every row as to the first one, and those of the block near.
    """
    assert heads % kv_heads == 0, f"{heads} query heads over {kv_heads} key heads"
    assert rows_per_sequence <= BF16_ROWS, f"{rows_per_sequence} rows are more than a block has"
    assert kv.window in (None, window), f"tiles for a window of {kv.window}, not {window}"
    size, group = rows_per_sequence, heads // kv_heads
    layer = cursor.calls
    span = tiles_before(kv, first_positions, size)

    def one_turn(turn: jax.Array, cursor: KvCursor) -> KvCursor:
        sequence = kv.awake[turn]
        start, end = span(sequence)
        first = first_positions[sequence * size]
        own_first = positions[sequence * size]
        own_count = real_rows(positions, sequence, size)
        new_k, new_v, new_positions = remembered or (k, v, positions)
        new = NewRows(
            k=new_k.rows(sequence, size),
            v=new_v.rows(sequence, size),
            first=first,
            count=real_rows(new_positions, sequence, size),
        )
        query_rows = q.rows(sequence, size)
        of_head = [slice(head * head_dim, (head + 1) * head_dim) for head in range(kv_heads)]
        queries = [
            _query_group(query_rows, list(range(head * group, (head + 1) * group)), head_dim)
            for head in range(kv_heads)
        ]

        def one_tile(
            tile: jax.Array, carry: tuple[KvCursor, list[Softmax]]
        ) -> tuple[KvCursor, list[Softmax]]:
            cursor, softmax = carry
            slot = cursor.slot
            for copy in fetches(kv, 0, 0, 0, slot):
                copy.wait()
            before = first - tile * kv.tile  # rows of this tile that lie before the round

            @pl.when(tile == end - 1)
            def _last_tile() -> None:
                append_rows(kv, layer, sequence, slot, new)
                clear_behind(kv.value_ring, slot, before)

            def visible(shape: tuple[int, ...]) -> jax.Array:
                key = lax.broadcasted_iota(jnp.int32, shape, 1)
                seen: jax.Array = key < before
                if window is not None:
                    row = 0 if anchored else row_number(shape, size)
                    here = row + (own_first - tile * kv.tile)
                    seen = seen & (here - key < window)
                return seen

            softmax = [
                attend(
                    queries[head],
                    kv.key_ring[slot, :, of_head[head]],
                    kv.value_ring[slot, :, of_head[head]],
                    visible,
                    scale,
                    softmax[head],
                )
                for head in range(kv_heads)
            ]
            return fetch_next(kv, cursor, span), softmax

        def fresh_visible(shape: tuple[int, ...]) -> jax.Array:
            row = row_number(shape, size)
            key = lax.broadcasted_iota(jnp.int32, shape, 1)
            own = key - size if remembered else key  # negative for remembered rows
            seen = own < own_count
            if causal:
                seen = seen & (own <= row)
            distance = row - own
            if remembered:
                seen = seen & ((own >= 0) | (key < new.count))
                here = 0 if anchored else row
                distance = jnp.where(own >= 0, distance, here + (own_first - first) - key)
            if window is not None:
                near = jnp.abs(distance) < window
                seen = seen & (near | (own >= 0) if anchored else near)
            return seen

        empty = empty_softmax(queries[0].shape[0], head_dim)
        cursor, softmax = lax.fori_loop(start, end, one_tile, (cursor, [empty] * kv_heads))
        fresh_k, fresh_v = new.k, new.v
        if remembered:
            fresh_k = jnp.concatenate([new.k, k.rows(sequence, size)], axis=0)
            fresh_v = jnp.concatenate([new.v, v.rows(sequence, size)], axis=0)
        if fresh_k.shape[0] == 1:  # the compiler has no product with one key; nobody sees the other
            fresh_k, fresh_v = (
                jnp.concatenate([one, jnp.zeros_like(one)], axis=0) for one in (fresh_k, fresh_v)
            )
        for head in range(kv_heads):
            result = attend(
                queries[head],
                fresh_k[:, of_head[head]].astype(jnp.bfloat16),
                fresh_v[:, of_head[head]].astype(jnp.bfloat16),
                fresh_visible,
                scale,
                softmax[head],
            )
            value = round_bf16(result.values / result.total)
            for member in range(group):
                rows = value[member * size : (member + 1) * size]
                out.head(head * group + member, head_dim).store_rows(sequence, rows)
        return cursor

    cursor = lax.fori_loop(0, cursor.turns, one_turn, cursor)
    return cursor._replace(calls=layer + 1)


def rows_drain(kv: KvStream, positions: Ref, batch: int, rows_per_sequence: int) -> None:
    """Waits for the last layer's writes to the cache. Call once, after the last layer.

    Args:
      positions: of the rows that enter the cache: the remembered ones where there are any.
    """
    for sequence in range(batch):
        first = positions[sequence * rows_per_sequence]

        @pl.when(first >= 0)
        def _wait(sequence: int = sequence, first: Any = first) -> None:
            count = real_rows(positions, sequence, rows_per_sequence)
            _each_write(kv, 0, sequence, first, count, wait=True)
