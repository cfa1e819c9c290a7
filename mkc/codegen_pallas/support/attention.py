"""Attention of one query row per sequence over a key-value cache that streams through VMEM.

Tiles of cache rows are fetched in the order of their use: by layer, then sequence, then position.
A sequence's last tile is the one that holds its position, where the new key and value row belongs.
The row is patched into the tile in VMEM and written to the cache from a block of its own.
A sequence that rests, that is with a negative position, has no tiles and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.refs import BF16_ROWS
from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.refs import wrapped_next
from mkc.codegen_pallas.support.streams import AHEAD_OF_TAPE
from mkc.codegen_pallas.support.vector import round_bf16

# Scores of masked positions and the first running maximum: finite, so that no difference of two is
# NaN, and so low that its exponential against any real score is zero.
MASKED = -1e30


@dataclass(frozen=True, kw_only=True)
class KvStream:
    """The caches of all layers and the ring their tiles pass through.

    Attributes:
      key_hbm: `[layers, batch, context, kv_heads * head_dim]` bf16, as is `value_hbm`.
      key_ring: `[slots, tile, kv_heads * head_dim]` bf16 in VMEM, as is `value_ring`.
      arrived: DMA semaphores `[2, slots]`: keys, values.
      key_new: `[batch, 16, kv_heads * head_dim]` bf16 in VMEM, as is `value_new`: the blocks of
        rows on their way to the cache.
      written: DMA semaphores `[2, batch]`: keys, values.
      awake: `[batch]` i32 in SMEM: the sequences that do not rest, in order.
      tile: rows per tile, a multiple of 16 that divides the context.
      window: rows farther back than this are not fetched, None for all; see `rows_attention`.
    """

    key_hbm: Ref
    value_hbm: Ref
    key_ring: Ref
    value_ring: Ref
    arrived: Ref
    key_new: Ref
    value_new: Ref
    written: Ref
    awake: Ref
    layers: int
    slots: int
    tile: int
    window: int | None = None

    def __post_init__(self) -> None:
        assert self.tile % BF16_ROWS == 0, f"a tile of {self.tile} rows is not a multiple of 16"
        assert self.window is None or self.window > 1, f"a window of {self.window} rows"


class KvCursor(NamedTuple):
    """Where the tiles stand.

    Attributes:
      slot: the slot to consume next, which is also the next to refill.
      layer: of the next tile to fetch, `slots` tiles ahead of the one to consume.
      turn: index in `KvStream.awake` of the sequence of the next tile to fetch.
      tile: the next tile to fetch.
      calls: attention calls so far, which is the layer that consumes next.
      turns: sequences that do not rest.
    """

    slot: Scalar
    layer: Scalar
    turn: Scalar
    tile: Scalar
    calls: Scalar
    turns: Scalar


type Span = Callable[[Scalar], tuple[Scalar, Scalar]]
"""Of a sequence: its first tile, and the one behind its last."""


def _tiles(kv: KvStream, positions: Ref) -> Span:
    """The tiles that hold rows 0 .. position."""
    return lambda sequence: (0, lax.div(positions[sequence], jnp.int32(kv.tile)) + 1)


def fetches(kv: KvStream, layer: Scalar, sequence: Scalar, tile: Scalar, slot: Scalar) -> list[Any]:
    """The copies of a tile's keys and values."""
    rows = pl.ds(pl.multiple_of(tile * kv.tile, BF16_ROWS), kv.tile)
    return [
        pltpu.make_async_copy(
            hbm.at[layer, sequence, rows, :], ring.at[slot], kv.arrived.at[i, slot]
        )
        for i, (hbm, ring) in enumerate(((kv.key_hbm, kv.key_ring), (kv.value_hbm, kv.value_ring)))
    ]


def _writes(kv: KvStream, layer: Scalar, sequence: Scalar, first_row: Scalar) -> list[Any]:
    rows = pl.ds(pl.multiple_of(first_row, BF16_ROWS), BF16_ROWS)
    return [
        pltpu.make_async_copy(
            block.at[sequence], hbm.at[layer, sequence, rows, :], kv.written.at[i, sequence]
        )
        for i, (block, hbm) in enumerate(((kv.key_new, kv.key_hbm), (kv.value_new, kv.value_hbm)))
    ]


def fetch_next(kv: KvStream, cursor: KvCursor, span: Span) -> KvCursor:
    """Fetches the next tile, if any is left, into `cursor.slot` and moves on."""
    sequence = kv.awake[cursor.turn]

    @pl.when(cursor.layer < kv.layers)
    def _start() -> None:
        for copy in fetches(kv, cursor.layer, sequence, cursor.tile, cursor.slot):
            copy.start(priority=AHEAD_OF_TAPE)

    last_tile = cursor.tile + 1 == span(sequence)[1]
    last_turn = last_tile & (cursor.turn >= cursor.turns - 1)
    following = jnp.where(last_tile, cursor.turn + 1, cursor.turn)
    turn = jnp.where(last_turn, 0, following)
    return cursor._replace(
        slot=wrapped_next(cursor.slot, kv.slots),
        layer=jnp.where(last_turn, cursor.layer + 1, cursor.layer),
        turn=turn,
        tile=jnp.where(last_tile, span(kv.awake[turn])[0], cursor.tile + 1),
    )


def start_tiles(
    kv: KvStream, positions: Ref, span: Span, *, batch: int, rows_per_sequence: int = 1
) -> KvCursor:
    """Starts the first `slots` tiles, or all when there are fewer.

    Args:
      positions: `[batch * T]` i32 in SMEM; sequences whose first one is negative rest.
    """
    zero = jnp.int32(0)
    turns = zero
    for sequence in range(batch):
        kv.awake[turns] = sequence  # the next one overwrites it when this one rests
        awake = positions[sequence * rows_per_sequence] >= 0
        turns = turns + awake.astype(jnp.int32)
    start = KvCursor(
        slot=zero,
        layer=jnp.where(turns == 0, kv.layers, 0),  # nothing to fetch
        turn=zero,
        tile=jnp.asarray(span(kv.awake[0])[0], jnp.int32),
        calls=zero,
        turns=turns,
    )

    def fetch(_: jax.Array, cursor: KvCursor) -> KvCursor:
        return fetch_next(kv, cursor, span)

    result: KvCursor = lax.fori_loop(0, kv.slots, fetch, start)
    return result


def kv_prologue(kv: KvStream, positions: Ref, batch: int) -> KvCursor:
    """Starts the first `slots` tiles, or all when there are fewer.

    Args:
      positions: `[batch]` i32 in SMEM, each below the context; negative ones rest.
    """
    return start_tiles(kv, positions, _tiles(kv, positions), batch=batch)


def _patch(
    kv: KvStream,
    *,
    layer: Scalar,
    sequence: Scalar,
    slot: Scalar,
    position: Scalar,
    rows: tuple[jax.Array, jax.Array],
) -> None:
    """Puts the new key and value row into the last tile and starts their way to the cache.

    Value rows beyond the position become zero: their weights are zero, but what the cache holds
    there may be NaN.
    """
    offset = lax.rem(position, jnp.int32(kv.tile))
    first = pl.multiple_of(offset & -BF16_ROWS, BF16_ROWS)

    @pl.when(layer > 0)
    def _previous_write() -> None:
        for copy in _writes(kv, 0, sequence, 0):
            copy.wait()

    for ring, new, row in (
        (kv.key_ring, kv.key_new, rows[0]),
        (kv.value_ring, kv.value_new, rows[1]),
    ):
        block = ring[slot, pl.ds(first, BF16_ROWS), :].astype(jnp.float32)
        mine = lax.broadcasted_iota(jnp.int32, block.shape, 0) == offset - first
        patched = jnp.where(mine, jnp.broadcast_to(row, block.shape), block).astype(jnp.bfloat16)
        ring[slot, pl.ds(first, BF16_ROWS), :] = patched
        new[sequence] = patched
    for copy in _writes(kv, layer, sequence, position & -BF16_ROWS):
        copy.start(priority=AHEAD_OF_TAPE)
    values = kv.value_ring[slot]
    visible = lax.broadcasted_iota(jnp.int32, values.shape, 0) <= offset
    kv.value_ring[slot] = jnp.where(visible, values, jnp.zeros_like(values))


class Softmax(NamedTuple):
    """A query group: running maximum and sum `[8, 1]`, weighted values `[8, head_dim]`."""

    maximum: jax.Array
    total: jax.Array
    values: jax.Array


def empty_softmax(rows: int, head_dim: int) -> Softmax:
    """Of a query group that has seen no key."""
    return Softmax(
        maximum=jnp.full((rows, 1), MASKED, jnp.float32),
        total=jnp.zeros((rows, 1), jnp.float32),
        values=jnp.zeros((rows, head_dim), jnp.float32),
    )


def attend(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    visible: Callable[[tuple[int, ...]], jax.Array],
    scale: float,
    old: Softmax,
) -> Softmax:
    """Adds keys and values to a query group's softmax.

    Args:
      query: `[rows, head_dim]` bf16.
      keys: `[n, head_dim]` bf16, as is `values`, which must be finite.
      visible: from the shape `[rows, n]` to which keys each row sees.
    """
    scores = lax.dot_general(
        query, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    scores = jnp.where(visible(scores.shape), scores * scale, MASKED)
    maximum = jnp.maximum(old.maximum, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - maximum)
    correction = jnp.exp(old.maximum - maximum)
    added = jnp.dot(weights.astype(jnp.bfloat16), values, preferred_element_type=jnp.float32)
    return Softmax(
        maximum=maximum,
        total=old.total * correction + jnp.sum(weights, axis=1, keepdims=True),
        values=old.values * correction + added,
    )


def _query_group(row: jax.Array, group: int, head_dim: int) -> jax.Array:
    """`[1, group * head_dim]` as bf16 `[rows, head_dim]`, rows a multiple of 8, the rest zero."""
    heads = [row[:, head * head_dim : (head + 1) * head_dim] for head in range(group)]
    padding = -group % SUBLANES
    if padding:
        heads.append(jnp.zeros((padding, head_dim), jnp.float32))
    return jnp.concatenate(heads, axis=0).astype(jnp.bfloat16)


def attention(
    kv: KvStream,
    cursor: KvCursor,
    positions: Ref,
    *,
    q: View,
    k: View,
    v: View,
    out: View,
    heads: int,
    kv_heads: int,
    head_dim: int,
    scale: float,
) -> KvCursor:
    """Writes each sequence's key and value row to the cache and attends to rows 0 .. position.

    Sequences that rest are left out: their rows of `out` are kept.

    Scores, scale and softmax in f32; the exponentials are rounded to bf16 for the product with the
    values, which is accumulated in f32; the result is rounded to bf16. Call once per layer.

    Args:
      positions: `[batch]` i32 in SMEM, the same as given to `kv_prologue`.
      q: `[R, heads * head_dim]`, as is `out`; rows of `out` from `batch` on are kept.
      k: `[R, kv_heads * head_dim]`, as is `v`.
      kv_heads: query head h reads key head `h * kv_heads // heads`.
    """
    assert heads % kv_heads == 0, f"{heads} query heads over {kv_heads} key heads"
    group = heads // kv_heads
    layer = cursor.calls
    span = _tiles(kv, positions)

    def one_turn(turn: jax.Array, cursor: KvCursor) -> KvCursor:
        sequence = kv.awake[turn]
        position = positions[sequence]
        tiles = span(sequence)[1]
        query_row = q.row(sequence)
        new_rows = (k.row(sequence), v.row(sequence))
        lanes = [slice(head * head_dim, (head + 1) * head_dim) for head in range(kv_heads)]
        queries = [
            _query_group(
                query_row[:, head * group * head_dim : (head + 1) * group * head_dim],
                group,
                head_dim,
            )
            for head in range(kv_heads)
        ]

        def one_tile(
            tile: jax.Array, carry: tuple[KvCursor, list[Softmax]]
        ) -> tuple[KvCursor, list[Softmax]]:
            cursor, softmax = carry
            slot = cursor.slot
            for copy in fetches(kv, 0, 0, 0, slot):
                copy.wait()

            @pl.when(tile == tiles - 1)
            def _last_tile() -> None:
                _patch(
                    kv,
                    layer=layer,
                    sequence=sequence,
                    slot=slot,
                    position=position,
                    rows=new_rows,
                )

            last = position - tile * kv.tile

            def visible(shape: tuple[int, ...]) -> jax.Array:
                seen: jax.Array = lax.broadcasted_iota(jnp.int32, shape, 1) <= last
                return seen

            softmax = [
                attend(
                    queries[head],
                    kv.key_ring[slot, :, lanes[head]],
                    kv.value_ring[slot, :, lanes[head]],
                    visible,
                    scale,
                    softmax[head],
                )
                for head in range(kv_heads)
            ]
            return fetch_next(kv, cursor, span), softmax

        empty = empty_softmax(queries[0].shape[0], head_dim)
        cursor, softmax = lax.fori_loop(0, tiles, one_tile, (cursor, [empty] * kv_heads))
        results = [round_bf16(one.values / one.total) for one in softmax]
        row = jnp.concatenate(
            [result[head : head + 1, :] for result in results for head in range(group)], axis=1
        )
        out.store_row(sequence, row)
        return cursor

    cursor = lax.fori_loop(0, cursor.turns, one_turn, cursor)
    return cursor._replace(calls=layer + 1)


def kv_drain(kv: KvStream, positions: Ref, batch: int) -> None:
    """Waits for the last layer's writes to the cache. Call once, after the last layer.

    Args:
      positions: as given to `kv_prologue`.
    """
    for sequence in range(batch):

        @pl.when(positions[sequence] >= 0)
        def _wait(sequence: int = sequence) -> None:
            for copy in _writes(kv, 0, sequence, 0):
                copy.wait()
