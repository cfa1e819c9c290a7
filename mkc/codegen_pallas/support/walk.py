"""The greedy walk over the candidates of each row, each depending on the token chosen before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.accept import each_sequence
from mkc.codegen_pallas.support.argmax import over_lanes
from mkc.codegen_pallas.support.products import pieces
from mkc.codegen_pallas.support.refs import BF16_ROWS
from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.streams import AHEAD_OF_TAPE

IDS, PREVIOUS, CANDIDATES = 0, 1, 2  # semaphores; candidates have two, for rows in turn
BLOCK_SHIFT = 4  # 16 rows of a block

type Choice = Callable[[jax.Array, Scalar, Scalar], jax.Array]
"""(scores `[1, k * 16]`, sequence, row) -> the chosen lane `[1, 1]` i32. A candidate's score lies
in the lane of its row of its block of 16 table rows; other lanes hold minus infinity.
"""


def selector_walk(
    values: View,
    ids: View,
    hidden: View,
    *,
    predecessor: Ref,
    successor: Ref,
    candidate_ids: Ref,
    previous: Ref,
    candidates: Ref,
    sems: Ref,
    tokens: Ref,
    out: Ref,
    batch: int,
    rows_per_sequence: int,
    k: int,
    choice: Choice | None = None,
) -> None:
    """Row t chooses the best of its `k` candidates j by

        values[t, j] + sum_r predecessor[token of row t - 1]_r hidden[t]_r successor[ids[t, j]]_r

    in f32, the first one on ties; row 0 of a sequence keeps its token.

    A copy takes the block of 16 table rows that a row lies in. The product is with whole blocks,
    and the right row of each is chosen behind it. Table numbers are bf16, so the other factor as
    the sum of three bf16 numbers makes the product exact. The blocks of the next row's candidates
    are on their way while a row is computed; the one of the chosen token cannot be.

    Args:
      values: `[R, n]` f32, n >= k.
      ids: `[R, 128]` i32 in an i32 buffer, lanes 0 .. k - 1, each below the tables' rows.
      hidden: `[R, r]` f32.
      predecessor, successor: `[V, r]` bf16 in HBM, V a multiple of 16.
      candidate_ids: `[R, 128]` i32 in SMEM.
      previous: `[batch, 16, r]` bf16 in VMEM.
      candidates: `[2, batch * k * 16, r]` bf16 in VMEM.
      sems: DMA semaphores `[4]`.
      tokens: `[batch * T]` i32 in SMEM; a negative one stands for row 0 of the table.
      out: `[batch * T]` i32 in SMEM.
      choice: chooses something else than the best one.
    """
    assert rows_per_sequence > 1, "a walk needs a row behind the first one"

    def block(table: Ref, token: Scalar, target: Ref, sem: Ref) -> Any:
        first = pl.multiple_of(jnp.maximum(token, 0) & -BF16_ROWS, BF16_ROWS)
        return pltpu.make_async_copy(table.at[pl.ds(first, BF16_ROWS), :], target, sem)

    def each_candidate(row: Scalar, *, wait: bool) -> None:
        """Starts or awaits the blocks of all sequences' candidates of a row."""
        parity = row & 1

        def one(index: jax.Array, carry: jax.Array) -> jax.Array:
            sequence = lax.div(index, jnp.int32(k))
            token = candidate_ids[sequence * rows_per_sequence + row, index - sequence * k]
            place = pl.ds(pl.multiple_of(index * BF16_ROWS, BF16_ROWS), BF16_ROWS)
            target = candidates.at[parity, place, :]
            copy = block(successor, token, target, sems.at[CANDIDATES + parity])
            if wait:
                copy.wait()
            else:
                copy.start(priority=AHEAD_OF_TAPE)
            return carry

        lax.fori_loop(0, batch * k, one, jnp.int32(0))

    def choose(sequence: jax.Array, row: jax.Array) -> None:
        here = sequence * rows_per_sequence + row
        token = jnp.maximum(out[here - 1], 0)
        rows = previous[sequence].astype(jnp.float32)
        mine = lax.broadcasted_iota(jnp.int32, rows.shape, 0) == (token & (BF16_ROWS - 1))
        query = jnp.sum(jnp.where(mine, rows, 0.0), axis=0, keepdims=True) * hidden.row(here)
        first = pl.multiple_of(sequence * (k * BF16_ROWS), BF16_ROWS)
        blocks = candidates[row & 1, pl.ds(first, k * BF16_ROWS), :]
        likeness = _exact_products(query, blocks)
        offers = values.row(here)
        lane = lax.broadcasted_iota(jnp.int32, likeness.shape, 1)
        score = jnp.full(likeness.shape, -jnp.inf, jnp.float32)
        for candidate in range(k):
            row_of_block = candidate_ids[here, candidate] & (BF16_ROWS - 1)
            offer = likeness + offers[:, candidate : candidate + 1]
            score = jnp.where(lane == candidate * BF16_ROWS + row_of_block, offer, score)
        place = best(score, sequence, row)
        # Without any number there is no place: stay among the candidates.
        place = jnp.minimum(place[0, 0], k * BF16_ROWS - 1)
        out[here] = candidate_ids[here, lax.shift_right_logical(place, BLOCK_SHIFT)]

    def one_row(row: jax.Array, carry: jax.Array) -> jax.Array:
        def predecessor_block(sequence: jax.Array) -> Any:
            token = out[sequence * rows_per_sequence + row - 1]
            return block(predecessor, token, previous.at[sequence], sems.at[PREVIOUS])

        each_sequence(
            batch, lambda sequence: predecessor_block(sequence).start(priority=AHEAD_OF_TAPE)
        )

        @pl.when(row + 1 < rows_per_sequence)
        def _following() -> None:
            each_candidate(row + 1, wait=False)

        each_sequence(batch, lambda sequence: predecessor_block(sequence).wait())
        each_candidate(row, wait=True)
        each_sequence(batch, lambda sequence: choose(sequence, row))
        return carry

    def keep_first(sequence: jax.Array) -> None:
        out[sequence * rows_per_sequence] = tokens[sequence * rows_per_sequence]

    best = _best if choice is None else choice
    to_scalars = ids.ref.at[:, ids.start : ids.start + LANES]
    copy = pltpu.make_async_copy(to_scalars, candidate_ids, sems.at[IDS])
    copy.start()
    copy.wait()
    each_sequence(batch, keep_first)
    each_candidate(jnp.int32(1), wait=False)
    lax.fori_loop(1, rows_per_sequence, one_row, jnp.int32(0))


def _best(score: jax.Array, sequence: Scalar, row: Scalar) -> jax.Array:
    """The largest score, the first one on ties."""
    _, place = over_lanes(score, lax.broadcasted_iota(jnp.int32, score.shape, 1))
    return place


def _exact_products(query: jax.Array, rows: jax.Array) -> jax.Array:
    """Products of `[1, r]` f32 with each of `[n, r]` bf16, as `[1, n]` f32."""
    parts = pieces(query)
    padding = jnp.zeros((SUBLANES - len(parts), query.shape[1]), jnp.float32)
    left = jnp.concatenate([*parts, padding], axis=0).astype(jnp.bfloat16)
    products = lax.dot_general(
        left, rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return jnp.sum(products, axis=0, keepdims=True)
