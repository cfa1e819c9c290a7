"""What goes from round to round in VMEM: candidates of drafts, and how likely they were drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.accept import NO_TOKEN
from mkc.codegen_pallas.support.distribution import column
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import View


def begin_sampled_rounds(memory: Any, rows: Sequence[tuple[Ref, Ref]]) -> None:
    """Fetches what the launch before carried on, and what sequences have to emit.

    Args:
      memory: the argument `forced` and the scratch `s_forced`, `[batch * T]` i32 in SMEM; the DMA
        semaphores `rows_sem` `[1]`.
      rows: arrays `[R, 128]` in HBM, and in VMEM.
    """

    def one(index: jax.Array, carry: jax.Array) -> jax.Array:
        memory.s_forced[index] = memory.forced[index]
        return carry

    lax.fori_loop(0, memory.s_forced.shape[0], one, jnp.int32(0))
    for there, here in rows:
        _copy(there, here, memory.rows_sem.at[0])


def end_sampled_round(
    memory: Any,
    rows: Sequence[tuple[Ref, View]],
    *,
    count: Ref,
    batch: int,
    rows_per_sequence: int,
) -> None:
    """Carries on the rows of every sequence that emitted something. Call before `end_block_round`.

    Args:
      memory: scratch `s_forced` and `s_positions`, `[batch * T]` i32 in SMEM, of this round.
      rows: arrays `[R, 128]` in VMEM, and what this round made of them, `[R, k]`.
      count: `[batch]` i32 in SMEM, as `accept_sampled` wrote it.
    """

    def one(index: jax.Array, carry: jax.Array) -> jax.Array:
        memory.s_forced[index] = jnp.int32(NO_TOKEN)
        return carry

    lax.fori_loop(0, memory.s_forced.shape[0], one, jnp.int32(0))
    emitted = [
        jnp.where(memory.s_positions[sequence * rows_per_sequence] >= 0, count[sequence], 0)
        for sequence in range(batch)
    ]
    for here, new in rows:
        moved = column(emitted, here.shape[0], repeats=rows_per_sequence)[:, : new.width]
        here[:, 0 : new.width] = jnp.where(moved > 0, new.load(), here[:, 0 : new.width])


def end_sampled_rounds(memory: Any, rows: Sequence[tuple[Ref, Ref]]) -> None:
    """Hands on what the next launch begins with; arguments as for `begin_sampled_rounds`."""
    for there, here in rows:
        _copy(here, there, memory.rows_sem.at[0])


def _copy(source: Ref, target: Ref, sem: Ref) -> None:
    copy = pltpu.make_async_copy(source, target, sem)
    copy.start()
    copy.wait()
