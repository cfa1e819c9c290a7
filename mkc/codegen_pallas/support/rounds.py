"""Several decode steps in one launch: tokens go round inside the kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar


def begin_rounds(memory: Any, *, tokens: Ref, positions: Ref, batch: int) -> None:
    """Copies the first tokens and positions to where the rounds read and change them.

    Args:
      memory: the kernel's memory; `tokens`, `positions`, `stopped` are `[batch]` i32 in SMEM.
      tokens, positions: the launch's arguments, `[batch]` i32 in SMEM.
    """
    for sequence in range(batch):
        memory.tokens[sequence] = tokens[sequence]
        memory.positions[sequence] = positions[sequence]
        memory.stopped[sequence] = 0


def end_round(memory: Any, index: Scalar, *, batch: int) -> jax.Array:
    """Emits the round's tokens and moves on; False when every sequence has stopped.

    A sequence that stopped keeps its position while others go on: what it then computes is not
    used, and its states are not those of its last token.

    Args:
      memory: also holds `emitted` `[rounds * batch]` i32 and `stop_ids` i32 in SMEM.
      index: number of the round.
    """
    running = jnp.bool_(False)
    for sequence in range(batch):
        token = memory.tokens[sequence]
        memory.emitted[index * batch + sequence] = token
        stopped = memory.stopped[sequence] != 0
        for stop in range(memory.stop_ids.shape[0]):
            stopped = stopped | (token == memory.stop_ids[stop])
        memory.stopped[sequence] = stopped.astype(jnp.int32)
        position = memory.positions[sequence]
        memory.positions[sequence] = jnp.where(stopped, position, position + 1)
        running = running | ~stopped
    return running
