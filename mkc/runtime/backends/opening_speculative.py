"""The reference backend with a scheme, from the checkpoints of a target and a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace

import jax

from mkc.ir.graph import Graph
from mkc.runtime.backends.opening import Checked
from mkc.runtime.backends.opening import OpenedBackend
from mkc.runtime.backends.speculative import SpeculativeBackend
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.pack import LoadTensor
from mkc.runtime.shards import Array
from mkc.spec import DRAFT_NAMESPACE
from mkc.spec import Round


def open_speculative(
    scheme: Round, target: Checkpoint, draft: Checkpoint, *, rounds_per_launch: int = 1
) -> OpenedBackend:
    """Rounds evaluated by XLA on JAX's default device.

    Raises:
      CheckpointMismatchError: one of the checkpoints is not one of its model.
    """
    parts = {
        "": (target, target_part(scheme.graph)),
        DRAFT_NAMESPACE: (draft, draft_part(scheme.graph)),
    }
    for checkpoint, graph in parts.values():
        checkpoint.check(graph)
    load = Checked(
        load=_ByNamespace(loaders={name: one.loader(graph) for name, (one, graph) in parts.items()})
    )
    backend = SpeculativeBackend(scheme, load, rounds_per_launch=rounds_per_launch)
    device = jax.devices()[0].device_kind
    return OpenedBackend(
        backend=backend,
        description=f"reference backend (the graph evaluated by XLA) on {device}, "
        f"{backend.batch} slots, context {backend.context}, scheme {scheme.name} with up to "
        f"{scheme.drafts} drafts per round",
        not_finite=tuple(sorted(load.not_finite)),
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


@dataclass(frozen=True, kw_only=True)
class _ByNamespace:
    """Loads a tensor of a round from the checkpoint that has it."""

    loaders: Mapping[str, LoadTensor]

    def __call__(self, name: str) -> Array:
        own = name.removeprefix(DRAFT_NAMESPACE)
        return self.loaders["" if own == name else DRAFT_NAMESPACE](own)
