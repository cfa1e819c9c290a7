"""What a token is drawn from, found from the largest logits of all ranks.

The filters keep a beginning of the tokens in descending order of their logits, lowest ids first on
ties. So the last kept token says which tokens are kept, and every rank can tell for its own
columns. The list of the largest logits is complete down to the best of the ranks' last entries;
where the kept tokens may end behind that, a row is not decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar

TURNS = 16  # rotations that are written out in the loop over all of them
MANY = 2**31 - 1  # above every place and every id


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of the sequences, in SMEM.

    Attributes:
      temperature, top_p, min_p: `[batch]` f32.
      top_k: `[batch]` i32, 0 for all.
      seed: `[2 * batch]` i32, low and high word of each sequence.
    """

    temperature: Ref
    top_k: Ref
    top_p: Ref
    min_p: Ref
    seed: Ref


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Options of the sequence of each row, `[R, 128]`, all lanes alike.

    Attributes:
      heat: the temperature, 1 for 0.
      greedy: the temperature is 0: only the largest logit is kept.
    """

    heat: jax.Array
    greedy: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Which tokens of each row are kept, and how likely they are: `[R, 128]`, all lanes alike.

    Attributes:
      peak: the largest logit.
      value, id: of the last kept token.
      mass: sum of exp((logit - peak) / heat) of the kept tokens.
      decided: False where the list does not say what is kept; the others then mean nothing.
    """

    peak: jax.Array
    value: jax.Array
    id: jax.Array
    mass: jax.Array
    decided: jax.Array


def keeps(
    logits: jax.Array, ids: jax.Array, last_value: jax.Array, last_id: jax.Array
) -> jax.Array:
    """Whether tokens are kept where that of logit `last_value` and id `last_id` is the last one."""
    return (logits > last_value) | ((logits == last_value) & (ids <= last_id))


def column(values: Sequence[Scalar], rows: int, *, repeats: int = 1) -> jax.Array:
    """Scalars as a column: `[rows, 128]`, all lanes alike.

    Args:
      repeats: rows of each scalar; rows behind all of them have the last one.
    """
    row = lax.broadcasted_iota(jnp.int32, (rows, LANES), 0)
    found = jnp.full((rows, LANES), values[0])
    for index, value in enumerate(values[1:], start=1):
        found = jnp.where(row >= index * repeats, value, found)
    return found


def filters_of(sampling: Sampling, rows: int, batch: int, rows_per_sequence: int) -> Filters:
    """The options of each row."""

    def each(scalars: Ref) -> jax.Array:
        values = [scalars[sequence] for sequence in range(batch)]
        return column(values, rows, repeats=rows_per_sequence)

    temperature = each(sampling.temperature)
    greedy = temperature == 0
    return Filters(
        heat=jnp.where(greedy, 1.0, temperature),
        greedy=greedy,
        top_k=each(sampling.top_k),
        top_p=each(sampling.top_p),
        min_p=each(sampling.min_p),
    )


def find_cut(
    values: jax.Array,
    ids: jax.Array,
    mass: jax.Array,
    filters: Filters,
    *,
    listed: int,
    ranks: int,
    columns: int,
) -> Cut:
    """Applies temperature, top-k, min-p and top-p, in this order.

    Args:
      values, ids: `[R, 128]` f32 and i32: the `listed` largest logits of rank r, in order, and
        their global ids in lanes r * listed ..; minus infinity and `MANY` in lanes behind them.
      mass: `[R, 1]`, sum of exp((logit - largest) / heat) over all columns of all ranks.
      columns: of one rank; `listed` is at most that.
    """
    peak = jnp.max(values, axis=1, keepdims=True)
    weights = jnp.exp((values - peak) / filters.heat)
    place, before = _places(values, ids, weights)

    every_place = (filters.top_k == 0) | (filters.top_k >= ranks * columns)
    bounded = ~every_place | (filters.min_p > 0)
    within = (every_place | (place < filters.top_k)) & (weights >= filters.min_p)
    total = jnp.where(bounded, _sum(within, weights), mass)
    nucleus = (before < filters.top_p * total) | (place == 0) | (filters.top_p >= 1)
    all_kept = ~(filters.greedy | bounded | (filters.top_p < 1))
    end = jnp.where(filters.greedy, 1, _first(place, ~(within & nucleus)))

    complete = _complete(place, values, listed=listed, ranks=ranks, columns=columns)
    ends = jnp.where(
        bounded,
        (_first(place, ~within) < complete) | (~every_place & (filters.top_k <= complete)),
        end < complete,
    )
    kept = place < end
    last = jnp.min(jnp.where(kept, values, jnp.inf), axis=1, keepdims=True)
    last_id = jnp.max(jnp.where(kept & (values == last), ids, -1), axis=1, keepdims=True)
    return Cut(
        peak=jnp.broadcast_to(peak, values.shape),
        value=jnp.where(all_kept, -jnp.inf, last),
        id=jnp.where(all_kept, MANY, last_id),
        mass=jnp.where(all_kept, mass, _sum(kept, weights)),
        decided=filters.greedy | all_kept | ends,
    )


def _places(values: jax.Array, ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many entries of the list come before each one, and the sum of their weights.

    Every entry meets every other one by rotations of the lanes.
    """

    def block(_: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        *others, place, before = carry
        for turn in range(TURNS):
            value, id_, weight = (pltpu.roll(one, turn, 1) if turn else one for one in others)
            first = (value > values) | ((value == values) & (id_ < ids))
            place = jnp.where(first, place + 1, place)
            before = jnp.where(first, before + weight, before)
        return (*(pltpu.roll(one, TURNS, 1) for one in others), place, before)

    start = (values, ids, weights, jnp.zeros_like(ids), jnp.zeros_like(values))
    *_, place, before = lax.fori_loop(0, LANES // TURNS, block, start)
    return place, before


def _complete(
    place: jax.Array, values: jax.Array, *, listed: int, ranks: int, columns: int
) -> jax.Array:
    """Of how many places `[R, 1]` the tokens are known: up to the first of the ranks' last ones.

    A rank whose last entry is minus infinity has no other tokens that are allowed.
    """
    if listed >= columns:
        return jnp.full((place.shape[0], 1), MANY)
    lane = lax.broadcasted_iota(jnp.int32, place.shape, 1)
    last = lane == listed - 1
    for rank in range(1, ranks):
        last = last | (lane == (rank + 1) * listed - 1)
    return jnp.minimum(_first(place, last & (values > -jnp.inf)), MANY - 1) + 1


def _first(place: jax.Array, wanted: jax.Array) -> jax.Array:
    """The smallest place `[R, 1]` among the wanted lanes, `MANY` without one."""
    return jnp.min(jnp.where(wanted, place, MANY), axis=1, keepdims=True)


def _sum(wanted: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(wanted, weights, 0.0), axis=1, keepdims=True)
