"""Random numbers without a state: functions of a seed and of what they are for.

Threefry-2x32 with 20 rounds (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011): additions, rotations and exclusive ors of 32-bit words, which a vector unit has. The
key is the seed (low word, high word); the counter is (position, stream * 2^24 + index). So a number
depends neither on the rank that needs it nor on what was drawn before.

A number may be used again: a draft for a position is drawn anew when an earlier draft was rejected.
The tokens emitted until then do not depend on the numbers of later positions, so they are as good
as new.
"""

from __future__ import annotations

from typing import Final

import jax.numpy as jnp
from jax import Array

# Uses at one position; each has the numbers of all indices.
DRAFT: Final = 0  # which candidate is proposed; index is the token id
ACCEPT: Final = 1  # whether a draft is accepted; index 0
CHOICE: Final = 2  # which token is emitted where no draft is; index is the token id
INDEX_BITS: Final = 24

ROTATIONS: Final = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY: Final = 0x1BD11BDA


def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Two random words u32 of the shape of the operands, which are u32 and broadcast."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for distance in ROTATIONS[group % 2]:
            x = x + y
            y = (y << distance) | (y >> (32 - distance))
            y = x ^ y
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def words(seed: Array, position: Array, stream: int, index: Array) -> tuple[Array, Array]:
    """Random words for what stands at a position.

    Args:
      seed: i32 [..., 2], low and high word.
      position, index: i32; they broadcast with each other and with seed[..., 0].
    """
    low, high = (seed[..., n].astype(jnp.uint32) for n in range(2))
    place = index.astype(jnp.uint32) + jnp.uint32(stream << INDEX_BITS)
    return threefry((low, high), (position.astype(jnp.uint32), place))


def uniform(seed: Array, position: Array, stream: int, index: Array) -> Array:
    """f32, from 0 up to below 1, a multiple of 2^-24: the high bits of the first word."""
    first, _ = words(seed, position, stream, index)
    return (first >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def exponential(seed: Array, position: Array, stream: int, index: Array) -> Array:
    """f32, exponentially distributed with mean 1: -ln(1 - v), v of 64 bits.

    Small results, which decide a race, are exact to the relative precision of f32.
    """
    first, second = words(seed, position, stream, index)
    v = first.astype(jnp.float32) * jnp.float32(2.0**-32)
    v = v + (second.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-64)
    return -jnp.log1p(-jnp.minimum(v, jnp.float32(1 - 2.0**-24)))


def race(probability: Array, seed: Array, position: Array, stream: int, ids: Array) -> Array:
    """Draws from a distribution: the place of the smallest exponential(id) / probability.

    Every token has its own number, so a distribution that is spread over ranks is drawn from with
    one comparison, and the result does not depend on how it is spread.

    Args:
      probability: f32 [..., n], 0 where a token cannot be drawn; need not sum to 1.
      seed, position: i32 [..., 2] and [...].
      ids: i32 [..., n] or [n], token ids.

    Returns:
      i32 [...], the lowest place on ties.
    """
    times = exponential(seed[..., None, :], position[..., None], stream, ids)
    return jnp.argmin(jnp.where(probability > 0, times / probability, jnp.inf), axis=-1).astype(
        jnp.int32
    )
