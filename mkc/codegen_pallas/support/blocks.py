"""Residual streams that were stored, and their mixture; see `mkc.ir.ops_mixing`.

Blocks are one buffer, slot s of width n at lanes s * n. How many layers have offered a vector is
the same for all rows and known at run time only: a view of i32 whose every element is that count.
Of every `period` offers the first one is stored. What slots that were never written hold may be
NaN; it is never part of a product.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.vector import join


def clear_blocks(count: View) -> None:
    """Nothing was offered, so nothing is stored.

    Args:
      count: `[R, n]` i32.
    """
    count.store(jnp.zeros((count.ref.shape[0], count.width), jnp.int32))


def store_block(
    blocks: View, count: View, stream: View, offers: Scalar, *, slots: int, period: int
) -> None:
    """Stores the stream behind the stored blocks when its turn has come, and zeros in its place.

    Args:
      blocks: `[R, slots * n]` f32.
      count: `[R, m]` i32, counted on.
      stream: `[R, n]` f32.
      offers: what `count` holds; nothing is stored when all slots are full.
    """
    count.store(count.load() + 1)
    offers = jnp.int32(offers)
    slot = sum((offers > turn * period).astype(jnp.int32) for turn in range(slots))
    now = sum((offers == turn * period).astype(jnp.int32) for turn in range(slots))

    # A loop of one turn or none: what it costs can be told from what every layer pays.
    @pl.loop(0, now)
    def _(_: jax.Array) -> None:
        _move(blocks, stream, slot, slots=slots)


def _move(blocks: View, stream: View, slot: Scalar, *, slots: int) -> None:
    """The stream into a slot, which is a run-time value, and zeros in its place."""
    width = stream.width
    x = stream.load()
    if width % LANES == 0:
        start = pl.multiple_of(blocks.start + slot * width, LANES)
        View(ref=blocks.ref, start=start, width=width).store(x)
    else:  # there are no run-time lanes within a register
        for one in range(slots):
            place = blocks.lanes(one * width, width)
            place.store(jnp.where(slot == one, x, place.load()))
    stream.store(jnp.zeros_like(x))


def mix_blocks(
    blocks: View,
    count: View,
    x: jax.Array,
    norm: jax.Array,
    projection: jax.Array,
    *,
    slots: int,
    period: int,
    eps: float,
) -> jax.Array:
    """The stored blocks and `x`, weighted by the softmax of their scores: `[R, n]`, not rounded.

    The score of v is `sum(v * norm * projection) * rsqrt(mean(v^2) + eps)`.

    Args:
      blocks: `[R, slots * n]` f32, as they were stored.
      count: `[R, m]` i32.
      x: `[R, n]` f32.
      norm: `[1, n]` f32, as is `projection`.
    """
    width = x.shape[1]
    factor = norm * projection
    number = count.load()[:, 0:1]
    known = _stored_scores(blocks, number, factor, slots=slots, period=period, eps=eps)
    weights = _softmax(join([*known, _score(x, factor, eps)]))
    total = x * weights[:, slots : slots + 1]
    for slot in range(slots):
        there = jnp.broadcast_to(slot * period < number, x.shape)
        block = blocks.lanes(slot * width, width).load()
        total = total + jnp.where(there, block * weights[:, slot : slot + 1], 0.0)
    return total


def mix_stored(
    blocks: View,
    count: View,
    norm: jax.Array,
    projection: jax.Array,
    *,
    slots: int,
    period: int,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """What `mix_blocks` makes of the stored blocks alone; arguments as there.

    Returns:
      `[R, n]`, their sum with weights `exp(score - largest)`; `[R, 2]`, the largest score and the
      sum of the weights, -inf and 0 without blocks.
    """
    width = norm.shape[1]
    number = count.load()[:, 0:1]
    factor = norm * projection
    scores = join(_stored_scores(blocks, number, factor, slots=slots, period=period, eps=eps))
    largest = jnp.max(scores, axis=1, keepdims=True)
    # Without blocks the difference would be NaN.
    weights = jnp.exp(scores - jnp.where(number > 0, largest, 0.0))
    total = jnp.zeros((scores.shape[0], width), jnp.float32)
    for slot in range(slots):
        there = jnp.broadcast_to(slot * period < number, total.shape)
        block = blocks.lanes(slot * width, width).load()
        total = total + jnp.where(there, block * weights[:, slot : slot + 1], 0.0)
    return total, join([largest, jnp.sum(weights, axis=1, keepdims=True)])


def mix_stream(
    x: jax.Array,
    total: jax.Array,
    softmax: jax.Array,
    norm: jax.Array,
    projection: jax.Array,
    *,
    eps: float,
) -> jax.Array:
    """`mix_blocks` of `x` and of the blocks in `total` and `softmax`, see `mix_stored`."""
    score = _score(x, norm * projection, eps)
    stored = softmax[:, 0:1]
    largest = jnp.maximum(stored, score)
    of_stored, of_stream = jnp.exp(stored - largest), jnp.exp(score - largest)
    sum_of_weights = of_stored * softmax[:, 1:2] + of_stream
    return total * (of_stored / sum_of_weights) + x * (of_stream / sum_of_weights)


def _stored_scores(
    blocks: View, number: jax.Array, factor: jax.Array, *, slots: int, period: int, eps: float
) -> list[jax.Array]:
    """Of every slot `[R, 1]`; -inf of those that hold nothing."""
    width = factor.shape[1]
    places = [blocks.lanes(slot * width, width) for slot in range(slots)]
    # The choice of a score is behind its sums: a NaN stays in the slot's own lane.
    return [
        jnp.where(slot * period < number, _score(place.load(), factor, eps), -jnp.inf)
        for slot, place in enumerate(places)
    ]


def _score(v: jax.Array, factor: jax.Array, eps: float) -> jax.Array:
    """Of a vector `[R, n]`; `factor` is the norm's weight times the projection."""
    mean_square = jnp.sum(v * v, axis=1, keepdims=True) / v.shape[1]
    return jnp.sum(v * factor, axis=1, keepdims=True) * lax.rsqrt(mean_square + eps)


def _softmax(scores: jax.Array) -> jax.Array:
    """Over the lanes of `[R, n]`; the last one is finite."""
    weights = jnp.exp(scores - jnp.max(scores, axis=1, keepdims=True))
    return weights / jnp.sum(weights, axis=1, keepdims=True)


def scale_heads(x: jax.Array, factors: jax.Array, *, heads: int, first: Scalar) -> jax.Array:
    """Every head of `x` times its own factor; not rounded.

    Args:
      x: `[R, heads * n]` f32.
      factors: `[1, m]` f32, those of all ranks; what lies behind the last one means nothing.
      first: the factor of the first head, which may be a run-time value.
    """
    size = x.shape[1] // heads
    lane = lax.broadcasted_iota(jnp.int32, factors.shape, 1)

    def one_head(head: int) -> jax.Array:
        mine = jnp.where(lane == first + head, factors, 0.0)
        factor = jnp.sum(mine, axis=1, keepdims=True)
        return x[:, head * size : (head + 1) * size] * factor

    return join([one_head(head) for head in range(heads)])
