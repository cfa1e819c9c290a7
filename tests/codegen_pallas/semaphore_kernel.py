"""A kernel that does nothing but allocate COUNT semaphores."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

NAME = "semaphores"
RANKS = 1
COUNT = 1


def build(mesh: Any, interpret: bool = False) -> Any:
    """Copies one register."""

    def kernel(source: Any, target: Any, _: Any) -> None:
        target[...] = source[...]

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        scratch_shapes=[pltpu.SemaphoreType.DMA((COUNT,))],
        interpret=interpret,
        name=NAME,
    )
    specs = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec()}
    return jax.jit(jax.shard_map(call, mesh=mesh, check_vma=False, **specs))


def abstract_arguments(mesh: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """One register of f32."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return (jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=sharding),)
