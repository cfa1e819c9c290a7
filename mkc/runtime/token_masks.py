"""Masks of allowed tokens, as callers have them and as a kernel reads them.

A mask is u32 [ceil(vocab / 32)]: token t is allowed when bit t % 32 of word t // 32 is set. None
stands for all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mkc.ir.ops import MASK_BITS
from mkc.ir.token_masks import mask_words
from mkc.runtime.shards import Array
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import Program
from mkc.schedule.program import mask_lanes
from mkc.schedule.round_phases import AcceptPhase

ALL = np.uint32(0xFFFFFFFF)

type Masks = Sequence[Array | None]  # one per row: of a step one per slot


def pack_mask(allowed: Array) -> Array:
    """Words from bool [vocab]."""
    bits = np.zeros(mask_words(len(allowed)) * MASK_BITS, bool)
    bits[: len(allowed)] = allowed
    return np.packbits(bits, bitorder="little").view(np.uint32)


def unpack_mask(words: Array, vocab: int) -> Array:
    """Bool [vocab] from words."""
    assert words.dtype == np.uint32, f"a mask of {words.dtype}"
    assert words.shape == (mask_words(vocab),), f"a mask of {words.shape} words for {vocab} tokens"
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab].astype(bool)


def mask_rows(masks: Masks, vocab: int) -> Array:
    """As an input of the graph: i32 [slots, words]."""
    words = np.full((len(masks), mask_words(vocab)), ALL, np.uint32)
    for slot, mask in enumerate(masks):
        if mask is not None:
            assert mask.shape == words[slot].shape, "a mask of another vocabulary"
            words[slot] = mask
    return words.view(np.int32)


def kernel_masks(masks: Masks, program: Program) -> list[Array]:
    """As the operand of a kernel: of each rank i32 [rows, words] in the order of its registers.

    Rows beyond the slots allow everything.
    """
    columns = next(
        one.columns
        for one in program.phases()
        if isinstance(one, ArgmaxPhase | AcceptPhase) and one.masks
    )
    shares = 1 if program.logits_whole else program.ranks
    shape = (program.padded_rows, mask_lanes(columns))
    parts = [np.full(shape, ALL, np.uint32) for _ in range(shares)]
    for slot, mask in enumerate(masks):
        if mask is None:
            continue
        allowed = unpack_mask(mask, shares * columns)
        for rank, part in enumerate(parts):
            part[slot] = _registers(allowed[rank * columns : (rank + 1) * columns])
    return [parts[rank % shares].view(np.int32) for rank in range(program.ranks)]


def _registers(allowed: Array) -> Array:
    """Words of one row of one rank from bool [columns]; see `mkc.schedule.program.mask_lanes`."""
    words = mask_lanes(len(allowed))
    bits = np.zeros(words * MASK_BITS, bool)
    bits[: len(allowed)] = allowed
    blocks = bits.reshape(-1, MASK_BITS, VECTOR_LANES).swapaxes(1, 2)
    packed = np.packbits(blocks, axis=2, bitorder="little")  # 4 bytes for each word
    return np.ascontiguousarray(packed).view(np.uint32).reshape(words)
