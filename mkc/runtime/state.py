"""States of a graph as the operands of a kernel, and back.

In a graph a state is [instances, batch, ...] with the author's axes; in a kernel it is divided over
the ranks and laid out for its stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import ml_dtypes
import numpy as np

from mkc.ir.graph import StateKind
from mkc.passes.pipeline import Lowered
from mkc.passes.sharding import ShardedGraph
from mkc.passes.streams import Streams
from mkc.runtime.pack import DTYPES
from mkc.runtime.shards import Array
from mkc.runtime.shards import join_shards
from mkc.runtime.shards import take_shard
from mkc.schedule.program import Operand
from mkc.schedule.program import Program


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Converts states between the graph's form and the kernel's.

    Attributes:
      streams: which stream or cache holds which state.
    """

    program: Program
    sharded: ShardedGraph
    streams: Streams

    @classmethod
    def of(cls, lowered: Lowered) -> StateLayout:
        """Of a kernel."""
        return cls(
            program=lowered.program,
            sharded=lowered.steps.sharded,
            streams=lowered.residency.streams,
        )

    def operand_of(self, key: str) -> str:
        """Name of the operand that holds a state."""
        if key in self.streams.state_of:
            name = self.streams.state_of[key]
            return next(one.array for one in self.streams.streams if one.name == name)
        for key_state, name in self.streams.cache_of.items():
            cache = next(one for one in self.streams.caches if one.name == name)
            if key == key_state:
                return cache.key_array
            if key == self.streams.value_of[key_state]:
                return cache.value_array
        raise KeyError(key)

    def _operand(self, key: str) -> Operand:
        name = self.operand_of(key)
        return next(one for one in self.program.operands if one.name == name)

    def to_kernel(self, key: str, state: Array, rank: int) -> Array:
        """One rank's operand from a state [instances, batch, ...] of all sequences."""
        full = self.sharded.full.states[key]
        sharding = self.sharded.states[key]
        local = np.stack(
            [
                np.stack([take_shard(one, full.type, sharding, rank) for one in instance])
                for instance in state
            ]
        )
        if full.kind is StateKind.CONV:
            batch = local.shape[1]
            padded = np.zeros(self._operand(key).shape, ml_dtypes.bfloat16)
            padded[:, :, :batch] = local.transpose(0, 2, 1, 3)
            return padded
        if full.kind is StateKind.RECURRENT:
            instances, batch, heads, keys, values = local.shape
            return local.reshape(instances * batch, heads * keys, values).astype(np.float32)
        if full.kind is StateKind.KEPT:
            return self._kept_rows(key, local)
        flat = local.reshape(*local.shape[:3], -1)
        padded = np.zeros(self._operand(key).shape, ml_dtypes.bfloat16)
        padded[..., : flat.shape[-1]] = flat
        return padded

    def _kept_rows(self, key: str, local: Array) -> Array:
        """Rows [instances, batch, T, ...] as the operand: the rest as lanes, zeros behind them."""
        operand = self._operand(key)
        flat = local.reshape(*local.shape[:3], -1)
        padded = np.zeros((*flat.shape[:3], operand.shape[-1]), DTYPES[operand.dtype])
        padded[..., : flat.shape[-1]] = flat
        return padded.reshape(operand.shape)

    def from_kernel(self, key: str, operands: list[Array]) -> Array:
        """The state [instances, batch, ...] from the operands of all ranks."""
        locals_ = [self._local(key, one) for one in operands]
        full = self.sharded.full.states[key]
        sharding = self.sharded.states[key]
        instances, batch = locals_[0].shape[:2]
        return np.stack(
            [
                np.stack(
                    [
                        join_shards([one[i, b] for one in locals_], full.type, sharding)
                        for b in range(batch)
                    ]
                )
                for i in range(instances)
            ]
        )

    def _local(self, key: str, operand: Array) -> Array:
        """One rank's [instances, batch, ...]."""
        local = self.sharded.graph.states[key]
        batch = self.program.batch
        if local.kind is StateKind.CONV:
            return operand[:, :, :batch].transpose(0, 2, 1, 3)
        if local.kind is StateKind.KEPT:
            rows, *rest = local.type.shape
            lanes = operand.reshape(local.instances, batch, rows, -1)[..., : prod(rest)]
            return lanes.reshape(local.instances, batch, rows, *rest)
        if local.kind is StateKind.KV_CACHE:  # lanes behind those of a row are padding
            context, *rest = local.type.shape
            own: Array = operand[..., : prod(rest)]
            return own.reshape(local.instances, batch, context, *rest)
        return operand.reshape(local.instances, batch, *local.type.shape)
