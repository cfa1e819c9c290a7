"""The delta rule over all rows of a sequence at once, in a form that is cheap to differentiate.

The algebra is that of `mkc.runtime.prefill_ops.chunked_delta_rule`. There a triangular system is
solved, whose gradient is slow on a CPU; here its matrix is inverted by products of matrices.
A decay is one number of a head, or one of each key channel.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mkc.ir.ops import DeltaRule
from mkc.ir.reference_ops import Arrays
from mkc.ir.reference_ops import OpContext
from mkc.ir.reference_ops import Outcome
from mkc.ir.reference_ops import by_sequence
from mkc.ir.reference_ops import wide

CHUNK = 32
# Where each channel has its decay. Factors in a chunk are up to exp(8 * decay), in products up to
# exp(16 * decay), which f32 holds for logarithms of decays down to -5.
CHANNEL_CHUNK = 16


def delta_rule(op: DeltaRule, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    """The op's meaning, as in `mkc.ir.reference_ops`, for rows in multiples of the chunk."""
    (memory,) = states
    batch = memory.shape[0]
    q, k, v, beta, decay = (by_sequence(wide(one), batch) for one in operands)
    decay = decay.reshape(*beta.shape, -1)
    counts = context.rows_that_count(batch, operands[0].shape[0])[..., None]
    beta, decay = jnp.where(counts, beta, 0.0), jnp.where(counts[..., None], decay, 0.0)
    k = jnp.where(counts[..., None], k, 0.0)
    group = v.shape[2] // q.shape[2]
    q, k = jnp.repeat(q, group, axis=2), jnp.repeat(k, group, axis=2)
    out, memory = parallel_delta_rule(q, k, v, beta, decay, memory)
    return (context.result(out.reshape(operands[2].shape)),), (memory,)


def parallel_delta_rule(
    q: Array, k: Array, v: Array, beta: Array, decay: Array, memory: Array
) -> tuple[Array, Array]:
    """Outputs [L, T, heads, dv] and the new memory [L, heads, dk, dv].

    Args:
      q, k: [L, T, heads, dk].
      v: [L, T, heads, dv].
      beta: [L, T, heads].
      decay: logarithms, [L, T, heads, 1] or [L, T, heads, dk].
    """
    lanes, rows = v.shape[:2]
    size = min(CHUNK if decay.shape[-1] == 1 else CHANNEL_CHUNK, rows)
    chunks = rows // size
    assert rows == chunks * size, f"{rows} rows are not whole chunks of {size}"

    def pieces(x: Array) -> Array:
        """[L, T, heads, ...] -> [L, chunks, heads, size, ...]."""
        return jnp.moveaxis(x.reshape(lanes, chunks, size, *x.shape[2:]), 3, 2)

    q, k, v, beta, decay = (pieces(one) for one in (q, k, v, beta, decay))
    row, column = np.arange(size)[:, None], np.arange(size)[None, :]
    # As a product: the gradient of a running sum is slow on a CPU.
    total = jnp.asarray(row >= column, jnp.float32) @ decay
    solve = inverse(jnp.where(row > column, beta[..., None] * decayed_products(k, k, total), 0.0))
    attention = jnp.where(row >= column, decayed_products(q, k, total), 0.0)
    factor = jnp.exp(total)
    wanted = solve @ (beta[..., None] * v)
    seen = solve @ (beta[..., None] * k * factor)
    queries = q * factor
    left = k * jnp.exp(total[..., -1:, :] - total)
    shrink = jnp.exp(total[..., -1, :])[..., None]
    outputs = []
    for chunk in range(chunks):
        correction = wanted[:, chunk] - seen[:, chunk] @ memory
        outputs.append(queries[:, chunk] @ memory + attention[:, chunk] @ correction)
        added = jnp.swapaxes(left[:, chunk], -1, -2) @ correction
        memory = memory * shrink[:, chunk] + added
    out = jnp.moveaxis(jnp.stack(outputs, axis=1), 3, 2)
    return out.reshape(lanes, rows, *out.shape[3:]), memory


def decayed_products(left: Array, right: Array, total: Array) -> Array:
    """Products of rows, the later one's first, with what is left of the earlier one by then.

    Args:
      left, right: [.., size, dk].
      total: sums of decays from the chunk's beginning, [.., size, 1] or [.., size, dk].

    Returns:
      [.., size, size]; above the diagonal anything finite.
    """
    if total.shape[-1] > 1:
        middle = total[..., total.shape[-2] // 2, :][..., None, :]
        left, right = left * jnp.exp(total - middle), right * jnp.exp(middle - total)
        return left @ jnp.swapaxes(right, -1, -2)
    difference = total - jnp.swapaxes(total, -1, -2)
    size = difference.shape[-1]
    below = np.tri(size, dtype=bool)
    kept = jnp.where(below, jnp.exp(jnp.where(below, difference, 0.0)), 0.0)
    return (left @ jnp.swapaxes(right, -1, -2)) * kept


@jax.custom_vjp
def inverse(below: Array) -> Array:
    """(I + below)^-1 for strictly lower triangular matrices [.., n, n].

    Blocks of the diagonal are inverted, each twice as large as the ones before: with X the inverse
    of the blocks of one size and M what joins two of them, that of the next size is X - X M X.
    """
    size = below.shape[-1]
    place = np.arange(size)
    found = jnp.eye(size, dtype=below.dtype)
    block = 1
    while block < size:
        number = place // block
        row, column = number[:, None], number[None, :]
        joining = jnp.where((row // 2 == column // 2) & (row > column), below, 0.0)
        found = found - found @ joining @ found
        block *= 2
    return found


def _inverse_forward(below: Array) -> tuple[Array, Array]:
    found = inverse(below)
    return found, found


def _inverse_backward(found: Array, gradient: Array) -> tuple[Any]:
    turned = jnp.swapaxes(found, -1, -2)
    return (-(turned @ gradient @ turned),)


inverse.defvjp(_inverse_forward, _inverse_backward)
