"""The optimiser of the training example: Muon for matrices, Adam for everything else.

Muon (Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks") replaces the
momentum of a matrix by the nearest orthogonal matrix, which five steps of a Newton-Schulz iteration
find well enough. Its coefficients are those of that text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
SMALLEST_MATRIX = 16  # rows and columns; thinner ones are as good as vectors

TABLES = (
    "embed",
    "codebook",
    "lm_head",
    "markov",
)  # in the names of matrices with a row for each token

type Arrays = dict[str, Array]


@dataclass(frozen=True, kw_only=True)
class Optimiser:
    """Attributes:
    matrix_rate: learning rate of Muon.
    other_rate: learning rate of Adam.
    momentum: of Muon.
    betas: decay of Adam's two means.
    """

    matrix_rate: float = 0.02
    other_rate: float = 0.004
    momentum: float = 0.95
    betas: tuple[float, float] = (0.9, 0.98)
    epsilon: float = 1e-8

    def initial(self, weights: Mapping[str, Array]) -> dict[str, Arrays]:
        """Means of gradients, `first` and `second`, both zero."""
        others = {key: one for key, one in weights.items() if not is_matrix(key, one)}
        return {
            "first": {key: jnp.zeros_like(one) for key, one in weights.items()},
            "second": {key: jnp.zeros_like(one) for key, one in others.items()},
        }

    def update(
        self,
        weights: Arrays,
        gradients: Arrays,
        means: dict[str, Arrays],
        step: Array,
        share: Array,
    ) -> tuple[Arrays, dict[str, Arrays]]:
        """New weights and means.

        Args:
          step: steps done before, i32.
          share: of the learning rates, f32.
        """
        first: Arrays = {}
        second: Arrays = {}
        new: Arrays = {}
        for key, weight in weights.items():
            gradient = gradients[key]
            if is_matrix(key, weight):
                first[key] = self.momentum * means["first"][key] + gradient
                ahead = gradient + self.momentum * first[key]
                taller = max(1.0, weight.shape[-2] / weight.shape[-1]) ** 0.5
                change = self.matrix_rate * taller * orthogonal(ahead)
            else:
                a, b = self.betas
                first[key] = a * means["first"][key] + (1 - a) * gradient
                second[key] = b * means["second"][key] + (1 - b) * gradient**2
                count = step.astype(jnp.float32) + 1
                mean, square = first[key] / (1 - a**count), second[key] / (1 - b**count)
                change = self.other_rate * mean / (jnp.sqrt(square) + self.epsilon)
            new[key] = weight - share * change
        return new, {"first": first, "second": second}


def is_matrix(key: str, weight: Array) -> bool:
    """Whether Muon moves it: the matrices of the layers, [.., N, K], but no tables."""
    if weight.ndim < 2 or any(table in key for table in TABLES):
        return False
    return min(weight.shape[-2:]) >= SMALLEST_MATRIX


def orthogonal(matrix: Array) -> Array:
    """Nearly the nearest matrix with singular values of 1: [.., N, K]."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = jnp.swapaxes(matrix, -1, -2) if tall else matrix
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(-1, -2), keepdims=True)) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return jnp.swapaxes(x, -1, -2) if tall else x


def global_norm(gradients: Arrays) -> Array:
    """Euclidean norm of all gradients together, f32 []."""
    return jnp.sqrt(sum(jnp.sum(one * one) for one in jax.tree.leaves(gradients)))
