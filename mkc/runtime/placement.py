"""Arrays over the devices of one or several processes; a process makes and holds its own parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mkc.ir.facets import REFERENCE
from mkc.ir.graph import Graph
from mkc.ir.graph import Param
from mkc.ir.ops import Op
from mkc.ir.reference import Meanings
from mkc.ir.reference_ops import storage_dtype
from mkc.runtime.products import CPU_MEANINGS
from mkc.runtime.shards import Array

type Index = tuple[slice, ...]


def place_ranks(format_: Any, ranks: int, part: Callable[[int], Array]) -> jax.Array:
    """An operand from the parts of ranks, side by side along the first axis.

    Args:
      format_: sharding or format; the parts of other processes' devices are not asked for.
      ranks: how many parts; one for an operand of which every rank has the whole.
      part: called with the number of a rank.
    """
    known: dict[int, Array] = {}
    own = local_ranks(format_, ranks)
    rows, *rest = known.setdefault(own[0], part(own[0])).shape

    def of(index: Index | None) -> Array:
        assert index is not None
        rank = (index[0].start or 0) // rows
        return known.pop(rank) if rank in known else part(rank)

    return jax.make_array_from_callback((ranks * rows, *rest), format_, of)


def local_ranks(format_: Any, ranks: int) -> list[int]:
    """Numbers of the ranks whose devices belong to this process, by the order of the mesh."""
    if ranks == 1:
        return [0]
    sharding = format_ if isinstance(format_, NamedSharding) else format_.sharding
    devices = sharding.mesh.devices.flat
    process = jax.process_index()
    return [rank for rank, one in enumerate(devices) if one.process_index == process]


def to_host(array: jax.Array) -> Array:
    """The whole array; where it is divided over processes all of them have to call this."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    whole: Array = multihost_utils.process_allgather(array, tiled=True)
    return whole


def local_part(array: jax.Array) -> Array:
    """What this process holds of an array that is divided along its first axis."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    shards = sorted(array.addressable_shards, key=lambda one: one.index[0].start)
    return np.concatenate([np.asarray(one.data) for one in shards])


def place_local_part(part: Array, sharding: NamedSharding) -> jax.Array:
    """The array of which `local_part` gives `part`."""
    ranks = sharding.mesh.size
    own = local_ranks(sharding, ranks)
    parts = dict(zip(own, np.split(part, len(own)), strict=True))
    return place_ranks(sharding, ranks, parts.__getitem__)


def shard_params(graph: Graph, load: Callable[[str], Array], mesh: Mesh) -> dict[str, jax.Array]:
    """Parameters as `mkc.ir.reference.stack_params`, divided over a mesh of one axis.

    A parameter of two or more axes is divided along the first one that has a whole share for every
    device: its output units, if possible, so that no sum is divided. Others are on all devices.
    See `joining_meanings`.
    """
    return {key: _shard_param(param, load, mesh) for key, param in graph.params.items()}


def _shard_param(param: Param, load: Callable[[str], Array], mesh: Mesh) -> jax.Array:
    names, shape = param.tensor_names(), param.type.shape
    dtype = storage_dtype(param.type.dtype, "reference")
    divided = [axis for axis, size in enumerate(shape) if size % mesh.size == 0]
    axes: list[str | None] = [None] * len(shape)
    if len(shape) > 1 and divided:
        axes[divided[0]] = mesh.axis_names[0]

    def tensor(name: str, index: Index) -> Array:
        whole = np.asarray(load(name))
        wanted = param.tensor_type
        assert whole.shape == wanted.shape, f"{name} is {whole.shape}, not {wanted}"
        return whole[index].astype(dtype)

    def instance(number: int, index: Index) -> Array:
        if not param.is_stacked:
            return tensor(names[number], index)
        members = names[number * shape[0] :][: shape[0]]
        return np.stack([tensor(name, index[1:]) for name in members[index[0]]])

    def part(index: Index | None) -> Array:
        assert index is not None
        if not param.indices:
            return instance(0, index)
        return np.stack([instance(number, index[1:]) for number in range(param.instances)])

    if param.indices:
        shape_all, partition = (param.instances, *shape), PartitionSpec(None, *axes)
    else:
        shape_all, partition = shape, PartitionSpec(*axes)
    return jax.make_array_from_callback(shape_all, NamedSharding(mesh, partition), part)


def joining_meanings(graph: Graph, mesh: Mesh) -> Meanings:
    """Meanings of the ops with divided parameters: every device gets the whole result at once.

    Everything else is then computed by every device, and exchanges are between all devices: left
    alone, XLA divides heads over some of them, and has them exchange in groups.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    return {
        type(node.op): _joined(node.op, everywhere)
        for node in graph.body.nodes()
        if any(
            name in graph.params and len(graph.params[name].type.shape) > 1
            for name in node.operands
        )
    }


def _joined(op: Op, everywhere: NamedSharding) -> Callable[..., Any]:
    """The meaning of an op of this type, with whole results."""
    function = CPU_MEANINGS.get(type(op)) or REFERENCE.find(op)
    assert function is not None, f"nothing says what {op.mnemonic} means"

    def meaning(*arguments: Any) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        results, states = function(*arguments)
        whole = [lax.with_sharding_constraint(one, everywhere) for one in results]
        return tuple(whole), states

    return meaning
