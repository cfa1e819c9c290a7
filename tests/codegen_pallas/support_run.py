"""Runs a kernel body on virtual CPU devices, for the tests of the support functions."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

VMEM = pltpu.VMEM
SMEM = pltpu.SMEM
HBM = pl.ANY

# The race detector gives each copy one of this many clock entries at random. By default there is
# one entry per device, so that waiting for any copy hides the races of all earlier ones.
CLOCK_ENTRIES = 512


class Mode(StrEnum):
    """How the kernel is interpreted.

    late: copies happen when somebody waits for them, fresh memory is NaN, races raise.
    eager: copies happen at once.
    generic: the interpreter of Pallas itself; no remote copies.
    """

    LATE = "late"
    EAGER = "eager"
    GENERIC = "generic"

    def parameters(self) -> Any:
        if self is Mode.GENERIC:
            return True
        late = self is Mode.LATE
        return pltpu.InterpretParams(
            detect_races=late,
            vector_clock_size=CLOCK_ENTRIES,
            dma_execution_mode="on_wait" if late else "eager",
            uninitialized_memory="nan",
            out_of_bounds_reads="raise",
        )


BATCHES = [(Mode.LATE, 1), (Mode.LATE, 3), (Mode.LATE, 8), (Mode.EAGER, 3), (Mode.GENERIC, 3)]
"""Mode and batch: every batch in the mode that proves most, one batch in the others."""


def run_ranks(
    body: Callable[..., None],
    *,
    operands: Sequence[tuple[np.ndarray, Any]],
    results: Sequence[tuple[tuple[int, ...], Any, Any]],
    scratch: Sequence[Any] = (),
    aliases: dict[int, int] | None = None,
    barrier: bool = False,
    mode: Mode = Mode.LATE,
) -> list[np.ndarray]:
    """Runs `body` on one device per entry of the operands' leading axis.

    Args:
      operands: arrays `[ranks, ...]` and the memory space each is given in.
      results: shape per rank, dtype and memory space.
      aliases: operand number -> result number.
      barrier: the body uses the barrier semaphore.

    Returns:
      The results as `[ranks, ...]`.
    """
    ranks = operands[0][0].shape[0]
    mesh = Mesh(np.array(jax.devices("cpu")[:ranks]), ("tp",))

    def launch(*arrays: jax.Array) -> list[jax.Array]:
        outputs = pl.pallas_call(
            body,
            out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in results],
            in_specs=[pl.BlockSpec(memory_space=space) for _, space in operands],
            out_specs=[pl.BlockSpec(memory_space=space) for _, _, space in results],
            scratch_shapes=list(scratch),
            input_output_aliases=aliases or {},
            compiler_params=pltpu.CompilerParams(collective_id=0 if barrier else None),
            interpret=mode.parameters(),
        )(*(array[0] for array in arrays))
        return [output[None] for output in outputs]

    spec = PartitionSpec("tp")
    sharded = jax.shard_map(launch, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    try:
        outputs = jax.block_until_ready(jax.jit(sharded)(*(array for array, _ in operands)))
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    return [np.asarray(output) for output in outputs]


def run(
    body: Callable[..., None],
    *,
    operands: Sequence[tuple[np.ndarray, Any]],
    results: Sequence[tuple[tuple[int, ...], Any, Any]],
    scratch: Sequence[Any] = (),
    aliases: dict[int, int] | None = None,
    mode: Mode = Mode.LATE,
) -> list[np.ndarray]:
    """`run_ranks` on one device, without the leading axis."""
    outputs = run_ranks(
        body,
        operands=[(np.asarray(array)[None], space) for array, space in operands],
        results=results,
        scratch=scratch,
        aliases=aliases,
        mode=mode,
    )
    return [output[0] for output in outputs]
