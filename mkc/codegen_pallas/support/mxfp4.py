"""Products with matrices in MXFP4, which go to the matrix unit as they lie.

The unit multiplies bf16 by 4-bit floats. A power of two belongs to 32 rows of a matrix in one
column (`mkc.ir.mxfp4`), so these must not be added to others before it. For that the left side is
spread: of each of its rows there are as many copies as there are groups, each with the columns of
one group and zeros elsewhere. Then every group has a row of the product for itself, which its
powers multiply. That is exact, and the copies are free: the unit loads a matrix in the time it
takes to multiply it with many rows.

A matrix [K, N] is one array of bytes: K / 2 rows of codes, row r with those of rows 2 r (low bits)
and 2 r + 1, then K / 32 rows of exponents, then padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.vector import join
from mkc.ir.mxfp4 import CODES_PER_BYTE
from mkc.ir.mxfp4 import GROUP

BLOCK = SUBLANES * GROUP  # rows of a matrix that are multiplied at once
BYTE_ROWS = 32  # of a tile of bytes
CODE_ROWS = 64  # of a tile of codes
COLUMNS = 512  # that a product is formed for at once: what fits in registers
F32_EXPONENT = 23  # first bit of the exponent of f32


type Left = jax.Array | Ref
"""A block of a left side: bf16 `[groups * r, columns]`, a value or in VMEM."""


def packed_rows(K: int) -> int:
    """Rows of bytes of a matrix with `K` rows."""
    return -(-(K // CODES_PER_BYTE + K // GROUP) // BYTE_ROWS) * BYTE_ROWS


def spread(x: jax.Array) -> list[jax.Array]:
    """The left side of a product, for each `BLOCK` columns or less, of `[r, K]` f32.

    Row g * r + i of a block is row i of `x` in the columns of group g, and zero elsewhere.

    Args:
      x: bf16 numbers; r is 1 or a multiple of 8, K a multiple of 64.

    Returns:
      bf16 `[groups * r, columns]`, groups rounded up to 8 where r is 1.
    """
    rows, width = x.shape
    assert rows == 1 or rows % SUBLANES == 0, f"{rows} rows fill no register"
    assert width % CODE_ROWS == 0, f"{width} rows of a matrix are no tiles of {CODE_ROWS}"
    blocks = []
    for start in range(0, width, BLOCK):
        part = x[:, start : min(start + BLOCK, width)]
        groups = part.shape[1] // GROUP
        if rows == 1:
            shape = (SUBLANES, part.shape[1])
            mine = lax.broadcasted_iota(jnp.int32, shape, 1) // GROUP
            here = mine == lax.broadcasted_iota(jnp.int32, shape, 0)
            block = jnp.where(here, jnp.broadcast_to(part, shape), 0.0)
        else:
            group = lax.broadcasted_iota(jnp.int32, part.shape, 1) // GROUP
            copies = [jnp.where(group == index, part, 0.0) for index in range(groups)]
            block = jnp.concatenate(copies, axis=0)
        blocks.append(block.astype(jnp.bfloat16))
    return blocks


def mxfp4_product(left: Sequence[Left], matrix: Ref) -> jax.Array:
    """`x @ matrix` f32 for `left = spread(x)`: `[r, N]`, each group's sum in f32, exact factors.

    Args:
      matrix: `[packed_rows(K), N]` int8 in VMEM, N a multiple of 128.
    """
    width = matrix.shape[1]
    parts = [
        _columns(left, matrix, start, min(COLUMNS, width - start))
        for start in range(0, width, COLUMNS)
    ]
    return join(parts)


def _columns(left: Sequence[Left], matrix: Ref, start: int, width: int) -> jax.Array:
    """The product with `width` columns from `start`."""
    sizes = [block.shape[1] for block in left]
    codes = sum(sizes) // CODES_PER_BYTE
    columns = slice(start, start + width)
    rows_left = matrix.shape[0] - codes
    exponents = matrix[codes : codes + rows_left, columns].astype(jnp.int32) & 0xFF
    factors = lax.bitcast_convert_type(exponents << F32_EXPONENT, jnp.float32)
    total, first = None, 0
    for block, size in zip(left, sizes, strict=True):
        half = slice(first // CODES_PER_BYTE, (first + size) // CODES_PER_BYTE)
        numbers = pltpu.bitcast(matrix[half, columns], jnp.float4_e2m1fn)
        products = jnp.dot(block[...], numbers, preferred_element_type=jnp.float32)
        own = factors[first // GROUP : (first + size) // GROUP]
        part = _scaled(products, own)
        total = part if total is None else total + part
        first += size
    assert total is not None
    one_row = left[0].shape[0] == SUBLANES
    return jnp.sum(total, axis=0, keepdims=True) if one_row else total


def _scaled(products: jax.Array, factors: jax.Array) -> jax.Array:
    """Products of groups times their factors `[groups, N]`.

    Of one row they remain one below the other, as many as a register has; of more rows they are
    summed: `[r, N]`.
    """
    groups = factors.shape[0]
    if products.shape[0] == SUBLANES:
        missing = SUBLANES - groups
        if missing:
            rest = jnp.zeros((missing, factors.shape[1]), jnp.float32)
            factors = jnp.concatenate([factors, rest], axis=0)
        return products * factors
    rows = products.shape[0] // groups
    total = None
    for group in range(groups):
        part = products[group * rows : (group + 1) * rows] * factors[group : group + 1]
        total = part if total is None else total + part
    assert total is not None
    return total
