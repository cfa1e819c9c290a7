"""What a user can do about a model that does not fit a mesh. Everything advised has been tried."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from mkc.errors import MkcError
from mkc.errors import ShardingError
from mkc.errors import TileError
from mkc.errors import VmemError
from mkc.ir.graph import Graph
from mkc.passes.p10_shard import Shard
from mkc.passes.p10_shard import possible_ranks
from mkc.passes.pipeline import Pipeline
from mkc.schedule.decisions import DecisionLog
from mkc.targets import Target

MIB = 1 << 20

type Misfit = ShardingError | TileError | VmemError


def advised(
    error: Misfit,
    graph: Graph,
    target: Target,
    *,
    pipeline: Pipeline,
    defaults: Pipeline,
    retrace: Callable[[int], Graph] | None = None,
) -> Misfit:
    """The same error with an advice that works.

    Args:
      pipeline: what the user asked for.
      defaults: the same request without options of the passes.
      retrace: graph of the same model for another batch, when the caller can make one.
    """
    match error:
        case ShardingError():
            return error.advise(_tiled_ranks(graph, target, pipeline))
        case TileError():
            fewer = [n for n in _tiled_ranks(graph, target, pipeline) if n < pipeline.shard.ranks]
            if not fewer:
                return error
            return error.advise(f"Choose --tp {fewer[-1]}, with which every rank has whole tiles")
    change = next(_fitting_changes(graph, target, pipeline, defaults), None)
    if change is None and retrace is not None:
        batches = range(graph.batch - 1, 0, -1)
        fitting = (_needs(f"--batch {n}", retrace(n), target, pipeline) for n in batches)
        change = next(chain.from_iterable(fitting), None)
    tried = "tp of this target or smaller batch" if retrace is not None else "tp of this target"
    return error.advise(change or f"a narrower model; no other {tried} lets it fit")


def _tiled_ranks(graph: Graph, target: Target, pipeline: Pipeline) -> list[int]:
    """Mesh sizes that divide the graph into whole memory tiles."""
    found = []
    for ranks in possible_ranks(graph):
        log = DecisionLog()
        try:
            steps = pipeline.fuse.apply(Shard(ranks=ranks).apply(graph, log), log)
            pipeline.tile.apply(steps, target, log)
        except MkcError:
            continue
        found.append(ranks)
    return found


def _fitting_changes(
    graph: Graph, target: Target, pipeline: Pipeline, defaults: Pipeline
) -> Iterator[str]:
    """Changes with which the kernel fits VMEM, the smallest first."""
    if pipeline != defaults:
        yield from _needs("the default options of the passes", graph, target, defaults)
    assert target.topology is not None
    for ranks in possible_ranks(graph):
        larger = (one for one in target.topologies if one.devices >= ranks)
        topology = target.topology if ranks <= target.topology.devices else next(larger, None)
        if ranks <= pipeline.shard.ranks or topology is None:
            continue
        where = f" on {topology.full_name}" if topology != target.topology else ""
        changed = replace(pipeline, shard=Shard(ranks=ranks))
        yield from _needs(f"--tp {ranks}{where}", graph, target, changed)


def _needs(change: str, graph: Graph, target: Target, pipeline: Pipeline) -> Iterator[str]:
    """The change with what the kernel then needs; nothing when it does not compile."""
    try:
        lowered = pipeline.run(graph, target)
    except MkcError:
        return
    yield f"{change}, with which the kernel needs {lowered.residency.vmem_bytes / MIB:.2f} MiB"
