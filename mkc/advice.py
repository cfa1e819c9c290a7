"""What a user can do about a request that was refused. Everything advised has been tried.

An advice is options of the command line. Whoever follows it is not refused again: the passes have
run with it, and what a device then holds has been counted, with padding and with whatever every
rank holds as a whole. No code is generated, nothing is compiled, and no times are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace
from itertools import chain

from mkc.errors import DeviceCountError
from mkc.errors import HbmError
from mkc.errors import MkcError
from mkc.errors import ShardingError
from mkc.errors import TileError
from mkc.errors import VmemError
from mkc.ir.graph import Graph
from mkc.passes.p10_shard import possible_ranks
from mkc.passes.pipeline import Lowered
from mkc.passes.pipeline import Pipeline
from mkc.targets import Target
from mkc.targets import Topology

MIB = 1 << 20

type Misfit = DeviceCountError | HbmError | ShardingError | TileError | VmemError
type Attempt = Callable[[Graph, Target, Pipeline], Lowered]
"""Lowers a graph with all checks, or raises an `MkcError`."""
type Retrace = Callable[[int, int], Graph]
"""Graph of the same model for another batch and context."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was asked for.

    Attributes:
      target: with a topology.
      names_tp: the user has chosen the number of ranks, so that an advice has to change it, too.
      pipeline: with the options of the passes.
      defaults: the same request without them.
      retrace: None when the caller cannot make another graph.
    """

    graph: Graph
    target: Target
    names_tp: bool
    pipeline: Pipeline
    defaults: Pipeline
    attempt: Attempt
    retrace: Retrace | None = None

    @property
    def topology(self) -> Topology:
        assert self.target.topology is not None
        return self.target.topology


@dataclass(frozen=True, kw_only=True)
class Change:
    """Other options, and what they lead to."""

    options: str
    lowered: Lowered


def advised(error: Misfit, asked: Asked) -> MkcError:
    """The same error with an advice that works."""
    match error:
        case DeviceCountError():
            larger = [one.topology.full_name for one in _with_ranks(asked) if error.tp > 0]
            return error.advise(possible=_possible_here(asked), larger=larger)
        case ShardingError():
            here = _possible_here(asked)
            return error.advise(here, "" if here else _options(next(_larger_meshes(asked), None)))
        case TileError():
            fewer = [n for n in _possible_here(asked) if n < asked.pipeline.shard.ranks]
            if not fewer:
                return error
            return error.advise(f"Choose --tp {fewer[-1]}, with which every rank has whole tiles")
        case HbmError():
            found = chain(_larger_topologies(asked), _larger_meshes(asked))
            return error.advise(_options(next(chain(found, _smaller_states(error, asked)), None)))
    change = next(_fitting_changes(asked), None)
    tried = "tp of this target"
    if asked.retrace is not None:
        tried += " or smaller batch"
    if change is None:
        return error.advise(f"a narrower model; no other {tried} lets it fit")
    needed = change.lowered.residency.vmem_bytes / MIB
    return error.advise(f"{change.options}, with which the kernel needs {needed:.2f} MiB")


def smallest_topology(
    graph: Graph, target: Target, pipeline: Pipeline, attempt: Attempt
) -> Topology | None:
    """The topology with the fewest devices that takes the model on all of them.

    Args:
      target: its topology, if any, does not matter.
      pipeline: its number of ranks does not matter.
    """
    for topology in target.topologies:
        on = _on(pipeline, topology.devices)
        if _tried("", graph, replace(target, topology=topology), on, attempt):
            return topology
    return None


def _options(change: Change | None) -> str:
    return change.options if change is not None else ""


def _on(pipeline: Pipeline, ranks: int) -> Pipeline:
    return replace(pipeline, shard=replace(pipeline.shard, ranks=ranks))


def _tried(
    options: str, graph: Graph, target: Target, pipeline: Pipeline, attempt: Attempt
) -> Change | None:
    """None when it is refused."""
    if _total_bytes(graph) > pipeline.shard.ranks * target.hbm.usable_bytes:
        return None  # not even if everything were divided and nothing padded
    try:
        return Change(options=options, lowered=attempt(graph, target, pipeline))
    except MkcError:
        return None


def _total_bytes(graph: Graph) -> int:
    """Weights and states."""
    weights = sum(one.type.bytes * one.instances for one in graph.params.values())
    return weights + sum(
        one.type.bytes * one.instances * graph.batch for one in graph.states.values()
    )


@dataclass(frozen=True, kw_only=True)
class _Mesh:
    """So many ranks of a topology."""

    ranks: int
    topology: Topology


def _possible_here(asked: Asked) -> list[int]:
    """Numbers of ranks that the model can have on the topology that was asked for."""
    meshes = [
        _Mesh(ranks=ranks, topology=asked.topology)
        for ranks in possible_ranks(asked.graph)
        if ranks <= asked.topology.devices
    ]
    return [one.ranks for one in meshes if _on_mesh(one, asked) is not None]


def _with_ranks(asked: Asked) -> Iterator[_Mesh]:
    """Topologies on which the model can have the number of ranks that was asked for."""
    ranks = asked.pipeline.shard.ranks
    for topology in asked.target.topologies:
        mesh = _Mesh(ranks=ranks, topology=topology)
        if 1 <= ranks <= topology.devices and _on_mesh(mesh, asked) is not None:
            yield mesh


def _larger_topologies(asked: Asked) -> Iterator[Change]:
    """Topologies on all of whose devices the model is not refused, the fewest devices first."""
    for topology in asked.target.topologies:
        if topology.devices > asked.pipeline.shard.ranks:
            change = _on_mesh(_Mesh(ranks=topology.devices, topology=topology), asked)
            if change is not None:
                yield change


def _larger_meshes(asked: Asked) -> Iterator[Change]:
    """More ranks than were asked for with which the model is not refused, the fewest first."""
    for ranks in possible_ranks(asked.graph):
        topology = _topology_of(ranks, asked)
        if ranks > asked.pipeline.shard.ranks and topology is not None:
            change = _on_mesh(_Mesh(ranks=ranks, topology=topology), asked)
            if change is not None:
                yield change


def _topology_of(ranks: int, asked: Asked) -> Topology | None:
    """The one that was asked for, if it has the devices; else the smallest that has."""
    if ranks <= asked.topology.devices:
        return asked.topology
    return next((one for one in asked.target.topologies if one.devices >= ranks), None)


def _on_mesh(mesh: _Mesh, asked: Asked) -> Change | None:
    """The options that lead to a mesh."""
    options = []
    if mesh.topology != asked.topology:
        options.append(f"--target {mesh.topology.full_name}")
    if asked.names_tp or mesh.ranks != mesh.topology.devices:
        options.append(f"--tp {mesh.ranks}")
    target = replace(asked.target, topology=mesh.topology)
    pipeline = _on(asked.pipeline, mesh.ranks)
    return _tried(" ".join(options), asked.graph, target, pipeline, asked.attempt)


def _fitting_changes(asked: Asked) -> Iterator[Change]:
    """Changes with which the kernel fits VMEM, the smallest first."""
    if asked.pipeline != asked.defaults:
        text = "the default options of the passes"
        found = _tried(text, asked.graph, asked.target, asked.defaults, asked.attempt)
        if found is not None:
            yield found
    yield from _larger_meshes(asked)
    yield from _smaller_batches(asked, below=asked.graph.batch)


def _smaller_states(error: HbmError, asked: Asked) -> Iterator[Change]:
    """Fewer sequences, or shorter ones, whose states fit beside the weights.

    States grow at most in proportion to both, so a request that is larger than in proportion is not
    tried.
    """
    left = error.limit_bytes - error.weight_bytes
    if left <= 0 or asked.retrace is None:
        return
    graph = asked.graph
    most = left / error.state_bytes
    yield from _smaller_batches(asked, below=min(graph.batch, int(graph.batch * most) + 1))
    context = graph.context // 2
    while context:
        if context <= graph.context * most:
            yield from _retraced(f"--context {context}", graph.batch, context, asked)
        context //= 2


def _smaller_batches(asked: Asked, *, below: int) -> Iterator[Change]:
    for batch in range(below - 1, 0, -1):
        yield from _retraced(f"--batch {batch}", batch, asked.graph.context, asked)


def _retraced(options: str, batch: int, context: int, asked: Asked) -> Iterator[Change]:
    if asked.retrace is None:
        return
    try:
        graph = asked.retrace(batch, context)
    except MkcError:
        return
    change = _tried(options, graph, asked.target, asked.pipeline, asked.attempt)
    if change is not None:
        yield change
