"""Greedy acceptance, and the arithmetic on positions and tokens between the parts of a round.

All of it is on scalar memory: arrays of `[batch * T]` hold T consecutive rows for each sequence,
arrays of `[batch]` one number. What each function means: `mkc.ir.ops_spec`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from mkc.codegen_pallas.support.argmax import store_tokens
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.schedule.program import RESTING

NO_TOKEN = -1  # behind the tokens of a round


def accept_greedy(
    best: jax.Array,
    *,
    tokens: Ref,
    positions: Ref,
    emitted: Ref,
    count: Ref,
    last: Ref,
    batch: int,
    rows_per_sequence: int,
) -> None:
    """Accepts drafts while each is the best token of the row before it, then one token more.

    An accepted draft is the best token of the row before it, so the emitted tokens are the best
    tokens of the first `count` rows.

    Args:
      best: `[R, 1]` i32, the largest logit's column, over all ranks.
      tokens, positions: `[batch * T]` i32 in SMEM.
      emitted: `[batch * T]` i32 in SMEM, `NO_TOKEN` behind the tokens.
      count, last: `[batch]` i32 in SMEM: number of tokens and the last one; 0 and `NO_TOKEN` for a
        sequence that rests.
    """
    store_tokens(best, emitted, batch * rows_per_sequence)

    def one_sequence(sequence: jax.Array) -> None:
        first = sequence * rows_per_sequence
        going = positions[first] >= 0
        number, newest = jnp.int32(0), jnp.int32(NO_TOKEN)
        for row in range(rows_per_sequence):
            token = emitted[first + row]
            emitted[first + row] = jnp.where(going, token, NO_TOKEN)
            newest = jnp.where(going, token, newest)
            number = number + going.astype(jnp.int32)
            if row + 1 < rows_per_sequence:
                is_draft = positions[first + row + 1] >= 0
                going = going & is_draft & (tokens[first + row + 1] == token)
        count[sequence] = number
        last[sequence] = newest

    each_sequence(batch, one_sequence)


def kept_positions(
    positions: Ref, count: Ref, out: Ref, *, batch: int, rows_per_sequence: int
) -> None:
    """`out` `[batch * T]`: the positions of the first `count` rows; others rest."""

    def one_sequence(sequence: jax.Array) -> None:
        for row in range(rows_per_sequence):
            index = sequence * rows_per_sequence + row
            out[index] = jnp.where(row < count[sequence], positions[index], RESTING)

    each_sequence(batch, one_sequence)


def next_positions(
    positions: Ref, count: Ref, out: Ref, *, context: int, batch: int, rows_per_sequence: int
) -> None:
    """`out` `[batch * T]`: T positions from the first one plus `count`.

    Rows from `context` on rest, as do all rows of a sequence that rests. `out` may be `positions`.
    """

    def one_sequence(sequence: jax.Array) -> None:
        first = positions[sequence * rows_per_sequence]
        start = first + count[sequence]
        for row in range(rows_per_sequence):
            there = (first >= 0) & (start + row < context)
            out[sequence * rows_per_sequence + row] = jnp.where(there, start + row, RESTING)

    each_sequence(batch, one_sequence)


def block_tokens(anchor: Ref, out: Ref, *, mask: int, batch: int, rows_per_sequence: int) -> None:
    """`out` `[batch * T]`: each sequence's `anchor`, then T - 1 times `mask`."""

    def one_sequence(sequence: jax.Array) -> None:
        out[sequence * rows_per_sequence] = anchor[sequence]
        for row in range(1, rows_per_sequence):
            out[sequence * rows_per_sequence + row] = jnp.int32(mask)

    each_sequence(batch, one_sequence)


def real_rows(positions: Ref, sequence: Scalar, rows_per_sequence: int) -> jax.Array:
    """How many of a sequence's rows do not rest; they are its first ones."""
    number = jnp.int32(0)
    for row in range(rows_per_sequence):
        there = positions[sequence * rows_per_sequence + row] >= 0
        number = number + there.astype(jnp.int32)
    return number


def each_sequence(batch: int, function: Callable[[jax.Array], None]) -> None:
    """Calls `function` for every sequence, in a loop whose body is emitted once."""

    def body(sequence: jax.Array, carry: jax.Array) -> jax.Array:
        function(sequence)
        return carry

    lax.fori_loop(0, batch, body, jnp.int32(0))
