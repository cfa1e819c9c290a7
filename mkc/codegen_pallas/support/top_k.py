"""The largest logits of every row and their columns, over one rank and over all."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.argmax import CHUNK
from mkc.codegen_pallas.support.argmax import NO_COLUMN
from mkc.codegen_pallas.support.argmax import over_lanes
from mkc.codegen_pallas.support.exchange import AXIS
from mkc.codegen_pallas.support.exchange import peers_of
from mkc.codegen_pallas.support.exchange import send_to
from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.vector import join

DEPTH = 3  # elements of a lane that are noted in a pass: more of the best are rarely in one lane
UNKNOWN = -1  # column of what a lane may hold besides


class _Lanes(NamedTuple):
    """The best elements of every lane, in order: values `[R, 256]` f32 and columns i32 of each
    place. Behind them stands what else the lane may hold: at most this, in column `UNKNOWN`."""

    values: tuple[jax.Array, ...]
    columns: tuple[jax.Array, ...]


class _Found(NamedTuple):
    """What has been found: lanes `[R, 128]` in order, how many, and the last one, `[R, 1]`."""

    values: jax.Array
    columns: jax.Array
    number: jax.Array
    value: jax.Array
    column: jax.Array


def local_top_k(x: View, k: int, valid: Scalar) -> tuple[jax.Array, jax.Array]:
    """The `k` largest of columns 0 .. valid - 1 per row and their columns.

    In descending order, lowest columns first on ties. A pass over the columns finds the best
    `DEPTH` of every lane; then the best of all lanes are taken one after the other, until all are
    found or a lane may hold more than was noted. Then another pass follows, over what comes behind
    the last one taken.

    Args:
      x: `[R, n]` f32.
      k: at most 128.
      valid: columns that count.

    Returns:
      `[R, 128]` f32 and i32, of which lanes 0 .. k - 1 mean something; columns are below n in any
      case. Where fewer columns hold more than minus infinity, the rest is minus infinity, of
      columns that mean nothing.
    """
    rows = x.ref.shape[0]
    start = _Found(
        values=jnp.full((rows, LANES), -jnp.inf, jnp.float32),
        columns=jnp.zeros((rows, LANES), jnp.int32),
        number=jnp.zeros((rows, 1), jnp.int32),
        value=jnp.full((rows, 1), jnp.inf, jnp.float32),
        column=jnp.full((rows, 1), -1, jnp.int32),
    )

    def one_pass(found: _Found) -> _Found:
        lanes = _best_of_lanes(x, found.value, found.column, valid)
        found, _ = lax.fori_loop(
            0, k, lambda _, carry: _take(carry[0], carry[1], k), (found, lanes)
        )
        return found

    found = lax.while_loop(lambda found: jnp.min(found.number) < k, one_pass, start)
    return found.values, found.columns


def _best_of_lanes(x: View, value: jax.Array, column: jax.Array, valid: Scalar) -> _Lanes:
    """Of the elements that come behind (value, column), each `[R, 1]`."""
    shape = (x.ref.shape[0], CHUNK)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)

    def insert(here: jax.Array, first: Scalar, lanes: _Lanes) -> _Lanes:
        here_column = lane + first
        behind = (here < value) | ((here == value) & (here_column > column))
        here = jnp.where(behind & (here_column < valid), here, -jnp.inf)
        values, columns = [], []
        shifted, shifted_column = here, here_column
        for old, old_column in zip(*lanes, strict=True):
            better = here > old
            values.append(jnp.where(better, shifted, old))
            columns.append(jnp.where(better, shifted_column, old_column))
            # where this place was taken, the next one gets what was in it
            shifted = jnp.where(better, old, here)
            shifted_column = jnp.where(better, old_column, here_column)
        return _Lanes(values=tuple(values), columns=tuple(columns))

    def one_chunk(chunk: jax.Array, lanes: _Lanes) -> _Lanes:
        first = x.start + chunk * CHUNK
        if x.start % LANES == 0:
            first = pl.multiple_of(first, LANES)
        return insert(x.ref[:, pl.ds(first, CHUNK)], chunk * CHUNK, lanes)

    # Where nothing is found a column that exists: columns decide addresses.
    nothing = jnp.full(shape, -jnp.inf, jnp.float32), jnp.minimum(lane, x.width - 1)
    lanes = _Lanes(values=(nothing[0],) * DEPTH, columns=(nothing[1],) * DEPTH)
    lanes = lax.fori_loop(0, x.width // CHUNK, one_chunk, lanes)
    rest = x.width % CHUNK
    if rest:
        tail = x.lanes(x.width - rest, rest).load()
        tail = join([tail, jnp.full((shape[0], CHUNK - rest), -jnp.inf, jnp.float32)])
        lanes = insert(tail, x.width - rest, lanes)
    return _Lanes(
        values=(*lanes.values, lanes.values[-1]),
        columns=(*lanes.columns, jnp.full(shape, UNKNOWN, jnp.int32)),
    )


def _take(found: _Found, lanes: _Lanes, k: int) -> tuple[_Found, _Lanes]:
    """Takes the best of all lanes in every row that wants one and knows it."""
    value, column = over_lanes(lanes.values[0], lanes.columns[0])
    nothing = value == -jnp.inf  # nor in any column that was not noted
    column = jnp.where(nothing, 0, column)
    takes = (column != UNKNOWN) & (found.number < k)
    lane = lax.broadcasted_iota(jnp.int32, found.values.shape, 1)
    here = (lane == found.number) & takes
    found = _Found(
        values=jnp.where(here, jnp.broadcast_to(value, here.shape), found.values),
        columns=jnp.where(here, jnp.broadcast_to(column, here.shape), found.columns),
        number=jnp.where(takes, found.number + 1, found.number),
        value=jnp.where(takes, value, found.value),
        column=jnp.where(takes, column, found.column),
    )
    taken = (lanes.columns[0] == column) & takes

    def moved(places: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        pairs = zip(places, places[1:], strict=False)
        return (*(jnp.where(taken, after, one) for one, after in pairs), places[-1])

    return found, _Lanes(values=moved(lanes.values), columns=moved(lanes.columns))


def sharded_top_k(
    values: jax.Array,
    ids: jax.Array,
    *,
    k: int,
    send: Ref,
    receive: Ref,
    send_sem: Ref,
    receive_sem: Ref,
    ranks: int,
    columns_per_rank: int,
) -> tuple[jax.Array, jax.Array]:
    """The `k` largest of every rank's `k`, in the same form, with columns over all ranks.

    Value bits and columns travel in one block, as in `sharded_argmax`; `receive` and `receive_sem`
    alternate in the same way.

    Args:
      values: `[R, 128]` f32 of this rank, as is `ids` i32, from `local_top_k`.
      send: `[2 * R, 128]` i32 in VMEM: values, then ids.
      receive: `[ranks, 2 * R, 128]` i32 in VMEM.
    """
    if ranks == 1:
        return values, ids
    me = lax.axis_index(AXIS)
    rows = values.shape[0]
    send[0:rows, :] = lax.bitcast_convert_type(values, jnp.int32)
    send[rows:, :] = ids + me * columns_per_rank
    copies = [send_to(send, receive.at[me], send_sem, receive_sem, one) for one in peers_of(ranks)]
    for copy in copies:
        copy.start()
    receive[me] = send[...]
    for copy in copies:
        copy.wait_recv()
    everything = [receive[rank][:, 0:k] for rank in range(ranks)]
    merged = _sorted_places(
        lax.bitcast_convert_type(join([one[:rows] for one in everything]), jnp.float32),
        join([one[rows:] for one in everything]),
        k,
    )
    for copy in copies:
        copy.wait_send()
    return merged


def _sorted_places(values: jax.Array, ids: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The `k` largest of `[R, n]` in lanes 0 .. k - 1 of `[R, 128]`.

    Each element's place is the number of those that come before it. All comparisons are
    independent of one another, unlike those of a search for one after the other.
    """
    rows = values.shape[0]
    missing = -values.shape[1] % LANES
    if missing:
        values = join([values, jnp.full((rows, missing), -jnp.inf, jnp.float32)])
        ids = join([ids, jnp.full((rows, missing), NO_COLUMN, jnp.int32)])
    place = jnp.zeros(values.shape, jnp.int32)
    for turn in range(1, values.shape[1]):
        other, other_id = (pltpu.roll(one, turn, 1) for one in (values, ids))
        before = (other > values) | ((other == values) & (other_id < ids))
        place = place + jnp.where(before, 1, 0)
    lane = lax.broadcasted_iota(jnp.int32, (rows, LANES), 1)
    found = jnp.full((rows, LANES), -jnp.inf, jnp.float32)
    found_ids = jnp.zeros((rows, LANES), jnp.int32)
    for index in range(k):
        here = place == index
        value = jnp.max(jnp.where(here, values, -jnp.inf), axis=1, keepdims=True)
        number = jnp.max(jnp.where(here, ids, 0), axis=1, keepdims=True)
        found = jnp.where(lane == index, jnp.broadcast_to(value, found.shape), found)
        found_ids = jnp.where(lane == index, jnp.broadcast_to(number, found.shape), found_ids)
    return found, found_ids
