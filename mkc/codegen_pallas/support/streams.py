"""Small operands that arrive in the order of their use: pages of vectors, states, table rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.refs import BF16_ROWS
from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import wrapped_next
from mkc.codegen_pallas.support.refs import wrapped_previous

AHEAD_OF_TAPE = 1  # copy priority: small copies must not queue behind the tape's large ones


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Items that are consumed in order, each through one slot of a ring.

    Attributes:
      hbm: `[items, ...]`.
      ring: `[slots, ...]` in VMEM, the items' shape and dtype.
      arrived: one DMA semaphore per slot.
      written: one per slot when items are updated in place, None when they are only read.
      items: how many there are, at least `slots`.
    """

    hbm: Ref
    ring: Ref
    arrived: Ref
    written: Ref | None
    items: int
    slots: int

    def __post_init__(self) -> None:
        assert self.slots <= self.items, f"{self.slots} slots for {self.items} items"
        # a slot is refilled one item late, after its write-back
        assert self.written is None or self.slots > 1 or self.items == 1, "one slot cannot overlap"


class StreamCursor(NamedTuple):
    """Where a stream stands: the item to consume next and the slot that holds it."""

    slot: Scalar
    item: Scalar


def _fetch(stream: Stream, item: Scalar, slot: Scalar) -> Any:
    return pltpu.make_async_copy(stream.hbm.at[item], stream.ring.at[slot], stream.arrived.at[slot])


def _write_back(stream: Stream, item: Scalar, slot: Scalar) -> Any:
    assert stream.written is not None
    return pltpu.make_async_copy(stream.ring.at[slot], stream.hbm.at[item], stream.written.at[slot])


def stream_prologue(stream: Stream) -> StreamCursor:
    """Starts the first `slots` items."""
    for slot in range(stream.slots):
        _fetch(stream, slot, slot).start(priority=AHEAD_OF_TAPE)
    return StreamCursor(slot=jnp.int32(0), item=jnp.int32(0))


def stream_wait(stream: Stream, cursor: StreamCursor) -> None:
    """Waits until the item at the cursor has landed in its slot."""
    _fetch(stream, 0, cursor.slot).wait()


def stream_advance(stream: Stream, cursor: StreamCursor) -> StreamCursor:
    """Releases the slot at the cursor and moves to the next item.

    A stream that is only read refills the slot. One that is updated in place starts the slot's
    write-back and refills the slot before it, whose write-back has had an item's time to finish.
    """
    if stream.written is None:
        following = cursor.item + stream.slots

        @pl.when(following < stream.items)
        def _refill() -> None:
            _fetch(stream, following, cursor.slot).start(priority=AHEAD_OF_TAPE)

    else:
        _write_back(stream, cursor.item, cursor.slot).start(priority=AHEAD_OF_TAPE)
        previous = wrapped_previous(cursor.slot, stream.slots)
        following = cursor.item - 1 + stream.slots

        @pl.when((cursor.item > 0) & (following < stream.items))
        def _refill_previous() -> None:
            _write_back(stream, cursor.item, previous).wait()
            _fetch(stream, following, previous).start(priority=AHEAD_OF_TAPE)

    return StreamCursor(slot=wrapped_next(cursor.slot, stream.slots), item=cursor.item + 1)


def stream_drain(stream: Stream) -> None:
    """Waits for the write-backs that no refill waited for: the last one of every slot.

    Call once, after the last item; streams without write-back have nothing to wait for.
    """
    if stream.written is None:
        return
    for slot in range(stream.slots):
        _write_back(stream, 0, slot).wait()


def embed(*, table: Ref, tokens: Ref, blocks: Ref, sem: Ref, out: Ref, batch: int) -> None:
    """Looks up one table row per sequence; rows of `out` from `batch` on become zero.

    A copy moves whole tiles, so it takes the block of 16 rows that holds the token. A negative
    number, the position of a row that rests, stands for row 0: nothing checks bounds on a TPU.

    Args:
      table: `[V, H]` bf16 in HBM, V a multiple of 16.
      tokens: `[batch]` i32 in SMEM, each below V.
      blocks: `[batch, 16, H]` bf16 in VMEM.
      sem: one DMA semaphore.
      out: `[R, H]` f32 in VMEM; lanes beyond H become zero.
    """

    def row_of(index: Scalar) -> jax.Array:
        return jnp.maximum(tokens[index], 0)

    def block(index: Scalar) -> Any:
        first = pl.multiple_of(row_of(index) & -BF16_ROWS, BF16_ROWS)
        return pltpu.make_async_copy(table.at[pl.ds(first, BF16_ROWS), :], blocks.at[index], sem)

    for index in range(batch):
        block(index).start(priority=AHEAD_OF_TAPE)
    for index in range(batch):
        block(index).wait()

    def select(index: Scalar, carry: jax.Array) -> jax.Array:
        rows = blocks[index].astype(jnp.float32)
        mine = lax.broadcasted_iota(jnp.int32, rows.shape, 0) == (row_of(index) & (BF16_ROWS - 1))
        row = jnp.sum(jnp.where(mine, rows, 0.0), axis=0, keepdims=True)
        if padding:  # a run-time row is stored with all its lanes
            row = jnp.concatenate([row, jnp.zeros((1, padding), jnp.float32)], axis=1)
        out[pl.ds(index, 1), :] = row
        return carry

    padding = out.shape[1] - table.shape[1]
    out[...] = jnp.zeros(out.shape, jnp.float32)
    if out.shape[1] == LANES:  # Mosaic stores no row at a run-time place where rows are one tile
        for index in range(batch):
            select(index, jnp.int32(0))
        return
    lax.fori_loop(0, batch, select, jnp.int32(0))
