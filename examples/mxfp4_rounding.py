"""Matrices of experts in MXFP4 while they are trained: rounded in the forward pass, then encoded.

A group's scale is the smallest power of two with which its largest value is no larger than the
largest code, so nothing is cut off.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from mkc.ir.mxfp4 import GROUP
from mkc.ir.mxfp4 import LARGEST_SCALE
from mkc.ir.mxfp4 import LEAST_SCALE
from mkc.ir.mxfp4 import MAGNITUDES
from mkc.ir.mxfp4 import SCALE_BIAS

BETWEEN = [(low + high) / 2 for low, high in zip(MAGNITUDES, MAGNITUDES[1:], strict=False)]
SIGN = 8  # bit of a code


def nearest(values: Array) -> tuple[Array, Array]:
    """Indices in MAGNITUDES, i32 [.., K], and exponents of the groups, i32 [.., K / 32].

    Args:
      values: f32 [.., K].
    """
    groups = jnp.abs(values.reshape(*values.shape[:-1], -1, GROUP))
    largest = jnp.max(groups, axis=-1) / MAGNITUDES[-1]
    exponents = jnp.ceil(jnp.log2(jnp.maximum(largest, 2.0 ** (LEAST_SCALE - SCALE_BIAS))))
    scaled = groups * jnp.exp2(-exponents)[..., None]
    places = sum((scaled > one).astype(jnp.int32) for one in BETWEEN)
    return jnp.asarray(places).reshape(values.shape), exponents.astype(jnp.int32)


def rounded(values: Array) -> Array:
    """The values that are stored for f32 [.., K]."""
    places, exponents = nearest(values)
    magnitudes = jnp.asarray(MAGNITUDES, jnp.float32)[places].reshape(*exponents.shape, GROUP)
    scaled = magnitudes * jnp.exp2(exponents.astype(jnp.float32))[..., None]
    return jnp.copysign(scaled.reshape(values.shape), values)


def encoded(values: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Codes [.., K / 2], the even column in the low bits, and scale bytes [.., K / 32]."""
    places, exponents = nearest(jnp.asarray(values, jnp.float32))
    codes = np.asarray(places) | np.where(np.signbit(values), SIGN, 0)
    pairs = codes[..., 0::2] | codes[..., 1::2] << 4
    scales = np.asarray(exponents) + SCALE_BIAS
    assert scales.min() >= LEAST_SCALE and scales.max() <= LARGEST_SCALE, "weights out of bounds"
    return pairs.astype(np.uint8), scales.astype(np.uint8)
