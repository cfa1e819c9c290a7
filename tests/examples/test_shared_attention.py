"""Blocks of a conversation that share its keys and values, against a cache for each block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.tiny_drafter import BLOCK
from examples.tiny_drafter import shared_attention
from mkc.ir.facets import REFERENCE
from mkc.ir.ops_spec import BlockAttention
from mkc.ir.reference_ops import OpContext
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis

LENGTH, HEADS, KEY_HEADS, DIM = 32, 4, 2, 8
ANCHORS = (3, 11, 17, 22)  # places of the blocks' first rows


def tensors(rows: int, heads: int, seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (rows, heads, DIM))


def attended(meaning: object, op: BlockAttention, operands: tuple, states: tuple) -> np.ndarray:
    shape = tuple(map(axis, operands[0].shape))
    result = TensorType(axes=shape, dtype=DType.F32)
    context = OpContext(rounding="float32", operand_types=(), result_types=(result,))
    (found,), _ = meaning(op, operands, states, context)  # type: ignore[operator]
    return np.asarray(found)


@pytest.mark.parametrize(
    ("causal", "anchored", "window"),
    [(False, False, 10), (True, True, 10), (True, False, 10), (True, True, None)],
)
def test_every_block_sees_what_it_would_see_alone(
    causal: bool, anchored: bool, window: int | None
) -> None:
    op = BlockAttention(scale=0.3, window=window, causal=causal, anchored=anchored)
    rows = len(ANCHORS) * BLOCK
    q, k, v = tensors(rows, HEADS, 0), tensors(rows, KEY_HEADS, 1), tensors(rows, KEY_HEADS, 2)
    seen = (tensors(LENGTH, KEY_HEADS, 3), tensors(LENGTH, KEY_HEADS, 4), jnp.arange(LENGTH))
    places = (jnp.asarray(ANCHORS)[:, None] + jnp.arange(BLOCK)).reshape(-1)
    together = attended(shared_attention(1), op, (q, k, v, places, *seen), ())
    empty = jnp.zeros((1, LENGTH, KEY_HEADS, DIM))
    for number in range(len(ANCHORS)):
        own = slice(number * BLOCK, (number + 1) * BLOCK)
        operands = (q[own], k[own], v[own], places[own], *seen)
        alone = attended(REFERENCE.table[BlockAttention], op, operands, (empty, empty))
        np.testing.assert_allclose(together[own], alone, rtol=0, atol=1e-5)
