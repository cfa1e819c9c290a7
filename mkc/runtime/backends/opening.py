"""Backends from a graph and a checkpoint. What cannot run here is refused, never replaced."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.source import kernel_source
from mkc.driver import lower_graph
from mkc.errors import BackendError
from mkc.ir.graph import Graph
from mkc.report import rank_bytes
from mkc.runtime.backends.backend import Backend
from mkc.runtime.backends.backend import BackendName
from mkc.runtime.backends.kernel import KernelBackend
from mkc.runtime.backends.reference import ReferenceBackend
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import load_packed
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.runtime.pack import LoadTensor
from mkc.runtime.shards import Array
from mkc.targets import Target

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class OpenedBackend:
    """Attributes:
    description: one line for people: what runs, and what it holds.
    not_finite: tensors with a NaN or an infinity, sorted.
    """

    backend: Backend
    description: str
    not_finite: tuple[str, ...]


def open_reference(
    graph: Graph, checkpoint: Checkpoint, *, rounds_per_launch: int = 1
) -> OpenedBackend:
    """The graph evaluated by XLA on JAX's default device.

    Raises:
      CheckpointMismatchError: the checkpoint is not one of the model.
    """
    checkpoint.check(graph)
    load = _Checked(load=checkpoint.loader(graph))
    backend = ReferenceBackend(graph, load, rounds_per_launch=rounds_per_launch)
    device = jax.devices()[0].device_kind
    return OpenedBackend(
        backend=backend,
        description=f"reference backend (the graph evaluated by XLA) on {device}, "
        f"{graph.batch} slots, context {graph.context}",
        not_finite=tuple(sorted(load.not_finite)),
    )


def open_kernel(
    name: BackendName,
    graph: Graph,
    checkpoint: Checkpoint,
    *,
    target: Target,
    tp: int,
    rounds_per_launch: int = 1,
    packed: Path | None = None,
) -> OpenedBackend:
    """The generated kernel, on TPUs (`tpu`) or interpreted on the CPU (`interpret`).

    Args:
      target: with a topology.
      tp: ranks.
      packed: a folder that `mkc pack` wrote; None packs the checkpoint now.

    Raises:
      BackendError: this machine has not the devices.
      MkcError: the model does not fit the target, or the weights not the model.
    """
    devices = _tpu_devices(target, tp) if name == "tpu" else _cpu_devices(tp)
    lowered = lower_graph(graph, target, tp=tp, logits=True, rounds_per_launch=rounds_per_launch)
    session = KernelSession(
        lowered=lowered,
        source=kernel_source(lowered.program, lowered.steps, target=target),
        mesh=mesh_of(devices),
        interpret=False if name == "tpu" else _interpreter(tp),
    )
    load = _Checked(load=checkpoint.loader(graph))
    if packed is None:
        checkpoint.check(graph)
        session.load_weights(load)
    else:
        weights = load_packed(packed, lowered)
        load.not_finite.update(weights.manifest["not_finite"])
        for operand in weights.operands:
            session.place(operand, weights.operand(operand))
    weight_bytes, state_bytes = rank_bytes(lowered.program)
    kind = "the kernel" if name == "tpu" else "the kernel, interpreted on the CPU"
    return OpenedBackend(
        backend=KernelBackend(session),
        description=f"{name} backend ({kind}) for {target.name}, {tp} ranks, "
        f"{graph.batch} slots, context {graph.context}; each rank holds "
        f"{weight_bytes / GIB:.2f} GiB of weights and {state_bytes / GIB:.2f} GiB of states",
        not_finite=tuple(sorted(load.not_finite)),
    )


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """Loads tensors and notes which of them have a NaN or an infinity."""

    load: LoadTensor
    not_finite: set[str] = field(default_factory=set)

    def __call__(self, name: str) -> Array:
        array = self.load(name)
        if not np.isfinite(array).all():
            self.not_finite.add(name)
        return array


def _tpu_devices(target: Target, tp: int) -> list[Any]:
    """The first `tp` TPUs, which must be of the target's kind."""
    found = [one for one in jax.devices() if one.platform == "tpu"]
    if not found:
        raise BackendError(
            backend="tpu",
            problem="this machine has no TPU, or another process uses it",
            hint="Choose --backend interpret or --backend reference",
        )
    kind = found[0].device_kind
    if not kind.startswith(target.device_kind):
        raise BackendError(
            backend="tpu",
            problem=f"the devices are '{kind}', and the kernel is for '{target.device_kind}'",
            hint="Name the target of these devices with --target; mkc targets lists them",
        )
    if len(found) < tp:
        raise BackendError(
            backend="tpu",
            problem=f"there are {len(found)} TPUs, and the kernel has {tp} ranks",
            hint=f"Choose --tp {len(found)} or fewer",
        )
    return found[:tp]


def _cpu_devices(tp: int) -> list[Any]:
    found = jax.devices("cpu")
    if len(found) < tp:
        raise BackendError(
            backend="interpret",
            problem=f"JAX simulates {len(found)} CPU devices, and the kernel has {tp} ranks",
            hint="Choose a smaller --tp, or have JAX simulate more CPU devices",
        )
    return found[:tp]


def _interpreter(tp: int) -> Any:
    """Pallas' own interpreter is the fastest one; it has no remote copies."""
    return True if tp == 1 else pltpu.InterpretParams(dma_execution_mode="eager")
