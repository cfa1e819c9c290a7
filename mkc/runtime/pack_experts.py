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

MATRICES = 3  # of an expert: gate, up and down


@dataclass(frozen=True, kw_only=True)
class ExpertPacker:
    """Builds the entries of a mixture's arrays.

    Attributes:
      held: what an entry is.
      load: reads a tensor of the checkpoint by name; called again for every rank.
    """

    plan: ExpertPlan
    held: ExpertSlice
    sharded: ShardedGraph
    load: LoadTensor

    def entry(self, array: str, entry: int, rank: int) -> Array:
        """Entry number `entry` of one of the plan's arrays, of a rank."""
        return (self._gate_up if array == self.plan.gate_up_array else self._down)(entry, rank)

    def _gate_up(self, entry: int, rank: int) -> Array:
        matrices = [self._matrix(number, self.held.inner, entry, rank) for number in (0, 1)]
        return self._filled(np.concatenate(matrices, axis=1), self.held.gate_up)

    def _down(self, entry: int, rank: int) -> Array:
        inputs = whole(self.held.width, CODE_ROWS)
        return self._filled(self._matrix(2, inputs, entry, rank), self.held.down)

    def _matrix(self, number: int, inputs: int, entry: int, rank: int) -> Array:
        """Matrix `number` of gate, up and down as rows: those of inputs, or of their bytes."""
        each = len(self.plan.params) // MATRICES
        keys = self.plan.params[number * each : (number + 1) * each]
        tensors = [self._tensor(key, entry, rank) for key in keys]
        if self.held.dtype is DType.E2M1X2:
            return _bytes(*tensors, inputs=inputs)
        return tensors[0].T

    def _tensor(self, key: str, entry: int, rank: int) -> Array:
        """A tensor of one expert, of its width only the rank's slice: [out, in]."""
        layer, local = divmod(entry, self.plan.local)
        group, place = divmod(rank, self.plan.slices)
        name = self.sharded.full.params[key].tensor_name(layer, group * self.plan.local + local)
        return _slice(self.load(name), self.sharded.params[key], self.plan, place)

    def _filled(self, matrix: Array, shape: tuple[int, int]) -> Array:
        """The matrix with zeros around it."""
        packed = self.held.dtype is DType.E2M1X2
        filled = np.zeros(shape, np.int8 if packed else ml_dtypes.bfloat16)
        filled[: matrix.shape[0], : matrix.shape[1]] = matrix.view(np.int8) if packed else matrix
        return filled


def _slice(tensor: Array, sharding: Sharding, plan: ExpertPlan, place: int) -> Array:
    """A tensor of one expert along the axis of its width."""
    if plan.slices == 1:
        return tensor
    width = sharding.inner or sharding
    assert width.axis is not None, f"{plan.name}: not divided"
    axis = width.axis - 1  # a tensor is one entry of the stack
    size = tensor.shape[axis] // plan.slices
    return np.take(tensor, range(place * size, (place + 1) * size), axis=axis)


def _bytes(codes: Array, scales: Array, *, inputs: int) -> Array:
    """Codes [out, in / 2] and scales [out, in / 32] as rows of bytes: codes of `inputs` inputs,
    those that are missing zero, then scales."""
    padded = np.zeros((inputs // CODES_PER_BYTE, codes.shape[0]), np.uint8)
    padded[: codes.shape[1]] = codes.T
    return np.concatenate([padded, scales.T.astype(np.uint8)], axis=0)
