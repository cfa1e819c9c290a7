"""Small kernels, each with one construct that chips are said to refuse or to get wrong.

`python -m tests.schedule.lint.constructs TOPOLOGY` compiles them ahead of time and prints one
JSON line for each: its name and what the compiler says against it. A process of its own, because
libtpu reads its options once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

BF16, F32, I32, U32 = jnp.bfloat16, jnp.float32, jnp.int32, jnp.uint32
RESULT = jax.ShapeDtypeStruct((8, 128), F32)
TRACED, PROGRAM, TEXT = "traced kernel", "program", "text"


@dataclass(frozen=True, kw_only=True)
class Construct:
    """A kernel of a number in SMEM, an array `x` and a result [8, 128] of f32.

    Attributes:
      body: called with number, array, result and scratch.
      shape, dtype: of the array, which is in VMEM, in HBM where `copied`.
      rule: of the lint that forbids it; empty where none does.
      lint: which lint sees it: that of the traced kernel, of a program or of a text.
      refused: the compiler of today refuses it, too.
    """

    name: str
    body: Callable[..., None]
    shape: tuple[int, ...] = (16, 128)
    dtype: Any = F32
    copied: bool = False
    scratch: tuple[Any, ...] = ()
    rule: str = ""
    lint: str = TRACED
    refused: bool = False

    def call(self, interpret: Any) -> Callable[..., jax.Array]:
        spaces = (pltpu.SMEM, pl.ANY if self.copied else pltpu.VMEM)
        return pl.pallas_call(
            self.body,
            out_shape=RESULT,
            in_specs=[pl.BlockSpec(memory_space=one) for one in spaces],
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=self.scratch,
            interpret=interpret,
        )

    def arguments(self, sharding: Any = None) -> list[jax.ShapeDtypeStruct]:
        return [
            jax.ShapeDtypeStruct((1,), I32, sharding=sharding),
            jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding),
        ]


type Compute = Callable[[Any, Any], Any]


def computing(compute: Compute) -> Callable[..., None]:
    """A kernel that stores what `compute(number, x)` makes, along all rows or lanes."""

    def body(number: Any, x: Any, out: Any) -> None:
        out[...] = jnp.broadcast_to(compute(number[0], x).astype(F32), out.shape)

    return body


def copying(source: Compute, target: Callable[[Any], Any]) -> Callable[..., None]:
    """A kernel that copies between `source(number, x)` and `target(scratch)`."""

    def body(number: Any, x: Any, out: Any, scratch: Any, semaphore: Any) -> None:
        pltpu.async_copy(source(number[0], x), target(scratch), semaphore).wait()
        out[...] = jnp.zeros(out.shape, out.dtype)

    return body


def sending(number: Any, x: Any, out: Any, *parts: Any, priority: int = 0) -> None:
    """A message to itself."""
    copy = pltpu.make_async_remote_copy(*parts, device_id={"x": 0})
    copy.start(priority=priority)
    copy.wait()
    out[...] = jnp.zeros(out.shape, out.dtype)


def sending_first(number: Any, x: Any, out: Any, *parts: Any) -> None:
    sending(number, x, out, *parts, priority=1)


def store_row(number: Any, x: Any, out: Any, rows: Any) -> None:
    rows[pl.ds(number[0], 1), :] = x[0:1, :]
    out[...] = rows[0:8, :].astype(F32)


def masked_store(number: Any, x: Any, out: Any) -> None:
    out[...] = x[0:8, :]
    pltpu.store(out.at[0], x[0, :], mask=lax.iota(I32, 128) < number[0])


def space(shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    return (pltpu.VMEM(shape, dtype), pltpu.SemaphoreType.DMA)


def message(rows: int, dtype: Any, lanes: int = 128) -> tuple[Any, ...]:
    part, semaphore = pltpu.VMEM((rows, lanes), dtype), pltpu.SemaphoreType.DMA
    return (part, part, semaphore, semaphore)


CONSTRUCTS = (
    # rows of packed arrays
    Construct(
        name="a row of bf16 is read at run time",
        body=computing(lambda number, x: x[pl.ds(number, 1), :]),
        dtype=BF16,
        rule="L208",
        refused=True,
    ),
    Construct(
        name="a row of bf16 inside a block is read at run time",
        body=computing(lambda number, x: x[number, pl.ds(number, 1), :]),
        shape=(4, 16, 128),
        dtype=BF16,
        rule="L208",
        refused=True,
    ),
    Construct(
        name="a row of bf16 is stored at run time",
        body=store_row,
        dtype=BF16,
        scratch=(pltpu.VMEM((16, 128), BF16),),
        rule="L208",
        refused=True,
    ),
    Construct(
        name="a tile of bf16 begins anywhere",
        body=computing(lambda number, x: x[pl.ds(number + 8, 16), :][0:8]),
        shape=(64, 128),
        dtype=BF16,
        rule="L208",
        refused=True,
    ),
    Construct(
        name="a row of bf16 is copied at run time",
        body=copying(lambda number, x: x.at[pl.ds(number, 1), :], lambda v: v),
        dtype=BF16,
        copied=True,
        scratch=space((1, 128), BF16),
        rule="L208",
        refused=True,
    ),
    Construct(
        name="a tile of bf16 begins at a product",
        body=computing(lambda number, x: x[pl.ds(number * 16 + 8, 8), :]),
        shape=(64, 128),
        dtype=BF16,
    ),
    Construct(
        name="a tile of bf16 begins where it is said to",
        body=computing(lambda number, x: x[pl.ds(pl.multiple_of(number, 8), 8), :]),
        shape=(64, 128),
        dtype=BF16,
    ),
    Construct(
        name="a block of bf16 is chosen at run time",
        body=computing(lambda number, x: x[number, 0:8]),
        shape=(4, 16, 128),
        dtype=BF16,
    ),
    Construct(name="a row of bf16 is read", body=computing(lambda _, x: x[3:4]), dtype=BF16),
    Construct(
        name="a row of f32 is read at run time",
        body=computing(lambda number, x: x[pl.ds(number, 1), :]),
    ),
    # shapes
    Construct(
        name="the target of a copy is reshaped across tiles",
        body=copying(lambda _, x: x.at[0:8, :], lambda v: v.reshape(8, 128)),
        copied=True,
        scratch=space((16, 64), F32),
        rule="L209",
        refused=True,
    ),
    Construct(
        name="the target of a copy is reshaped, tiles stay whole",
        body=copying(lambda _, x: x.at[0:8, :], lambda v: v.reshape(8, 128)),
        copied=True,
        scratch=space((1, 8, 128), F32),
        rule="L209",
    ),
    Construct(
        name="booleans are reshaped",
        body=computing(lambda _, x: jnp.where((x[0:8] > 0).reshape(1024)[None, 0:128], 1.0, 0.0)),
        rule="L210",
        refused=True,
    ),
    Construct(
        name="a row of booleans",
        body=computing(lambda _, x: jnp.where((x[0:8] > 0)[0], x[1], 0.0)),
    ),
    Construct(
        name="all numbers in one dimension",
        body=computing(lambda _, x: x[0:8].reshape(1024)[None, 0:128]),
    ),
    Construct(name="a masked store of one row", body=masked_store),
    # arithmetic
    Construct(
        name="sorting", body=computing(lambda _, x: jnp.sort(x[0:8])), rule="L204", refused=True
    ),
    Construct(
        name="cumulative sums",
        body=computing(lambda _, x: jnp.cumsum(x[0:8], axis=1)),
        rule="L204",
        refused=True,
    ),
    Construct(
        name="a stable top-k",
        body=computing(lambda _, x: lax.top_k(x[0:8], 8)[0][:, 0:1]),
        rule="L204",
        refused=True,
    ),
    Construct(
        name="a top-k",
        body=computing(lambda _, x: lax.top_k(x[0:8], 8, is_stable=False)[0][:, 0:1]),
    ),
    Construct(
        name="unsigned vectors",
        body=computing(lambda _, x: x[0:8].astype(U32) + U32(1)),
        rule="L203",
    ),
    # copies and messages
    Construct(
        name="a message with a priority",
        body=sending_first,
        scratch=message(8, F32),
        rule="L202",
        refused=True,
    ),
    Construct(name="a message", body=sending, scratch=message(8, F32)),
    Construct(
        name="a message of two rows",
        body=sending,
        scratch=message(2, F32),
        rule="L103",
        lint=PROGRAM,
    ),
    Construct(
        name="one row of a tile of bf16 is copied",
        body=copying(lambda _, x: x.at[0:1, :], lambda v: v.at[0:1, :]),
        dtype=BF16,
        copied=True,
        scratch=space((16, 128), BF16),
        rule="L101",
        lint=PROGRAM,
        refused=True,
    ),
    Construct(
        name="a register of lanes that begins inside of another",
        body=copying(lambda _, x: x.at[:, 64:192], lambda v: v),
        shape=(8, 256),
        copied=True,
        scratch=space((8, 128), F32),
        rule="L102",
        lint=PROGRAM,
        refused=True,
    ),
    Construct(
        name="an item of six rows is copied",
        body=copying(lambda number, x: x.at[number], lambda v: v),
        shape=(64, 6, 128),
        copied=True,
        scratch=space((6, 128), F32),
        lint=PROGRAM,
    ),
    Construct(
        name="a loop is unrolled in part",
        body=computing(lambda _, x: lax.fori_loop(0, 8, lambda _, a: a + x[0:8], x[0:8], unroll=4)),
        rule="L205",
        lint=TEXT,
    ),
    Construct(
        name="four bytes are copied",
        body=copying(lambda _, x: x.at[0, 0:1], lambda v: v),
        copied=True,
        scratch=space((1,), F32),
        rule="L104",
        lint=PROGRAM,
        refused=True,
    ),
    Construct(
        name="a row of bf16 is copied inside VMEM",
        body=copying(lambda _, x: x.at[0:1, :], lambda v: v.at[8:9, :]),
        dtype=BF16,
        scratch=space((16, 128), BF16),
        rule="L108",
        lint=PROGRAM,
        refused=True,
    ),
)


def main(topology: str) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh, everywhere = Mesh(np.array(devices[:1]), ("x",)), PartitionSpec()
    for one in CONSTRUCTS:
        launch = jax.shard_map(
            one.call(False), mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False
        )
        error = None
        try:
            jax.jit(launch).lower(*one.arguments(NamedSharding(mesh, everywhere))).compile()
        except Exception as refused:  # whatever it says
            error = f"{type(refused).__name__}: {refused}"[:400]
        print(json.dumps({"name": one.name, "error": error}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
