"""How a generated kernel becomes a jitted function over a mesh.

Every array but the tables is divided over the mesh axis along its first dimension; its shape in
`Operand` is one rank's part.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.layout import Format
from jax.experimental.layout import Layout
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mkc.codegen_pallas.support.exchange import AXIS

DTYPES = {
    "bf16": jnp.bfloat16,
    "f32": jnp.float32,
    "i32": jnp.int32,
    "e2m1x2": jnp.int8,
}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed", "forced")
SCALARS = ("tokens", "positions", "kept", "rounds", "budgets", "stop_ids", *SAMPLING)
WHOLE = (*SCALARS, "table")  # roles that every rank has a copy of


@dataclass(frozen=True, kw_only=True)
class Operand:
    """An argument: `shape` on one rank; `updated` arrays are donated and returned."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    updated: bool = False


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Everything about a kernel but its body.

    Attributes:
      scratch: (name, kind, shape) with kind a dtype for VMEM, `dma` for semaphores or `scalars` for
        i32 in SMEM.
      rounds: decode steps, or speculative rounds, one launch may run.
      rows_per_sequence: T of a kernel that runs speculative rounds, None for one of decode steps.
      logits: [rows, columns] of one rank when the kernel returns them.
      logits_whole: every rank has all columns.
    """

    name: str
    ranks: int
    batch: int
    operands: Sequence[Operand]
    scratch: Sequence[tuple[str, str, tuple[int, ...]]]
    logits: tuple[int, int] | None
    vmem_limit_bytes: int
    collective_id: int
    rounds: int = 1
    rows_per_sequence: int | None = None
    logits_whole: bool = False


def build(
    body: Callable[[SimpleNamespace], None], spec: KernelSpec, mesh: Mesh, interpret: Any
) -> Any:
    """The jitted launch: operands in order -> (tokens, [logits,] updated arrays).

    The tokens are `next_token` [batch]; with several rounds `emitted` [rounds * batch], and `count`
    [1], how many rounds ran. A kernel of speculative rounds returns `emitted` [rounds * batch * T],
    -1 behind the tokens of a round; `counts` and `drafts` [rounds * batch], how many tokens and how
    many drafts were looked at; `ran` [1]; and what the next launch begins with: `tokens_out`,
    `positions_out` [batch * T], `kept_out` [batch].

    Updated arrays are donated. On one device and in interpret mode they are aliased to results of
    the call. Around a call that communicates XLA would copy every aliased array in and out, so on
    several TPU devices the kernel writes its operands in place (it is marked as having side
    effects) and the step returns the donated arguments: the same buffers, without a copy.

    Args:
      body: the kernel, called with a namespace of references by name.
      mesh: one axis `tp` of `spec.ranks` devices.
      interpret: False for a TPU, else what `pallas_call` accepts.
    """
    updated = [index for index, one in enumerate(spec.operands) if one.updated]
    in_place = interpret is False and spec.ranks > 1
    call = _call(body, spec, interpret, aliased=() if in_place else tuple(updated))

    def step(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        pinned = [
            one
            if operand.role in SCALARS or interpret is not False
            else pltpu.with_memory_space_constraint(one, pltpu.HBM)
            for one, operand in zip(arguments, spec.operands, strict=True)
        ]
        results = tuple(call(*pinned))
        return (*results, *(arguments[index] for index in updated)) if in_place else results

    logits_spec = PartitionSpec() if spec.logits_whole else PartitionSpec(None, AXIS)
    logits_specs = [logits_spec] if spec.logits else []
    partitions = [_partition(one) for one in spec.operands]
    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=tuple(partitions),
        out_specs=(
            *[PartitionSpec()] * len(_scalar_outputs(spec)),
            *logits_specs,
            *(partitions[index] for index in updated),
        ),
        check_vma=False,
    )
    formats = [operand_format(one, mesh, interpret) for one in spec.operands]
    outputs = [NamedSharding(mesh, PartitionSpec()) for _ in _scalar_outputs(spec)]
    outputs += [NamedSharding(mesh, one) for one in logits_specs]
    return jax.jit(
        sharded,
        in_shardings=tuple(formats),
        out_shardings=(*outputs, *(formats[index] for index in updated)),
        donate_argnums=tuple(updated),
    )


def operand_format(operand: Operand, mesh: Mesh, interpret: Any) -> Any:
    """Sharding, and on a TPU the dimension order: row-major, as the kernel reads it.

    XLA's own choice puts narrow last dimensions elsewhere to pad less, and copies before the call.
    """
    sharding = NamedSharding(mesh, _partition(operand))
    if interpret is not False:
        return sharding
    return Format(Layout(major_to_minor=tuple(range(len(operand.shape)))), sharding)


def _call(
    body: Callable[[SimpleNamespace], None],
    spec: KernelSpec,
    interpret: Any,
    aliased: tuple[int, ...],
) -> Any:
    """The `pallas_call`; without `aliased` operands the kernel writes the operands themselves."""
    scalars = _scalar_outputs(spec)
    outputs = list(scalars)
    if spec.logits:
        outputs.append(("logits", spec.logits, "f32"))
    results = [
        *outputs,
        *((f"{one.name}_out", one.shape, one.dtype) for one in _select(spec, aliased)),
    ]
    names = [one.name for one in spec.operands]
    names += [name for name, _, _ in results] + [name for name, _, _ in spec.scratch]

    def kernel(*refs: Any) -> None:
        memory = SimpleNamespace(**dict(zip(names, refs, strict=True)))
        for one in spec.operands:
            if one.updated and not aliased:
                setattr(memory, f"{one.name}_out", getattr(memory, one.name))
        body(memory)

    return pl.pallas_call(
        kernel,
        name=spec.name,
        out_shape=[jax.ShapeDtypeStruct(shape, DTYPES[dtype]) for _, shape, dtype in results],
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM if one.role in SCALARS else pl.ANY)
            for one in spec.operands
        ],
        out_specs=[
            *[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars),
            *[pl.BlockSpec(memory_space=pl.ANY)] * (len(results) - len(scalars)),
        ],
        scratch_shapes=[_scratch(kind, shape) for _, kind, shape in spec.scratch],
        input_output_aliases={
            operand: len(outputs) + place for place, operand in enumerate(aliased)
        },
        compiler_params=pltpu.CompilerParams(
            collective_id=spec.collective_id if spec.ranks > 1 else None,
            vmem_limit_bytes=spec.vmem_limit_bytes,
            disable_bounds_checks=True,
            has_side_effects=True,
        ),
        interpret=interpret,
    )


def _scalar_outputs(spec: KernelSpec) -> list[tuple[str, tuple[int, ...], str]]:
    """Results in scalar memory: (name, shape, dtype)."""
    if spec.rows_per_sequence is not None:
        rows = spec.batch * spec.rows_per_sequence
        sizes = {
            "emitted": spec.rounds * rows,
            "counts": spec.rounds * spec.batch,
            "drafts": spec.rounds * spec.batch,
            "ran": 1,
            "tokens_out": rows,
            "positions_out": rows,
            "kept_out": spec.batch,
        }
        return [(name, (size,), "i32") for name, size in sizes.items()]
    if spec.rounds == 1:
        return [("next_token", (spec.batch,), "i32")]
    return [("emitted", (spec.rounds * spec.batch,), "i32"), ("count", (1,), "i32")]


def _scratch(kind: str, shape: tuple[int, ...]) -> Any:
    if kind == "dma":
        return pltpu.SemaphoreType.DMA(shape)
    if kind == "scalars":
        return pltpu.SMEM(shape, jnp.int32)
    return pltpu.VMEM(shape, DTYPES[kind])


def _select(spec: KernelSpec, indices: tuple[int, ...]) -> list[Operand]:
    return [spec.operands[index] for index in indices]


def abstract_arguments(spec: KernelSpec, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes, dtypes and shardings of all operands over the mesh."""
    return tuple(
        jax.ShapeDtypeStruct(
            global_shape(one, spec.ranks),
            DTYPES[one.dtype],
            sharding=NamedSharding(mesh, _partition(one)),
        )
        for one in spec.operands
    )


def global_shape(operand: Operand, ranks: int) -> tuple[int, ...]:
    """Shape of an operand over all ranks."""
    if operand.role in WHOLE:
        return operand.shape
    return (ranks * operand.shape[0], *operand.shape[1:])


def _partition(operand: Operand) -> PartitionSpec:
    return PartitionSpec() if operand.role in WHOLE else PartitionSpec(AXIS)
