"""What one slot remembers: taken out of a kernel's state operands and put back, on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mkc.ir.graph import StateKind
from mkc.runtime.shards import Array

CACHE_ROWS = 2  # the axis of positions in a cache

type Parts = dict[str, jax.Array]  # of one slot by operand, [ranks * instances, ...]
type Operands = Mapping[str, jax.Array]  # of all slots by name, divided along the first axis


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotAccess:
    """Compiled functions over the state operands; `mkc.runtime.state` has their layouts.

    Attributes:
      kinds: kind of state by operand.
      batch: slots.
    """

    mesh: Mesh
    kinds: Mapping[str, StateKind]
    batch: int
    _compiled: dict[int | None, jax.stages.Wrapped] = field(default_factory=dict)

    def is_cache(self, name: str) -> bool:
        """Whether an operand has a row per position."""
        return self.kinds[name] is StateKind.KV_CACHE

    def take(self, rows: int) -> jax.stages.Wrapped:
        """(operands, slot, start) -> parts, with `rows` rows of each cache from `start` on."""
        if rows not in self._compiled:

            def take(operands: Parts, slot: jax.Array, start: jax.Array) -> Parts:
                return {
                    name: self._part(name, operands[name], slot, start, rows) for name in operands
                }

            self._compiled[rows] = jax.jit(take)
        return self._compiled[rows]

    @property
    def put(self) -> jax.stages.Wrapped:
        """(operands, slot, start, parts) -> operands, changed in place."""
        if None not in self._compiled:

            def put(operands: Parts, slot: jax.Array, start: jax.Array, parts: Parts) -> Parts:
                return {
                    name: self._changed(name, operands[name], slot, start, parts[name])
                    for name in operands
                }

            self._compiled[None] = jax.jit(put, donate_argnums=0)
        return self._compiled[None]

    def place(self, parts: Mapping[str, Array]) -> Parts:
        """Parts on the devices, divided over the ranks like their operands."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*self.mesh.axis_names))
        return {name: jax.device_put(part, sharding) for name, part in parts.items()}

    def zeros(self, operands: Operands, rows: int) -> Parts:
        """The parts of a slot that remembers nothing."""
        shapes = jax.eval_shape(self.take(rows), dict(operands), 0, 0)
        return self.place({name: np.zeros(one.shape, one.dtype) for name, one in shapes.items()})

    def _part(
        self, name: str, operand: jax.Array, slot: jax.Array, start: jax.Array, rows: int
    ) -> jax.Array:
        whole = self._by_slot(name, operand)
        place, sizes = self._place(name, whole, slot, start), list(whole.shape)
        sizes[self._axis(name)] = 1
        if self.is_cache(name):
            sizes[CACHE_ROWS] = rows
        return jnp.squeeze(lax.dynamic_slice(whole, place, sizes), self._axis(name))

    def _changed(
        self, name: str, operand: jax.Array, slot: jax.Array, start: jax.Array, part: jax.Array
    ) -> jax.Array:
        whole = self._by_slot(name, operand)
        place = self._place(name, whole, slot, start)
        changed = lax.dynamic_update_slice(whole, jnp.expand_dims(part, self._axis(name)), place)
        return changed.reshape(operand.shape)

    def _place(
        self, name: str, whole: jax.Array, slot: jax.Array, start: jax.Array
    ) -> list[jax.Array]:
        """Where the slot's part begins in `_by_slot`."""
        place = [jnp.int32(0)] * whole.ndim
        place[self._axis(name)] = jnp.int32(slot)
        if self.is_cache(name):
            place[CACHE_ROWS] = jnp.int32(start)
        return place

    def _axis(self, name: str) -> int:
        """The axis of slots in `_by_slot`."""
        return 2 if self.kinds[name] is StateKind.CONV else 1

    def _by_slot(self, name: str, operand: jax.Array) -> jax.Array:
        """The operand with an axis of slots; recurrent states have it inside their first one."""
        if self.kinds[name] is not StateKind.RECURRENT:
            return operand
        return operand.reshape(-1, self.batch, *operand.shape[1:])
