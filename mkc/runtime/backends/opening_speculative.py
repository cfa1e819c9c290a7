"""Backends with a scheme, from the checkpoints of a target and a drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax

from mkc.runtime.backends.backend import BackendName
from mkc.runtime.backends.kernel_rounds import KernelRoundsBackend
from mkc.runtime.backends.opening import Checked
from mkc.runtime.backends.opening import OpenedBackend
from mkc.runtime.backends.opening import prepare_kernel
from mkc.runtime.backends.speculative import SpeculativeBackend
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.manifest import drafter_identity
from mkc.runtime.pair import check_pair
from mkc.runtime.pair import paired
from mkc.spec import Round
from mkc.targets import Target


def open_speculative(
    scheme: Round, target: Checkpoint, draft: Checkpoint, *, rounds_per_launch: int = 1
) -> OpenedBackend:
    """Rounds evaluated by XLA on JAX's default device.

    Raises:
      CheckpointMismatchError: one of the checkpoints is not one of its model.
    """
    check_pair(scheme.graph, target, draft)
    load = Checked(load=paired(target, draft).loader(scheme.graph))
    backend = SpeculativeBackend(scheme, load, rounds_per_launch=rounds_per_launch)
    device = jax.devices()[0].device_kind
    return OpenedBackend(
        backend=backend,
        description=f"reference backend (the graph evaluated by XLA) on {device}, "
        f"{backend.batch} slots, context {backend.context}, {_drafting(scheme)}",
        not_finite=tuple(sorted(load.not_finite)),
    )


def open_kernel_rounds(
    name: BackendName,
    scheme: Round,
    target: Checkpoint,
    draft: Checkpoint,
    *,
    hardware: Target,
    tp: int,
    rounds_per_launch: int = 1,
    packed: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> OpenedBackend:
    """The generated kernel of a scheme; arguments and errors as of `open_kernel`.

    Args:
      hardware: what `open_kernel` calls the target.
    """
    check_pair(scheme.graph, target, draft)
    kernel = prepare_kernel(
        name,
        scheme.masked.graph,
        target=hardware,
        tp=tp,
        rounds_per_launch=rounds_per_launch,
        say=say,
        prompts=scheme.prefill,
    )
    drafter = drafter_identity(scheme.name, draft.config)
    not_finite = kernel.load(paired(target, draft), packed, drafter)
    backend = KernelRoundsBackend(kernel.session, scheme, prefill=kernel.prefill)
    limit = "" if backend.draws else " of a greedy sequence"
    return OpenedBackend(
        backend=backend,
        description=f"{kernel.description}, {_drafting(scheme)}{limit}",
        not_finite=not_finite,
        step_floor_us=kernel.step_floor_us,
        hbm_bytes=kernel.hbm_bytes,
        vmem_bytes=kernel.vmem_bytes,
    )


def _drafting(scheme: Round) -> str:
    return f"scheme {scheme.name} with up to {scheme.drafts} drafts per round"
