"""One op by itself: its inferred types, and what the reference evaluator makes of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mkc.ir.facets import REFERENCE
from mkc.ir.infer import infer
from mkc.ir.ops import Op
from mkc.ir.reference import NO_MEANINGS
from mkc.ir.reference import Meanings
from mkc.ir.reference import OpContext
from mkc.ir.reference import Rounding
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import tensor

type Arrays = Sequence[NDArray[Any]]

F32, I32 = DType.F32, DType.I32
RANDOM = np.random.default_rng(11)


def type_of(array: NDArray[Any]) -> TensorType:
    return tensor(I32 if array.dtype.kind == "i" else F32, *array.shape)


def evaluate_op(
    op: Op,
    operands: Arrays,
    states: Arrays = (),
    *,
    valid: Any = None,
    types: Sequence[TensorType] | None = None,
    rounding: Rounding = "float32",
    meanings: Meanings = NO_MEANINGS,
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Results and new states.

    Args:
      states: [batch, ...].
      valid: bool [batch, rows / batch].
      types: of the operands, where the arrays do not tell.
      meanings: functions that compute the same, instead of the reference evaluator's.
    """
    operand_types = tuple(types or map(type_of, operands))
    state_types = tuple(type_of(one[0]) for one in states)
    result_types = infer(op, operand_types, state_types)
    context = OpContext(
        rounding=rounding,
        operand_types=operand_types,
        result_types=result_types,
        valid=None if valid is None else jnp.asarray(valid),
    )
    function = meanings.get(type(op)) or REFERENCE.find(op)
    assert function is not None
    given = tuple(map(jnp.asarray, operands)), tuple(map(jnp.asarray, states))
    results, new = jax.jit(lambda *arrays: function(op, *arrays, context))(*given)
    assert [one.shape for one in results] == [one.shape for one in result_types]
    assert [one.shape for one in new] == [one.shape for one in states]
    return [np.asarray(one) for one in results], [np.asarray(one) for one in new]


def normal(*shape: int) -> NDArray[np.float32]:
    return RANDOM.normal(size=shape).astype(np.float32)


def numbers(*values: Any) -> NDArray[np.int32]:
    return np.array(values, np.int32)
