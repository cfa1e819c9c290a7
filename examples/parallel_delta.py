"""The delta rule over all rows of a sequence at once, in a form that is cheap to differentiate.

The algebra is that of `mkc.runtime.prefill_ops.chunked_delta_rule`. There a triangular system is
solved, whose gradient is slow on a CPU; here its matrix is inverted by products of matrices.
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


def delta_rule(op: DeltaRule, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    """The op's meaning, as in `mkc.ir.reference_ops`, for rows in multiples of the chunk."""
    (memory,) = states
    batch = memory.shape[0]
    q, k, v, beta, decay = (by_sequence(wide(one), batch) for one in operands)
    counts = context.rows_that_count(batch, operands[0].shape[0])[..., None]
    beta, decay = jnp.where(counts, beta, 0.0), jnp.where(counts, decay, 0.0)
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
      beta, decay: [L, T, heads].
    """
    lanes, rows = v.shape[:2]
    size = min(CHUNK, rows)
    chunks = rows // size
    assert rows == chunks * size, f"{rows} rows are not whole chunks of {size}"

    def pieces(x: Array) -> Array:
        """[L, T, heads, ...] -> [L, chunks, heads, size, ...]."""
        return jnp.moveaxis(x.reshape(lanes, chunks, size, *x.shape[2:]), 3, 2)

    q, k, v, beta, decay = (pieces(one) for one in (q, k, v, beta, decay))
    row, column = np.arange(size)[:, None], np.arange(size)[None, :]
    # As a product: the gradient of a running sum is slow on a CPU.
    total = decay @ jnp.asarray(row <= column, jnp.float32)
    difference = total[..., :, None] - total[..., None, :]
    kept = jnp.where(row >= column, jnp.exp(jnp.where(row >= column, difference, 0.0)), 0.0)
    keys = jnp.swapaxes(k, -1, -2)
    solve = inverse(jnp.where(row > column, beta[..., None] * (k @ keys) * kept, 0.0))
    attention = (q @ keys) * kept
    factor = jnp.exp(total)[..., None]
    wanted = solve @ (beta[..., None] * v)
    seen = solve @ (beta[..., None] * k * factor)
    queries = q * factor
    left = k * jnp.exp(total[..., -1:] - total)[..., None]
    shrink = jnp.exp(total[..., -1])[..., None, None]
    outputs = []
    for chunk in range(chunks):
        correction = wanted[:, chunk] - seen[:, chunk] @ memory
        outputs.append(queries[:, chunk] @ memory + attention[:, chunk] @ correction)
        added = jnp.swapaxes(left[:, chunk], -1, -2) @ correction
        memory = memory * shrink[:, chunk] + added
    out = jnp.moveaxis(jnp.stack(outputs, axis=1), 3, 2)
    return out.reshape(lanes, rows, *out.shape[3:]), memory


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
