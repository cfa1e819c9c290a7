"""The reference meaning of one operation of a round, for the tests of the support functions."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from mkc.ir import reference_experts
from mkc.ir import reference_markov
from mkc.ir import reference_mixing
from mkc.ir import reference_spec
from mkc.ir.facets import REFERENCE
from mkc.ir.ops import Op
from mkc.ir.reference_ops import OpContext
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis

# Each registers its operations.
assert reference_experts and reference_markov and reference_mixing and reference_spec


def meaning(
    op: Op,
    operands: Sequence[np.ndarray],
    states: Sequence[np.ndarray] = (),
    *,
    positions: np.ndarray | None = None,
    batch: int = 1,
    dtype: DType = DType.BF16,
    shape: Sequence[int] = (),
    operand_dtype: DType = DType.BF16,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Results and new states; `dtype` is that of a rounded result.

    Args:
      positions: i32 [batch * T], negative ones are padding; None when no row is.
      shape: of the result, for operations that ask.
      operand_dtype: of the first operand, for operations that round to it.
    """
    function = REFERENCE.find(op)
    assert function is not None, f"{op} has no meaning"
    valid = None if positions is None else jnp.asarray(positions).reshape(batch, -1) >= 0
    context = OpContext(
        rounding="reference",
        operand_types=(TensorType(dtype=operand_dtype, axes=()),),
        result_types=(TensorType(dtype=dtype, axes=tuple(map(axis, shape))),),
        valid=valid,
    )
    arrays = [jnp.asarray(one) for one in operands]
    results, new = function(op, tuple(arrays), tuple(jnp.asarray(one) for one in states), context)
    return [np.asarray(one) for one in results], [np.asarray(one) for one in new]


def rows_of(firsts: Sequence[int], real: Sequence[int], rows: int) -> np.ndarray:
    """Positions i32 [batch * rows] of sequences with so many real rows; none for a negative one."""
    found = np.full((len(firsts), rows), -1, np.int32)
    for sequence, (first, number) in enumerate(zip(firsts, real, strict=True)):
        if first >= 0:
            found[sequence, :number] = first + np.arange(number)
    return found.reshape(-1)


def padded(rows: np.ndarray) -> np.ndarray:
    """Zero rows behind the last one, up to a multiple of 8."""
    missing = -len(rows) % 8
    return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
