"""Experts in training: rounded to what is stored, and computed all at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.dense_experts import expert_mlp
from examples.mxfp4_rounding import encoded
from examples.mxfp4_rounding import rounded
from mkc.ir.facets import REFERENCE
from mkc.ir.mxfp4 import GROUP
from mkc.ir.mxfp4 import MAGNITUDES
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.reference_experts import decode
from mkc.ir.reference_ops import OpContext
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis

EXPERTS, ROWS, WIDTH, MLP, TOP = 4, 6, 32, 64, 2


def matrix(*shape: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(shape) * 0.1
    return values.astype(np.float32)


def test_what_is_stored_is_what_was_trained() -> None:
    values = matrix(3, 8, 4 * GROUP)
    codes, scales = encoded(values)
    assert codes.shape == (3, 8, 2 * GROUP) and scales.shape == (3, 8, 4)
    assert np.array_equal(decode(jnp.asarray(codes), jnp.asarray(scales)), rounded(values))


def test_values_of_the_format_stay_as_they_are() -> None:
    group = np.tile([*MAGNITUDES, *(-one for one in MAGNITUDES)], 2).astype(np.float32)
    values = np.stack([group, group / 64])
    assert np.array_equal(rounded(jnp.asarray(values)), values)


def test_nothing_is_further_off_than_half_a_step() -> None:
    """The widest step is 2; the largest value of a group is scaled to more than 3."""
    values = matrix(16, GROUP)
    off = np.abs(np.asarray(rounded(jnp.asarray(values))) - values)
    assert off.max() > 0 and np.all(off <= np.abs(values).max(axis=1, keepdims=True) / 3)


@pytest.mark.parametrize("coded", [False, True])
def test_dense_experts_are_the_op(coded: bool) -> None:
    shapes = [(EXPERTS, MLP, WIDTH), (EXPERTS, MLP, WIDTH), (EXPERTS, WIDTH, MLP)]
    matrices = [rounded(jnp.asarray(matrix(*one, seed=n))) for n, one in enumerate(shapes)]
    x = jnp.asarray(matrix(ROWS, WIDTH, seed=9)) * 10
    weights, ids = jax.lax.top_k(jax.nn.sigmoid(jnp.asarray(matrix(ROWS, EXPERTS, seed=7))), TOP)
    stored = matrices
    dtypes = [DType.BF16] * 3
    if coded:
        stored = [jnp.asarray(part) for one in matrices for part in encoded(np.asarray(one))]
        dtypes = [DType.E2M1X2, DType.E8M0] * 3
    operands = (x, ids, weights, *stored)
    types = tuple(
        TensorType(axes=tuple(map(axis, one.shape)), dtype=dtype)
        for one, dtype in zip(operands, [DType.BF16, DType.I32, DType.F32, *dtypes], strict=True)
    )
    context = OpContext(rounding="float32", operand_types=types, result_types=types[:1])
    op = ExpertMlp(gate_cap=4.0, up_cap=25.0)
    (mine,), _ = expert_mlp(op, operands, (), context)
    (wanted,), _ = REFERENCE.table[ExpertMlp](op, operands, (), context)
    np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-5 * float(jnp.abs(wanted).max()))
