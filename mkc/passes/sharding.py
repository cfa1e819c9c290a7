"""How values, parameters and states are divided over the ranks of a tensor-parallel mesh.

A `Sharding` divides one axis into `shards` equal runs of units, part by part, and gives shard
rank // copies to each rank; `copies` is above one where there are fewer units than ranks, as with a
few key heads on many devices. The ranks with one shard may divide it again along another axis, as
groups of experts whose matrices several ranks share; then none of them are copies. Shards may also
go round, so that every group of adjoining ranks holds the whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace

from mkc.ir.graph import Graph
from mkc.ir.types import Axis
from mkc.ir.types import TensorType


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Attributes:
    axis: divided axis, None when every rank has the whole.
    shards: number of different shards.
    copies: ranks that hold the same shard.
    partial: every rank holds a summand of the value (only between a matmul and its all-reduce).
    once: of the copies only the first holds the weights, the others zeros, so that a sum over the
      ranks counts every unit once.
    inner: how the ranks with the same shard divide it further: one of its shards for each of them.
    cyclic: rank r has shard r % shards: adjoining ranks, such as those of a host, have all shards.
    """

    axis: int | None = None
    shards: int = 1
    copies: int = 1
    partial: bool = False
    once: bool = False
    inner: Sharding | None = None
    cyclic: bool = False

    def __post_init__(self) -> None:
        assert self.inner is None or self.inner.shards == self.copies, f"{self}: ranks left over"

    def shard_of(self, rank: int) -> int:
        """Number of the shard that a rank has."""
        return rank % self.shards if self.cyclic else rank // self.copies

    def local(self, type: TensorType) -> TensorType:
        """The type of one rank's shard."""
        if self.axis is None:
            return type
        divided = divide(type.axes[self.axis], self.shards)
        axes = tuple(divided if index == self.axis else one for index, one in enumerate(type.axes))
        shard = TensorType(dtype=type.dtype, axes=axes)
        return shard if self.inner is None else self.inner.local(shard)


REPLICATED = Sharding()


def divide(axis: Axis, shards: int) -> Axis:
    """One of `shards` equal shards of an axis, part by part."""
    parts = tuple(replace(part, count=part.count // shards) for part in axis.parts)
    return Axis(parts=parts, name=axis.name)


@dataclass(frozen=True, kw_only=True)
class ShardedGraph:
    """A graph of one rank.

    Attributes:
      graph: nodes and types of one rank, exchanges included.
      full: the graph as the author wrote it; parameters keep the checkpoint's shapes there.
      ranks: size of the mesh.
      params, states: how each one is divided.
      gathered: weights that are divided though every rank needs their whole result, and over how
        many adjoining ranks.
      expert_groups: into how many groups of ranks experts are divided, by their first matrix.
    """

    graph: Graph
    full: Graph
    ranks: int
    params: dict[str, Sharding]
    states: dict[str, Sharding]
    gathered: dict[str, int] = field(default_factory=dict)
    expert_groups: dict[str, int] = field(default_factory=dict)
