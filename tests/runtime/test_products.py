"""The products of the reference backend are those of the reference evaluator, summed otherwise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkc
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.ir.reference import NO_MEANINGS
from mkc.ir.reference import Meanings
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from mkc.runtime.products import BF16_PRODUCTS

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

    found, expected = logits(BF16_PRODUCTS), logits(NO_MEANINGS)
    ulp = np.abs(expected) * 2.0**-7  # of a logit in bf16, in which they are returned
    assert (np.abs(found - expected) <= np.maximum(ulp, LARGEST_ERROR)).all()
    assert expected.std() > 1.0
