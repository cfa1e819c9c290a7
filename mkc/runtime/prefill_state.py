"""States in kernel layout, read and written inside a compiled function.

`mkc.runtime.state` converts whole states on the host; here one instance and a few sequences are
sliced out of a kernel operand and put back, which XLA does in place.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.graph import State
from mkc.ir.graph import StateKind

type Memory = dict[str, Array]  # state operands of one rank by name


@dataclass(frozen=True, kw_only=True)
class StateAccess:
    """One state of one rank.

    Attributes:
      state: with the rank's local type.
      array: the operand.
      batch: sequences that the operand holds.
    """

    state: State
    array: str
    batch: int

    def read(self, memory: Memory, instance: Array, slots: Array) -> Array:
        """[L, ...] of the sequences `slots`, i32 [L]."""
        parts = [
            self._part(memory[self.array], instance, slots[lane]) for lane in range(len(slots))
        ]
        return jnp.stack(parts)

    def _part(self, operand: Array, instance: Array, slot: Array) -> Array:
        sizes = (1, *operand.shape[1:])
        shape = self.state.type.shape
        if self.state.kind is StateKind.CONV:
            _, taps, _, channels = operand.shape
            place = (instance, 0, slot, 0)
            return lax.dynamic_slice(operand, place, (1, taps, 1, channels)).reshape(shape)
        if self.state.kind is StateKind.RECURRENT:
            place = (instance * self.batch + slot, 0, 0)
            return lax.dynamic_slice(operand, place, sizes).reshape(shape)
        sizes = (1, 1, *operand.shape[2:])
        return lax.dynamic_slice(operand, (instance, slot, 0, 0), sizes).reshape(shape)

    def write(self, memory: Memory, instance: Array, slots: Array, new: Array) -> None:
        """Replaces what `read` gives; `memory` gets the changed operand."""
        operand = memory[self.array]
        for lane in range(len(slots)):
            operand = self._replaced(operand, instance, slots[lane], new[lane])
        memory[self.array] = operand

    def _replaced(self, operand: Array, instance: Array, slot: Array, new: Array) -> Array:
        new = new.astype(operand.dtype)
        if self.state.kind is StateKind.CONV:
            _, taps, _, channels = operand.shape
            part = new.reshape(1, taps, 1, channels)
            return lax.dynamic_update_slice(operand, part, (instance, 0, slot, 0))
        if self.state.kind is StateKind.RECURRENT:
            part = new.reshape(1, *operand.shape[1:])
            return lax.dynamic_update_slice(operand, part, (instance * self.batch + slot, 0, 0))
        part = new.reshape(1, 1, *operand.shape[2:])
        return lax.dynamic_update_slice(operand, part, (instance, slot, 0, 0))
