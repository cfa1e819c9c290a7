"""Backends from a graph and a checkpoint. What cannot run here is refused, never replaced."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
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
from mkc.hbm_plan import HbmPlan
from mkc.hbm_plan import hbm_plan
from mkc.ir.graph import Graph
from mkc.ir.token_masks import with_token_masks
from mkc.report import floor_us
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
from mkc.runtime.prefill import Prefill
from mkc.runtime.shards import Array
from mkc.targets import Target

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class OpenedBackend:
    """Attributes:
    description: one line for people: what runs, and what it holds.
    not_finite: tensors with a NaN or an infinity, sorted.
    step_floor_us: predicted least time of a step on the devices that run it; None on others.
    hbm_bytes, vmem_bytes: planned for each device of a kernel; None without one.
    """

    backend: Backend
    description: str
    not_finite: tuple[str, ...]
    step_floor_us: float | None = None
    hbm_bytes: int | None = None
    vmem_bytes: int | None = None


def open_reference(
    graph: Graph,
    checkpoint: Checkpoint,
    *,
    rounds_per_launch: int = 1,
    devices: Sequence[Any] | None = None,
) -> OpenedBackend:
    """The graph evaluated by XLA on JAX's default device.

    Args:
      devices: of all processes, to divide the weights over.

    Raises:
      CheckpointMismatchError: the checkpoint is not one of the model.
    """
    checkpoint.check(graph)
    load = Checked(load=checkpoint.loader(graph))
    mesh = mesh_of(devices) if devices is not None else None
    backend = ReferenceBackend(graph, load, rounds_per_launch=rounds_per_launch, mesh=mesh)
    device = jax.devices()[0].device_kind
    if devices is not None:
        device = f"{len(devices)} x {device} of {jax.process_count()} processes"
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
    say: Callable[[str], None] = lambda line: None,
) -> OpenedBackend:
    """The generated kernel, on TPUs (`tpu`) or interpreted on the CPU (`interpret`).

    Args:
      target: with a topology.
      tp: ranks.
      packed: a folder that `mkc pack` wrote; None packs the checkpoint now.
      say: is told, before anything is loaded, what each device will hold.

    Raises:
      BackendError: this machine has not the devices.
      HbmPlanError: serving the model takes more memory than a device has.
      MkcError: the model does not fit the target, or the weights not the model.
    """
    checkpoint.check(graph)  # here already, since the preparation of a large model takes a while
    kernel = prepare_kernel(
        name,
        with_token_masks(graph),
        target=target,
        tp=tp,
        rounds_per_launch=rounds_per_launch,
        say=say,
    )
    not_finite = kernel.load(checkpoint, packed)
    return OpenedBackend(
        backend=KernelBackend(kernel.session, prefill=kernel.prefill),
        description=kernel.description,
        not_finite=not_finite,
        step_floor_us=kernel.step_floor_us,
        hbm_bytes=kernel.hbm_bytes,
        vmem_bytes=kernel.vmem_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class PreparedKernel:
    """A kernel and the prefill over its operands, without weights yet.

    Attributes:
      description, step_floor_us, hbm_bytes, vmem_bytes: as of `OpenedBackend`.
    """

    session: KernelSession
    prefill: Prefill
    description: str
    step_floor_us: float | None
    hbm_bytes: int
    vmem_bytes: int

    def load(
        self, checkpoint: Checkpoint, packed: Path | None, drafter: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Places the weights. Returns the names of tensors with a NaN or an infinity, sorted.

        Args:
          packed: a folder that `mkc pack` wrote; None packs the checkpoint now.
          drafter: as for `load_packed`.

        Raises:
          MkcError: the weights are not those of the kernel.
        """
        if packed is None:
            return self.session.load_checkpoint(checkpoint)
        weights = load_packed(packed, self.session.lowered, drafter, checkpoint=checkpoint)
        self.session.load_packed(weights)
        return tuple(weights.manifest["not_finite"])


def prepare_kernel(
    name: BackendName,
    graph: Graph,
    *,
    target: Target,
    tp: int,
    rounds_per_launch: int,
    say: Callable[[str], None],
    prompts: Graph | None = None,
) -> PreparedKernel:
    """Everything of a kernel's backend but its weights; arguments and errors as of `open_kernel`.

    Args:
      prompts: graph that reads prompts, None for `graph` itself.
    """
    devices = _tpu_devices(target, tp) if name == "tpu" else _cpu_devices(tp)
    lowered = lower_graph(graph, target, tp=tp, logits=True, rounds_per_launch=rounds_per_launch)
    mesh = mesh_of(devices)
    prefill = Prefill(lowered=lowered, mesh=mesh, graph=prompts)
    plan = _plan(prefill, target, compiled=name == "tpu")
    say(str(plan))
    plan.check()
    session = KernelSession(
        lowered=lowered,
        source=kernel_source(lowered.program, lowered.steps, target=target),
        mesh=mesh,
        interpret=False if name == "tpu" else _interpreter(tp),
    )
    weight_bytes, state_bytes = rank_bytes(lowered.program)
    kind = "the kernel" if name == "tpu" else "the kernel, interpreted on the CPU"
    return PreparedKernel(
        session=session,
        prefill=prefill,
        description=f"{name} backend ({kind}) for {target.name}, {tp} ranks, "
        f"{graph.batch} slots, context {graph.context}; each rank holds "
        f"{weight_bytes / GIB:.2f} GiB of weights and {state_bytes / GIB:.2f} GiB of states",
        step_floor_us=floor_us(lowered, target) if name == "tpu" else None,
        hbm_bytes=plan.total_bytes,
        vmem_bytes=lowered.residency.vmem_bytes,
    )


def _plan(prefill: Prefill, target: Target, *, compiled: bool) -> HbmPlan:
    """Memory of one device; with `compiled` the largest prefill program is asked for its own."""
    program = prefill.program(prefill.sizes[-1])
    return hbm_plan(
        prefill.lowered,
        target,
        prefill_rows=program.rows,
        prefill_bytes=program.workspace_bytes if compiled else None,
        prompts=program.local,
    )


@dataclass(frozen=True, kw_only=True)
class Checked:
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
    if jax.process_count() > 1 and len(found) != tp:
        raise BackendError(
            backend="tpu",
            problem=f"{jax.process_count()} processes have {len(found)} TPUs, and the kernel has "
            f"{tp} ranks",
            hint=f"Choose --tp {len(found)}: every process has to hold a part",
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
    if jax.process_count() > 1:
        raise BackendError(
            backend="interpret",
            problem=f"the interpreter runs in one process, and there are {jax.process_count()}",
            hint="Choose --backend reference, or leave --distributed out",
        )
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
