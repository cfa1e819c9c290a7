"""Products of f32 matrices, exact to f32 rounding, in few passes of the matrix unit.

The unit multiplies bf16 numbers and adds in f32. An f32 number is the sum of three bf16 numbers,
its pieces; of the nine products of pieces the smallest is far below f32 rounding. The compiler's
own way (`Precision.HIGHEST`) is a pass for each of the six largest. The rows of a round are few, so
that pieces fit beside one another in one pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

PIECES = 3
UPPER_BITS = -65536  # of an f32 number: those that bf16 has
LAST = PIECES - 1
# Small products first: sums in f32 lose least when they grow.
PAIRS = ((1, 2), (2, 1), (0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0))


def pieces(x: jax.Array) -> list[jax.Array]:
    """Three f32 arrays of bf16 numbers whose sum is `x`."""
    found = []
    rest = x
    for _ in range(LAST):
        bits = lax.bitcast_convert_type(rest, jnp.int32) & UPPER_BITS
        found.append(lax.bitcast_convert_type(bits, jnp.float32))
        rest = rest - found[-1]
    return [*found, rest]


def few_by_many(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left @ right`, `[m, k]` and `[k, n]`: pieces below one another, and side by side."""
    rows, columns = left.shape[0], right.shape[1]
    products = jnp.dot(
        jnp.concatenate(pieces(left), axis=0).astype(jnp.bfloat16),
        jnp.concatenate(pieces(right), axis=1).astype(jnp.bfloat16),
        preferred_element_type=jnp.float32,
    )
    total = None
    for i, j in PAIRS:
        part = products[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        total = part if total is None else total + part
    assert total is not None
    return total


def over_few_rows(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left^T @ right`, `[k, m]` and `[k, n]` with a small k: `[m, n]`."""
    return _joined_pairs(left, right, 0)


def over_lanes_of_few(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left @ right^T`, `[m, k]` and `[n, k]`: `[m, n]`."""
    if right.shape[0] == 1:  # the compiler has no product of bf16 matrices with one column
        return jnp.sum(left * right, axis=1, keepdims=True)
    return _joined_pairs(left, right, 1)


def _joined_pairs(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    """Contracts `axis` of both; all pairs of pieces are parts of one long contraction."""
    lefts, rights = pieces(left), pieces(right)
    return lax.dot_general(
        jnp.concatenate([lefts[i] for i, _ in PAIRS], axis=axis).astype(jnp.bfloat16),
        jnp.concatenate([rights[j] for _, j in PAIRS], axis=axis).astype(jnp.bfloat16),
        (((axis,), (axis,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
