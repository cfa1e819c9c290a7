"""Meanings of ops as XLA computes them fastest on a CPU; some sum in another order."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.ops import Argmax
from mkc.ir.ops import DeltaRule
from mkc.ir.ops import Linear
from mkc.ir.reference import Meanings
from mkc.ir.reference_ops import OpContext
from mkc.ir.reference_ops import delta_rule
from mkc.ir.reference_ops import wide


def bf16_linear(
    op: Linear, operands: tuple[Array, ...], states: tuple[Array, ...], context: OpContext
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """`Linear`: exact products and sums in f32, in another order than the reference evaluator's.

    With both operands in bf16 XLA needs 15 us for eight rows of a 256 x 256 matrix, where it takes
    26 us to widen them first (two cores, AVX-512).
    """
    x, weight = operands
    if x.dtype != weight.dtype:
        x, weight = wide(x), wide(weight)
    y = jnp.einsum("rk,nk->rn", x, weight, preferred_element_type=jnp.float32)
    return (context.result(y),), states


def product_over_keys(memory: Array, weights: Array) -> Array:
    """As `sum_over_keys`, in another order.

    Before it sums, XLA writes out what is summed; with products a step of eight rows that has four
    small layers takes 15 % less time.
    """
    return jnp.einsum("bhkv,bhk->bhv", memory, weights, precision=lax.Precision.HIGHEST)


def first_of_largest(
    op: Argmax, operands: tuple[Array, ...], states: tuple[Array, ...], context: OpContext
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """`Argmax`: the same token. XLA takes 26 us for eight rows of 768 logits, and 4 us for this."""
    (logits,) = operands
    largest = jnp.max(logits, axis=-1, keepdims=True)
    is_largest = (logits == largest) | jnp.isnan(logits)
    tokens = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    return (jnp.min(jnp.where(is_largest, tokens, len(tokens)), axis=-1),), states


CPU_MEANINGS: Meanings = {
    Argmax: first_of_largest,
    DeltaRule: partial(delta_rule, read=product_over_keys),
    Linear: bf16_linear,
}
