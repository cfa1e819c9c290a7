"""The walk over candidates that draws them; see `mkc.ir.acceptance.walk`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mkc.codegen_pallas.support import random
from mkc.codegen_pallas.support.argmax import over_lanes
from mkc.codegen_pallas.support.distribution import column
from mkc.codegen_pallas.support.refs import BF16_ROWS
from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.walk import BLOCK_SHIFT
from mkc.codegen_pallas.support.walk import selector_walk
from mkc.ir.counter_random import DRAFT

BLOCKS = LANES // BF16_ROWS  # candidates whose blocks fill a register


def sampled_walk(
    values: View,
    ids: View,
    hidden: View,
    *,
    proposal: View,
    temperature: Ref,
    seed: Ref,
    positions: Ref,
    batch: int,
    rows_per_sequence: int,
    k: int,
    **others: Any,
) -> None:
    """As `selector_walk`, whose `others` are; row t draws from softmax(score / temperature).

    At temperature 0 it takes the best candidate, whose proposal is 1.

    Args:
      proposal: `[R, k]` f32, written; zeros in the first row of a sequence.
      temperature: `[batch]` f32 in SMEM.
      seed: `[2 * batch]` i32 in SMEM, low and high word of each sequence.
      positions: `[batch * T]` i32 in SMEM, of the rows of the block.
    """
    all_ids = View(ref=ids.ref, start=ids.start, width=LANES).load()
    low, high = (
        column(
            [seed[2 * sequence + word] for sequence in range(batch)],
            all_ids.shape[0],
            repeats=rows_per_sequence,
        )
        for word in range(2)
    )
    place = column([positions[row] for row in range(batch * rows_per_sequence)], all_ids.shape[0])
    ticks = random.exponential((low, high), place, DRAFT, all_ids)
    proposal.store(jnp.zeros((all_ids.shape[0], k), jnp.float32))
    lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

    def choice(score: jax.Array, sequence: Scalar, row: Scalar) -> jax.Array:
        here = sequence * rows_per_sequence + row
        scores = jnp.where(lane < k, _compact(score, _row(all_ids, here)), -jnp.inf)
        cold = temperature[sequence] == 0
        score = scores / jnp.where(cold, 1.0, temperature[sequence])
        weight = jnp.exp(score - jnp.max(score, axis=1, keepdims=True))
        q = weight / jnp.sum(weight, axis=1, keepdims=True)
        time = jnp.where(q > 0, _row(ticks, here) / q, jnp.inf)
        _, place = over_lanes(jnp.where(cold, scores, -time), lane)
        certain = jnp.where(lane == place, 1.0, 0.0)
        proposal.store_row(here, jnp.where(cold, certain, q)[:, :k])
        return place << BLOCK_SHIFT

    selector_walk(
        values,
        ids,
        hidden,
        batch=batch,
        rows_per_sequence=rows_per_sequence,
        k=k,
        choice=choice,
        **others,
    )


def _compact(score: jax.Array, ids: jax.Array) -> jax.Array:
    """Scores `[1, k * 16]`, one in every block of 16 lanes, as `[1, 128]` in the first lanes.

    Lanes are gathered from whole registers; all rows of these are alike.
    """
    shape = (SUBLANES, LANES)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    row_of_block = jnp.broadcast_to(ids, shape) & (BF16_ROWS - 1)
    inside = ((lane & (BLOCKS - 1)) << BLOCK_SHIFT) + row_of_block
    found = jnp.full(shape, -jnp.inf, jnp.float32)
    for first in range(0, score.shape[1], LANES):
        part = score[:, first : first + LANES]
        missing = LANES - part.shape[1]
        if missing:
            part = jnp.concatenate([part, jnp.full((1, missing), -jnp.inf, jnp.float32)], axis=1)
        start = first // BF16_ROWS
        mine = (lane >= start) & (lane < start + BLOCKS)
        whole = jnp.broadcast_to(part, shape)
        found = jnp.where(mine, jnp.take_along_axis(whole, inside, axis=1), found)
    return found[0:1]


def _row(values: jax.Array, index: Scalar) -> jax.Array:
    """Row `index` of `[R, 128]` as `[1, 128]`, chosen by a mask as in `View.row`."""
    mine = lax.broadcasted_iota(jnp.int32, values.shape, 0) == index
    return jnp.sum(jnp.where(mine, values, 0), axis=0, keepdims=True)
