"""Matrices of experts as a kernel reads them: one entry for each layer and expert of a rank.

Inputs are rows and outputs columns. Of 4-bit matrices a byte holds the codes of two inputs, the
even one in its low bits, as in the checkpoint; rows of scales stand behind those of codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mkc.ir.mxfp4 import CODES_PER_BYTE
from mkc.ir.types import DType
from mkc.passes.sharding import ShardedGraph
from mkc.passes.sharding import Sharding
from mkc.schedule.expert_store import CODE_ROWS
from mkc.schedule.expert_store import ExpertPlan
from mkc.schedule.expert_store import ExpertSlice
from mkc.schedule.expert_store import whole

type Array = NDArray[Any]
type LoadTensor = Callable[[str], Array]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An expert of one layer and rank: gate beside up, and down, as the kernel's arrays hold it."""

    gate_up: Array
    down: Array


def expert_entry(
    plan: ExpertPlan,
    held: ExpertSlice,
    sharded: ShardedGraph,
    load: LoadTensor,
    *,
    entry: int,
    rank: int,
) -> Entry:
    """Entry number `entry` of a rank's arrays."""
    layer, local = divmod(entry, plan.local)
    group, place = divmod(rank, plan.slices)
    expert = group * plan.local + local

    def tensor(key: str) -> Array:
        """One matrix of the expert, of its width only this rank's slice: [out, in]."""
        param = sharded.full.params[key]
        name = param.tensor_names()[layer * param.type.shape[0] + expert]
        return _slice(load(name), sharded.params[key], plan, place)

    tensors = [tensor(key) for key in plan.params]
    if held.dtype is DType.E2M1X2:
        gate, up, down = (
            _packed(*tensors[at : at + 2], rows=rows)
            for at, rows in ((0, held.inner), (2, held.inner), (4, whole(held.width, CODE_ROWS)))
        )
        dtype: Any = np.int8
    else:
        gate, up, down = (one.T for one in tensors)
        dtype = ml_dtypes.bfloat16
    both = np.concatenate([gate, up], axis=1)
    return Entry(gate_up=_filled(both, held.gate_up, dtype), down=_filled(down, held.down, dtype))


def _slice(tensor: Array, sharding: Sharding, plan: ExpertPlan, place: int) -> Array:
    """A tensor of one expert along the axis of its width."""
    if plan.slices == 1:
        return tensor
    width = sharding.inner or sharding
    assert width.axis is not None, f"{plan.name}: not divided"
    axis = width.axis - 1  # a tensor is one entry of the stack
    size = tensor.shape[axis] // plan.slices
    return np.take(tensor, range(place * size, (place + 1) * size), axis=axis)


def _packed(codes: Array, scales: Array, *, rows: int) -> Array:
    """Codes [out, in / 2] and scales [out, in / 32] as rows of bytes: codes of `rows` inputs, those
    that are missing zero, then scales."""
    padded = np.zeros((rows // CODES_PER_BYTE, codes.shape[0]), np.uint8)
    padded[: codes.shape[1]] = codes.T
    return np.concatenate([padded, scales.T.astype(np.uint8)], axis=0)


def _filled(matrix: Array, shape: tuple[int, int], dtype: Any) -> Array:
    """The matrix with zeros around it."""
    filled = np.zeros(shape, dtype)
    bits = matrix.view(np.int8) if dtype is np.int8 else matrix.astype(dtype)
    filled[: matrix.shape[0], : matrix.shape[1]] = bits
    return filled
