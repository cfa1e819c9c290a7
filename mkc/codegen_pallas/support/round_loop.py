"""Whole speculative rounds in one launch: what goes from round to round, and when a sequence ends.

The loop is that of `mkc.runtime.rounds.rounds_function`. A sequence whose first position is
negative rests: it keeps its tokens, positions, `kept` and every bit of its states. A sequence ends
with the round that emits one of its stop ids or uses up its budget; it also rests once its own
rounds of this launch are over, but its results then say where it goes on.

A sequence that is awake and emits nothing was not decided: the launch ends with this round. The
sequence's results are what the round began with, and nothing to commit, since the round did that.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mkc.codegen_pallas.support.accept import each_sequence
from mkc.codegen_pallas.support.accept import real_rows
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.schedule.program import RESTING


def begin_block_rounds(
    memory: Any, *, batch: int, rows_per_sequence: int
) -> tuple[jax.Array, jax.Array]:
    """Copies what is carried to where the rounds read and change it.

    Args:
      memory: the kernel's memory, everything i32 in SMEM. Arguments `tokens`, `positions`
        `[batch * T]`, `kept`, `rounds`, `budgets` `[batch]`; results `tokens_out`, `positions_out`,
        `kept_out`; scratch `s_tokens`, `s_positions`, `s_kept` like these, and `s_budgets`.

    Returns:
      Rounds of the longest sequence that does not rest, at least 1, and whether there is one.
    """

    def one_sequence(sequence: jax.Array) -> None:
        for row in range(rows_per_sequence):
            index = sequence * rows_per_sequence + row
            for target in (memory.s_tokens, memory.tokens_out):
                target[index] = memory.tokens[index]
            for target in (memory.s_positions, memory.positions_out):
                target[index] = memory.positions[index]
        memory.s_kept[sequence] = memory.kept[sequence]
        memory.kept_out[sequence] = memory.kept[sequence]
        memory.s_budgets[sequence] = memory.budgets[sequence]

    each_sequence(batch, one_sequence)
    longest = jnp.int32(1)
    running = jnp.bool_(False)
    for sequence in range(batch):
        awake = memory.positions[sequence * rows_per_sequence] >= 0
        longest = jnp.where(awake, jnp.maximum(longest, memory.rounds[sequence]), longest)
        running = running | awake
    return longest, running


def end_block_round(
    memory: Any,
    index: Scalar,
    *,
    emitted: Ref,
    count: Ref,
    tokens: Ref,
    positions: Ref,
    batch: int,
    rows_per_sequence: int,
) -> jax.Array:
    """Reports the round and moves on; False when every sequence rests or one is not decided.

    Args:
      memory: as `begin_block_rounds` left it; also argument `stop_ids` `[batch * n]`, n for each
        sequence, and results `emitted` `[rounds * batch * T]`, `counts` and `drafts`
        `[rounds * batch]`, all i32 in SMEM.
      index: number of the round.
      emitted, count: `[batch * T]` and `[batch]` i32 in SMEM, as `accept_greedy` wrote them.
      tokens, positions: `[batch * T]` i32 in SMEM, of the next round.
    """
    stops = memory.stop_ids.shape[0] // batch
    undecided = jnp.bool_(False)
    for sequence in range(batch):
        awake = memory.s_positions[sequence * rows_per_sequence] >= 0
        undecided = undecided | (awake & (count[sequence] == 0))

    def one_sequence(sequence: jax.Array) -> None:
        first = sequence * rows_per_sequence
        number = count[sequence]
        drafts = real_rows(memory.s_positions, sequence, rows_per_sequence) - 1
        memory.counts[index * batch + sequence] = number
        memory.drafts[index * batch + sequence] = jnp.maximum(drafts, 0)
        left = memory.s_budgets[sequence] - number
        ended = left <= 0
        for row in range(rows_per_sequence):
            token = emitted[first + row]
            memory.emitted[(index * batch + sequence) * rows_per_sequence + row] = token
            for stop in range(stops):
                is_stop = token == memory.stop_ids[sequence * stops + stop]
                ended = ended | ((row < number) & is_stop)
        memory.s_budgets[sequence] = left

        awake = memory.s_positions[first] >= 0

        @pl.when(awake)
        def _commit() -> None:
            memory.s_kept[sequence] = number
            memory.kept_out[sequence] = number

        @pl.when(awake & (number > 0))
        def _move() -> None:
            rests = ended | (index + 1 >= memory.rounds[sequence])
            for row in range(rows_per_sequence):
                place = first + row
                memory.s_tokens[place] = tokens[place]
                memory.tokens_out[place] = tokens[place]
                position = positions[place]
                memory.s_positions[place] = jnp.where(rests, RESTING, position)
                memory.positions_out[place] = jnp.where(ended, RESTING, position)

    each_sequence(batch, one_sequence)
    running = jnp.bool_(False)
    for sequence in range(batch):
        running = running | (memory.s_positions[sequence * rows_per_sequence] >= 0)
    return running & ~undecided
