"""What layers show to a drafter, while a prompt is read; see `mkc.ir.ops_spec.Tap`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.graph import Graph
from mkc.ir.graph import StateKind
from mkc.ir.ops_spec import ReadTaps
from mkc.ir.reference_ops import storage_dtype
from mkc.runtime.prefill_state import Memory


@dataclass(frozen=True, kw_only=True)
class TapAccess:
    """One state of taps: an array [places, rows, width] of the memory of a walk.

    Attributes:
      array: its name.
      width: of one row.
      dtype: of the array.
      places: place of every instance; those that nobody reads share the last place.
    """

    array: str
    width: int
    dtype: jnp.dtype
    places: tuple[int, ...]

    def empty(self, rows: int) -> Array:
        """Before anything is shown."""
        return jnp.zeros((max(self.places) + 1, rows, self.width), self.dtype)

    def write(self, memory: Memory, instance: Array, shown: Array) -> None:
        """Keeps `shown` [rows, width] of one instance."""
        place = jnp.asarray(self.places, jnp.int32)[instance]
        one = shown[None].astype(self.dtype)
        memory[self.array] = lax.dynamic_update_slice(memory[self.array], one, (place, 0, 0))

    def read(self, memory: Memory, instance: int) -> Array:
        """[rows, width] of an instance that is read."""
        return memory[self.array][self.places[instance]]


def tap_access(graph: Graph) -> dict[str, TapAccess]:
    """Access to the taps of a graph, by state key."""
    found = {}
    for key, state in graph.states.items():
        if state.kind is not StateKind.TAP:
            continue
        read = {
            instance
            for node in graph.body.nodes()
            if isinstance(node.op, ReadTaps)
            for number, instance in zip(node.op.numbers, node.op.instances, strict=True)
            if node.states[number] == key
        }
        (width,) = state.type.shape
        found[key] = TapAccess(
            array=f"taps of {key}",
            width=width,
            dtype=storage_dtype(state.type.dtype, "reference"),
            places=_places(sorted(read), state.instances),
        )
    return found


def _places(read: Sequence[int], instances: int) -> tuple[int, ...]:
    """Instances that are read, in order, then one place for all others."""
    known = {instance: place for place, instance in enumerate(read)}
    return tuple(known.get(instance, len(read)) for instance in range(instances))
