"""Rows that rest, and several decode steps in one launch: tokens go round inside the kernel.

A row whose position is negative rests: it changes no state, and what is computed for it means
nothing. A row that has emitted its last token of a launch rests from the next round on, so that its
states are those after the last token that it was fed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.schedule.program import RESTING


def begin_rounds(
    memory: Any, *, tokens: Ref, positions: Ref, batch: int
) -> tuple[jax.Array, jax.Array]:
    """Copies the first tokens and positions to where the rounds read and change them.

    Args:
      memory: the kernel's memory: `tokens`, `positions` `[batch]` i32 in SMEM, and the argument
        `rounds` `[batch]` i32 in SMEM, at least 1: the rounds of every sequence.
      tokens, positions: the launch's arguments, `[batch]` i32 in SMEM.

    Returns:
      Rounds of the longest sequence that does not rest, at least 1, and whether there is one.
    """
    longest = jnp.int32(1)
    running = jnp.bool_(False)
    for sequence in range(batch):
        position = positions[sequence]
        memory.tokens[sequence] = tokens[sequence]
        memory.positions[sequence] = position
        awake = position >= 0
        longest = jnp.where(awake, jnp.maximum(longest, memory.rounds[sequence]), longest)
        running = running | awake
    return longest, running


def end_round(memory: Any, index: Scalar, *, batch: int) -> jax.Array:
    """Emits the round's tokens and moves on; False when every sequence rests.

    A sequence rests after one of its own stop ids, and after its own last round. It then emits
    `RESTING` in place of tokens.

    Args:
      memory: also holds `emitted` `[rounds * batch]` i32 and `stop_ids` `[batch * n]` i32, n for
        each sequence, in SMEM.
      index: number of the round.
    """
    running = jnp.bool_(False)
    stops = memory.stop_ids.shape[0] // batch
    for sequence in range(batch):
        token = memory.tokens[sequence]
        position = memory.positions[sequence]
        rests = position < 0
        memory.emitted[index * batch + sequence] = jnp.where(rests, RESTING, token)
        ends = rests | (index + 1 >= memory.rounds[sequence])
        for stop in range(sequence * stops, (sequence + 1) * stops):
            ends = ends | (token == memory.stop_ids[stop])
        memory.positions[sequence] = jnp.where(ends, RESTING, position + 1)
        running = running | ~ends
    return running
