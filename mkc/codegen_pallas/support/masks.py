"""Masks of allowed tokens, applied to the logits where they lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.refs import LANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.streams import AHEAD_OF_TAPE

WORD_BITS = 32
BLOCK = WORD_BITS * LANES  # columns that a register of words covers


def fetch_masks(hbm: Ref, block: Ref, sem: Ref) -> None:
    """Starts the copy of the masks into VMEM. Call once per round, before `mask_tokens`."""
    pltpu.make_async_copy(hbm, block, sem).start(priority=AHEAD_OF_TAPE)


def mask_tokens(logits: View, hbm: Ref, block: Ref, sem: Ref) -> None:
    """Columns whose bit is not set become minus infinity, in place.

    Bit j of word b * 128 + l is column (b * 32 + j) * 128 + l.

    Args:
      logits: `[R, n]` f32.
      block: `[R, words]` i32 in VMEM, the masks that `fetch_masks` has started to copy.
    """
    pltpu.make_async_copy(hbm, block, sem).wait()

    def one_register(words: jax.Array, bit: int, columns: slice | pl.Slice) -> None:
        value = logits.ref[:, columns]
        allowed = lax.shift_right_logical(words, jnp.full_like(words, bit)) & 1
        logits.ref[:, columns] = jnp.where(allowed == 1, value, -jnp.inf)

    def one_block(number: jax.Array, carry: jax.Array) -> jax.Array:
        words = block[:, pl.ds(pl.multiple_of(number * LANES, LANES), LANES)]
        for bit in range(WORD_BITS):
            first = logits.start + number * BLOCK + bit * LANES
            if logits.start % LANES == 0:
                first = pl.multiple_of(first, LANES)
            one_register(words, bit, pl.ds(first, LANES))
        return carry

    whole = logits.width // BLOCK
    if whole:
        lax.fori_loop(0, whole, one_block, jnp.int32(0))
    for start in range(whole * BLOCK, logits.width, LANES):
        width = min(LANES, logits.width - start)
        words = block[:, whole * LANES : whole * LANES + width]
        first = logits.start + start
        one_register(words, (start - whole * BLOCK) // LANES, slice(first, first + width))
