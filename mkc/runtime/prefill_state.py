"""States in kernel layout, read and written inside a compiled function.

`mkc.runtime.state` converts whole states on the host; here one instance and a few sequences are
sliced out of a kernel operand and put back, which XLA does in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.graph import State
from mkc.ir.graph import StateKind
from mkc.passes.pipeline import Lowered
from mkc.runtime.state import StateLayout

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
        if self.state.kind is StateKind.KEPT:
            return self._kept_rows(operand, instance, slot)
        part = lax.dynamic_slice(operand, self._place(instance, slot), self._part_shape(operand))
        return part.reshape(self.state.type.shape)

    def _kept_rows(self, operand: Array, instance: Array, slot: Array) -> Array:
        """T rows, whose order is (instance, sequence, row); zeros may stand behind their lanes."""
        rows, *rest = self.state.type.shape
        lanes = operand.shape[-1]
        first = (instance * self.batch + slot) * rows
        part = lax.dynamic_slice(operand.reshape(-1, lanes), (first, 0), (rows, lanes))
        return part[:, : prod(rest)].reshape(self.state.type.shape)

    def _place(self, instance: Array, slot: Array) -> tuple[Array | int, ...]:
        """Where the part of one sequence begins in the operand."""
        if self.state.kind is StateKind.CONV:  # [instances, taps - 1, sequences, channels]
            return (instance, 0, slot, 0)
        if self.state.kind is StateKind.RECURRENT:  # [instances * sequences, ...]
            return (instance * self.batch + slot, 0, 0)
        return (instance, slot, 0, 0)  # [instances, sequences, context, width]

    def _part_shape(self, operand: Array) -> tuple[int, ...]:
        if self.state.kind is StateKind.CONV:
            _, taps, _, channels = operand.shape
            return (1, taps, 1, channels)
        if self.state.kind is StateKind.RECURRENT:
            return (1, *operand.shape[1:])
        return (1, 1, *operand.shape[2:])

    def write(self, memory: Memory, instance: Array, slots: Array, new: Array) -> None:
        """Replaces what `read` gives; `memory` gets the changed operand. Not for kept rows."""
        operand = memory[self.array]
        for lane in range(len(slots)):
            part = new[lane].astype(operand.dtype).reshape(self._part_shape(operand))
            operand = lax.dynamic_update_slice(operand, part, self._place(instance, slots[lane]))
        memory[self.array] = operand


def state_access(lowered: Lowered) -> dict[str, StateAccess]:
    """Access to every state that a kernel remembers, by key."""
    layout = StateLayout.of(lowered)
    return {
        key: StateAccess(state=one, array=layout.operand_of(key), batch=lowered.program.batch)
        for key, one in lowered.steps.sharded.graph.states.items()
        if one.kind is not StateKind.TAP
    }
