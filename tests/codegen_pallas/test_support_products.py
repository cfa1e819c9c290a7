"""Products of f32 matrices by pieces: as exact as f32 sums of f32 products."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mkc.codegen_pallas.support.products import few_by_many
from mkc.codegen_pallas.support.products import over_few_rows
from mkc.codegen_pallas.support.products import over_lanes_of_few
from mkc.codegen_pallas.support.products import pieces


def test_pieces_are_bf16_numbers_and_lose_nothing() -> None:
    x = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    x[0, :3] = [0.0, -0.0, 1.0]
    parts = [np.asarray(one) for one in pieces(jnp.asarray(x))]
    for part in parts:
        np.testing.assert_array_equal(part, part.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(sum(part.astype(np.float64) for part in parts), x)


@pytest.mark.parametrize(
    ("product", "left", "right", "equation"),
    [
        pytest.param(few_by_many, (16, 128), (128, 128), "mk,kn->mn", id="few by many"),
        pytest.param(over_few_rows, (8, 128), (8, 384), "km,kn->mn", id="over few rows"),
        pytest.param(over_lanes_of_few, (16, 128), (8, 128), "mk,nk->mn", id="over lanes of few"),
    ],
)
def test_products(
    product: Callable[[jax.Array, jax.Array], jax.Array],
    left: tuple[int, int],
    right: tuple[int, int],
    equation: str,
) -> None:
    random = np.random.default_rng(1)
    a, b = (random.normal(size=shape).astype(np.float32) for shape in (left, right))
    exact = np.einsum(equation, a.astype(np.float64), b.astype(np.float64))
    size = np.einsum(equation, abs(a).astype(np.float64), abs(b).astype(np.float64))
    found = np.asarray(product(jnp.asarray(a), jnp.asarray(b)))
    assert (abs(found - exact) / size).max() < 2**-22
    plain = np.einsum(
        equation, *(one.astype(ml_dtypes.bfloat16).astype(np.float64) for one in (a, b))
    )
    assert (abs(plain - exact) / size).max() > 2**-12  # what bf16 alone would give


def test_a_product_of_numbers_with_all_bits_set() -> None:
    """Each of the eight products of pieces counts: without the smallest it would be 2^-23 off."""
    number = np.float32(2 - 2**-23)
    row = jnp.full((1, 1), number)
    for product in (few_by_many, over_few_rows, over_lanes_of_few):
        found = np.asarray(product(row, row), np.float64)[0, 0]
        assert abs(found / np.float64(number) ** 2 - 1) < 2**-24
