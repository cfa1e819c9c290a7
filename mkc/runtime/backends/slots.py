"""What one slot remembers: taken out of a kernel's state operands and put back, on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mkc.ir.graph import StateKind
from mkc.runtime.placement import place_local_part
from mkc.runtime.shards import Array

CACHE_ROWS = 2  # the axis of positions in a cache

type Parts = dict[str, jax.Array]  # of one slot by operand, [ranks * instances, ...]


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
    _takes: dict[int, jax.stages.Wrapped] = field(default_factory=dict)

    def is_cache(self, name: str) -> bool:
        """Whether an operand has a row per position."""
        return self.kinds[name] is StateKind.KV_CACHE

    def take(self, rows: int) -> jax.stages.Wrapped:
        """(operands, slot, start) -> parts, with `rows` rows of each cache from `start` on."""
        if rows not in self._takes:

            def take(operands: Parts, slot: jax.Array, start: jax.Array) -> Parts:
                return {
                    name: self._part(name, operands[name], slot, start, rows) for name in operands
                }

            self._takes[rows] = jax.jit(take)
        return self._takes[rows]

    @cached_property
    def put(self) -> jax.stages.Wrapped:
        """(operands, slot, start, parts) -> operands, changed in place."""

        def put(operands: Parts, slot: jax.Array, start: jax.Array, parts: Parts) -> Parts:
            return {
                name: self._changed(name, operands[name], slot, start, parts[name])
                for name in operands
            }

        return jax.jit(put, donate_argnums=0)

    @cached_property
    def clear(self) -> jax.stages.Wrapped:
        """(operands, slot) -> operands, changed in place: the slot remembers nothing.

        Caches stay: a sequence sees no row that it has not written.
        """

        def clear(operands: Parts, slot: jax.Array) -> Parts:
            return {
                name: operand if self.is_cache(name) else self._zeroed(name, operand, slot)
                for name, operand in operands.items()
            }

        return jax.jit(clear, donate_argnums=0)

    def place(self, parts: Mapping[str, Array]) -> Parts:
        """What a process holds of parts, on its devices: divided over ranks like their operands."""
        sharding = NamedSharding(self.mesh, PartitionSpec(*self.mesh.axis_names))
        return {name: place_local_part(part, sharding) for name, part in parts.items()}

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

    def _zeroed(self, name: str, operand: jax.Array, slot: jax.Array) -> jax.Array:
        whole, axis = self._by_slot(name, operand), self._axis(name)
        zeros = jnp.zeros((*whole.shape[:axis], *whole.shape[axis + 1 :]), whole.dtype)
        return self._changed(name, operand, slot, jnp.int32(0), zeros)

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
