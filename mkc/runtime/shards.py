"""One rank's part of a tensor, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mkc.ir.types import TensorType
from mkc.passes.sharding import Sharding

type Array = NDArray[np.generic]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive indices `start` .. `stop` along an axis."""

    start: int
    stop: int


def shard_runs(type: TensorType, sharding: Sharding, shard: int) -> tuple[Run, ...]:
    """What a shard holds of the divided axis: of every part its run of units."""
    assert sharding.axis is not None
    runs = []
    start = 0
    for part in type.axes[sharding.axis].parts:
        size = part.size // sharding.shards
        runs.append(Run(start=start + shard * size, stop=start + (shard + 1) * size))
        start += part.size
    return tuple(runs)


def holds_zeros(sharding: Sharding, rank: int) -> bool:
    """True where another rank holds the weights of a sum that counts every unit once."""
    return sharding.once and rank % sharding.copies != 0


def take_shard(full: Array, type: TensorType, sharding: Sharding, rank: int) -> Array:
    """The shard of `rank`: of every part of the divided axis its run of units.

    Args:
      full: the tensor as in the checkpoint.
      type: its full type.
    """
    if sharding.axis is None:
        return full
    if holds_zeros(sharding, rank):
        return np.zeros_like(_pieces(full, type, sharding, 0))
    return _pieces(full, type, sharding, sharding.shard_of(rank))


def _pieces(full: Array, type: TensorType, sharding: Sharding, shard: int) -> Array:
    assert sharding.axis is not None
    pieces = [
        np.take(full, range(run.start, run.stop), axis=sharding.axis)
        for run in shard_runs(type, sharding, shard)
    ]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=sharding.axis)


def join_shards(shards: list[Array], type: TensorType, sharding: Sharding) -> Array:
    """The full tensor from the shards of all ranks; of copies the first rank's is taken."""
    if sharding.axis is None:
        return shards[0]
    different = shards[: sharding.shards] if sharding.cyclic else shards[:: sharding.copies]
    parts = []
    start = 0
    for part in type.axes[sharding.axis].parts:
        size = part.size // sharding.shards
        index = range(start, start + size)
        parts += [np.take(shard, index, axis=sharding.axis) for shard in different]
        start += size
    return np.concatenate(parts, axis=sharding.axis)
