"""The delta rule that is differentiated in training, against the meaning of the op."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from examples.parallel_delta import CHUNK
from examples.parallel_delta import delta_rule
from examples.parallel_delta import inverse
from mkc.ir.facets import REFERENCE
from mkc.ir.ops import DeltaRule
from mkc.ir.reference_ops import OpContext
from mkc.ir.reference_ops import Outcome
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis

type Meaning = Callable[..., Outcome]

LANES, ROWS, KEY_HEADS, HEADS, DIM = 2, 2 * CHUNK, 1, 2, 8


def operands(seed: int, *, channels: bool = False) -> tuple[Array, ...]:
    rng = np.random.default_rng(seed)

    def unit(*shape: int) -> Array:
        x = rng.standard_normal(shape)
        return jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True), jnp.float32)

    rows = LANES * ROWS
    q, k, v = unit(rows, KEY_HEADS, DIM), unit(rows, KEY_HEADS, DIM), unit(rows, HEADS, DIM)
    beta = jnp.asarray(rng.uniform(0, 1, (rows, HEADS)), jnp.float32)
    decay = jnp.asarray(-rng.uniform(0, 0.5, (rows, HEADS)), jnp.float32)
    if channels:  # down to where factors are as large as they may be
        decay = jnp.asarray(-rng.uniform(0, 5.0, (rows, HEADS, DIM)), jnp.float32)
    memory = jnp.asarray(rng.standard_normal((LANES, HEADS, DIM, DIM)), jnp.float32)
    return q, k, v, beta, decay, memory


def outcome(function: Meaning, given: tuple[Array, ...], valid: Array) -> tuple[Array, Array]:
    result = TensorType(axes=tuple(axis(size) for size in given[2].shape), dtype=DType.F32)
    context = OpContext(rounding="float32", operand_types=(), result_types=(result,), valid=valid)
    (out,), (memory,) = function(DeltaRule(), given[:5], given[5:], context)
    return out, memory


def everything(function: Meaning, given: tuple[Array, ...], valid: Array) -> tuple[Array, ...]:
    """Outputs of the rows that count, the memory, and gradients of a sum that uses both."""
    weight = jnp.cos(jnp.arange(LANES * ROWS * HEADS * DIM)).reshape(-1, HEADS, DIM)
    weight = weight * valid.reshape(-1)[:, None, None]

    def total(given: tuple[Array, ...]) -> Array:
        out, memory = outcome(function, given, valid)
        return jnp.sum(out * weight) + jnp.sum(jnp.sin(memory))

    out, memory = outcome(function, given, valid)
    return (out * valid.reshape(-1)[:, None, None], memory, *jax.grad(total)(given))


@pytest.mark.parametrize(("rows", "channels"), [(ROWS, False), (ROWS - 5, False), (ROWS - 5, True)])
def test_same_values_and_gradients(rows: int, channels: bool) -> None:
    """f32 sums of some hundred terms in another order: 1e-4 of the largest value."""
    valid = jnp.tile(jnp.arange(ROWS) < rows, (LANES, 1))
    given = operands(rows, channels=channels)
    reference = REFERENCE.table[DeltaRule]
    evaluate = jax.jit(everything, static_argnums=0)
    for mine, wanted in zip(
        evaluate(delta_rule, given, valid), evaluate(reference, given, valid), strict=True
    ):
        scale = float(jnp.max(jnp.abs(wanted)))
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-4 * scale)


def test_inverse() -> None:
    """Also where a power series would lose all digits: every entry below the diagonal is 1."""
    below = jnp.tril(jnp.ones((64, 64)), -1)
    np.testing.assert_allclose(
        jax.jit(inverse)(below) @ (jnp.eye(64) + below), jnp.eye(64), atol=1e-5
    )
