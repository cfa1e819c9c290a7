"""A target and its drafter: two checkpoints that are read as one."""

from __future__ import annotations

from dataclasses import replace

from mkc.ir.graph import Graph
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.checkpoint import CheckReport
from mkc.spec import DRAFT_NAMESPACE


def paired(target: Checkpoint, draft: Checkpoint) -> Checkpoint:
    """Both; tensors of the drafter have the names that they have in the graph of a round."""
    return target.joined(draft, prefix=DRAFT_NAMESPACE)


def check_pair(
    graph: Graph, target: Checkpoint, draft: Checkpoint, *, strict: bool = False
) -> CheckReport:
    """Compares each checkpoint with its part of a round's graph, as `Checkpoint.check`.

    Raises:
      CheckpointMismatchError: one of the checkpoints is not one of its model; it is named.
    """
    found = target.check(target_part(graph), strict=strict)
    drafts = draft.check(draft_part(graph), strict=strict)
    return CheckReport(
        extra=(*found.extra, *(DRAFT_NAMESPACE + name for name in drafts.extra)),
        converted=(*found.converted, *(DRAFT_NAMESPACE + name for name in drafts.converted)),
    )


def target_part(graph: Graph) -> Graph:
    """A round's graph with the target's parameters only, for reading its checkpoint."""
    params = {
        key: one for key, one in graph.params.items() if not one.pattern.startswith(DRAFT_NAMESPACE)
    }
    return replace(graph, params=params)


def draft_part(graph: Graph) -> Graph:
    """A round's graph with the drafter's parameters only, under the names of its checkpoint."""
    params = {
        key: replace(one, pattern=one.pattern.removeprefix(DRAFT_NAMESPACE))
        for key, one in graph.params.items()
        if one.pattern.startswith(DRAFT_NAMESPACE)
    }
    return replace(graph, params=params)
