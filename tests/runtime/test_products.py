"""What ops mean to the reference backend is what they mean to the reference evaluator.

Sums are in another order; chosen tokens are the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkc
from mkc.ir.ops import Argmax
from mkc.ir.ops import DeltaRule
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.ir.reference import NO_MEANINGS
from mkc.ir.reference import Meanings
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from mkc.ir.types import DType
from mkc.runtime.products import CPU_MEANINGS
from tests.ir.evaluate_op import evaluate_op

VOCAB, HIDDEN = 64, 256
# Sums of `HIDDEN` terms of the order of 1 in f32, in two orders.
LARGEST_ERROR = HIDDEN * 2.0**-23 * 16


def one_product(step: mkc.Step) -> mkc.Outputs:
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
    return mkc.next_token(h, mkc.param("head.weight", [VOCAB, HIDDEN]))


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_sums_are_those_of_f32(batch: int) -> None:
    graph = mkc.trace(one_product, name="product", batch=batch, context=16)
    random = np.random.default_rng(0)
    params = {name: random.normal(size=(VOCAB, HIDDEN)) for name in ("embed.weight", "head.weight")}
    weights = stack_params(graph, params)
    inputs = {"tokens": jnp.arange(batch), "positions": jnp.zeros(batch, jnp.int32)}

    def logits(meanings: Meanings) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        run = jax.jit(
            lambda weights: step_outputs(graph, weights, inputs, {}, meanings=meanings)[0],
            compiler_options=COMPILER_OPTIONS,
        )
        return np.asarray(run(weights)["logits"], np.float32)

    found, expected = logits(CPU_MEANINGS), logits(NO_MEANINGS)
    ulp = np.abs(expected) * 2.0**-7  # of a logit in bf16, in which they are returned
    assert (np.abs(found - expected) <= np.maximum(ulp, LARGEST_ERROR)).all()
    assert expected.std() > 1.0


@pytest.mark.parametrize(
    ("value_heads", "of_channels"), [(2, False), (6, True)], ids=["heads", "channels"]
)
@pytest.mark.parametrize(("batch", "length"), [(1, 5), (8, 1)])
def test_the_delta_rule_reads_the_same(
    value_heads: int, of_channels: bool, batch: int, length: int
) -> None:
    """The last row of each sequence is padding, where there is more than one."""
    random = np.random.default_rng(1)
    rows, key_heads, dk, dv = batch * length, 2, 16, 24

    def normal(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return random.normal(size=shape).astype(np.float32)

    q, k, v = (
        normal(rows, key_heads, dk),
        normal(rows, key_heads, dk),
        normal(rows, value_heads, dv),
    )
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    beta = random.random((rows, value_heads), np.float32)
    decay = -random.random((rows, value_heads, *[dk] * of_channels), np.float32)
    memory = normal(batch, value_heads, dk, dv)
    valid = np.ones((batch, length), bool)
    valid[:, -1] = length == 1

    def run(meanings: Meanings) -> tuple[list[Any], list[Any]]:
        op = DeltaRule(dtype=DType.F32)
        return evaluate_op(op, [q, k, v, beta, decay], [memory], valid=valid, meanings=meanings)

    (found,), (state,) = run(CPU_MEANINGS)
    (expected,), (expected_state,) = run(NO_MEANINGS)
    counts = valid.reshape(-1)
    np.testing.assert_allclose(found[counts], expected[counts], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state, expected_state, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("values", ["distinct", "ties", "masked", "nan", "nothing allowed"])
def test_the_first_of_the_largest_is_chosen(values: str, batch: int) -> None:
    logits = np.random.default_rng(2).normal(size=(batch, 33)).astype(np.float32)
    match values:
        case "ties":
            logits = np.round(logits)
        case "masked":
            logits[:, ::2] = -np.inf
        case "nan":
            logits[:, [7, 20]] = np.nan
        case "nothing allowed":
            logits[:] = -np.inf
    (found,), _ = evaluate_op(Argmax(), [logits], meanings=CPU_MEANINGS)
    np.testing.assert_array_equal(found, np.argmax(logits, axis=-1))
    assert found.dtype == np.int32
