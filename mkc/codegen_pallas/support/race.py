"""The race over this rank's columns of one row: which token is drawn; see `mkc.ir.counter_random`.

The columns of one row fill whole registers here, [8, 128] of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support import random
from mkc.codegen_pallas.support.distribution import MANY
from mkc.codegen_pallas.support.distribution import keeps
from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.vector import join
from mkc.ir.counter_random import CHOICE

BLOCK = SUBLANES * LANES  # columns of one row that fill a register
LANE_BITS = 7

type Times = tuple[jax.Array, jax.Array]
"""f32 times and i32 ids of the tokens that they belong to."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """A row, its distribution p and the proposal q of the draft that is behind it.

    Attributes:
      row: of the logits, a scalar.
      seed, position: scalars of the random numbers.
      heat: `[1, 128]`, all lanes alike, as are `peak`, `mass`, `last_value`, `last_id`, those of
        the row's `Cut`.
      candidates, proposal: `[1, 128]` i32 and f32, q in the first `count` lanes; zeros without a
        draft.
    """

    row: Scalar
    seed: tuple[Scalar, Scalar]
    position: Scalar
    heat: jax.Array
    peak: jax.Array
    mass: jax.Array
    last_value: jax.Array
    last_id: jax.Array
    candidates: jax.Array
    proposal: jax.Array
    count: int


def race(logits: View, runner: Runner, *, columns: int, first_id: Scalar) -> tuple[Times, Times]:
    """The winners `[1, 128]`, all lanes alike, among tokens of weight max(p - q, 0) and weight p.

    The smallest exponential(id) / weight wins, the lowest id on ties; a time is infinite where no
    token has a weight.

    Args:
      logits: `[R, n]` f32 in whole registers of 8 rows.
      columns: that count, at least 1.
      first_id: of column 0.
    """
    candidates, proposal = _spread(runner.candidates), _spread(runner.proposal)
    shape = (SUBLANES, LANES)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    sublane = lax.broadcasted_iota(jnp.int32, shape, 0)

    def block(start: Scalar, size: int, carry: tuple[Times, Times]) -> tuple[Times, Times]:
        rest, target = carry
        value = _packed(logits, runner.row, start, size)
        column = start + (sublane << LANE_BITS) + lane
        id_ = column + first_id
        kept = (column < columns) & keeps(value, id_, runner.last_value, runner.last_id)
        weight = jnp.exp((value - runner.peak) / runner.heat) / runner.mass
        p = jnp.where(kept, weight, 0.0)
        q = jnp.zeros(shape, jnp.float32)
        for place in range(runner.count):
            mine = id_ == candidates[:, place : place + 1]
            q = jnp.where(mine, q + proposal[:, place : place + 1], q)
        ticks = random.exponential(runner.seed, runner.position, CHOICE, id_)
        return _faster(rest, ticks, p - q, id_), _faster(target, ticks, p, id_)

    nobody = (jnp.full(shape, jnp.inf, jnp.float32), jnp.full(shape, MANY))
    rest, target = over_columns(logits.width, BLOCK, block, (nobody, nobody))
    return _winner(rest), _winner(target)


def over_columns[Carry](
    width: int,
    step: int,
    function: Callable[[Scalar, int, Carry], Carry],
    carry: Carry,
) -> Carry:
    """`function(start, size, carry)` for every `step` columns, and for what is left behind them."""

    def body(index: jax.Array, carry: Carry) -> Carry:
        return function(pl.multiple_of(index * step, LANES), step, carry)

    whole, rest = divmod(width, step)
    carry = lax.fori_loop(0, whole, body, carry)
    return function(whole * step, rest, carry) if rest else carry


def chunks(size: int) -> list[tuple[int, int]]:
    """Starts and lengths of up to 128 columns each."""
    return [(start, min(LANES, size - start)) for start in range(0, size, LANES)]


def load_chunk(logits: View, rows: Any, start: Scalar, size: int) -> jax.Array:
    """Up to 128 columns of some rows, zeros behind them: `[rows, 128]`.

    Args:
      start: a multiple of 128, as is where `logits` start.
    """
    value: jax.Array = logits.ref[rows, pl.ds(logits.start + start, size)]
    if size == LANES:
        return value
    return join([value, jnp.zeros((value.shape[0], LANES - size), jnp.float32)])


def _packed(logits: View, row: Scalar, start: Scalar, size: int) -> jax.Array:
    """Up to 1024 columns of one row: column 128 j + i of them is in sublane j, lane i.

    The row's register is rotated until the row is in sublane j.
    """
    first = pl.multiple_of(row & -SUBLANES, SUBLANES)
    inside = row & (SUBLANES - 1)
    sublane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)
    found = jnp.zeros((SUBLANES, LANES), jnp.float32)
    for index, (begin, length) in enumerate(chunks(size)):
        value = load_chunk(logits, pl.ds(first, SUBLANES), start + begin, length)
        turned = pltpu.roll(value, (index - inside) & (SUBLANES - 1), 0)
        found = jnp.where(sublane == index, turned, found)
    return found


def _spread(row: jax.Array) -> jax.Array:
    """`[1, 128]` in every sublane."""
    return jnp.broadcast_to(row, (SUBLANES, LANES))


def _faster(best: Times, ticks: jax.Array, weight: jax.Array, ids: jax.Array) -> Times:
    """The earlier of two times for every lane; ids grow, so the first one wins on ties."""
    time = jnp.where(weight > 0, ticks / weight, jnp.inf)
    better = time < best[0]
    return jnp.where(better, time, best[0]), jnp.where(better, ids, best[1])


def _winner(times: Times) -> Times:
    """The smallest time of all lanes and sublanes and the lowest id that goes with it."""
    best = jnp.broadcast_to(jnp.min(times[0], axis=1, keepdims=True), times[0].shape)
    best = jnp.min(best, axis=0, keepdims=True)
    ids = jnp.where(times[0] == best, times[1], MANY)
    ids = jnp.broadcast_to(jnp.min(ids, axis=1, keepdims=True), ids.shape)
    return best, jnp.min(ids, axis=0, keepdims=True)
