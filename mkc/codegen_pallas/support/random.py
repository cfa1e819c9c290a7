"""The random numbers of `mkc.ir.counter_random`, on vectors of signed words.

Sums, rotations and exclusive ors have the same bits with and without a sign, and vectors of
unsigned words crash a core. So every number is bit for bit that of the reference.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from mkc.codegen_pallas.support.refs import Scalar
from mkc.ir.counter_random import INDEX_BITS
from mkc.ir.counter_random import PARITY
from mkc.ir.counter_random import ROTATIONS

HALF_WORD = 16
HALF_MASK = (1 << HALF_WORD) - 1

type Word = Scalar
"""i32 words: a scalar or a vector; operands broadcast."""


def threefry(key: tuple[Word, Word], counter: tuple[Word, Word]) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds: two random words i32."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            x = x + y
            y = x ^ _rotated(y, distance)
        x = x + keys[(group + 1) % 3]
        y = y + (keys[(group + 2) % 3] + (group + 1))
    return x, y


def uniform(seed: tuple[Word, Word], position: Word, stream: int, index: Word) -> jax.Array:
    """f32, from 0 up to below 1; see `mkc.ir.counter_random.uniform`.

    Args:
      seed: low and high word.
    """
    first, _ = threefry(seed, (position, index + (stream << INDEX_BITS)))
    return _shifted(first, 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def exponential(seed: tuple[Word, Word], position: Word, stream: int, index: Word) -> jax.Array:
    """f32 with mean 1; see `mkc.ir.counter_random.exponential`."""
    first, second = threefry(seed, (position, index + (stream << INDEX_BITS)))
    v = _magnitude(first) * jnp.float32(2.0**-32)
    v = v + (_magnitude(second) + 0.5) * jnp.float32(2.0**-64)
    return -jnp.log1p(-jnp.minimum(v, jnp.float32(1 - 2.0**-24)))


def _rotated(word: Word, distance: int) -> jax.Array:
    rotated: jax.Array = (word << distance) | _shifted(word, 32 - distance)
    return rotated


def _shifted(word: Word, distance: int) -> jax.Array:
    """The word shifted to the right, zeros from the left."""
    shifted: jax.Array = lax.shift_right_logical(word, jnp.full_like(word, distance))
    return shifted


def _magnitude(word: jax.Array) -> jax.Array:
    """The word as a number without a sign, rounded to f32 once: both halves are exact."""
    high = _shifted(word, HALF_WORD).astype(jnp.float32)
    return high * jnp.float32(1 << HALF_WORD) + (word & HALF_MASK).astype(jnp.float32)
