"""The smallest module that follows the protocol of a generated kernel; the tests compile it.

Every rank streams its own weight tiles through a ring, adds the products to a buffer that it was
given to keep, and sends the result to its right neighbour.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

NAME = "stream_probe"
RANKS = 8
ROWS = 8
WIDTH = 1024
TILES = 16
SLOTS = 4
ALIASED = False  # True: the kept buffer is an aliased result, which XLA copies before the launch


def abstract_arguments(mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """x and `sums` of one step, and the tape of all ranks."""
    replicated = NamedSharding(mesh, PartitionSpec())
    by_rank = NamedSharding(mesh, PartitionSpec("tp"))
    return (
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=replicated),
        jax.ShapeDtypeStruct((RANKS * TILES, WIDTH, WIDTH), jnp.bfloat16, sharding=by_rank),
        jax.ShapeDtypeStruct((RANKS * ROWS, WIDTH), jnp.float32, sharding=by_rank),
    )


def build(mesh: Mesh, interpret: bool = False):
    """(x, tape, sums) -> (sums, what the left neighbour sent); `sums` is updated in place."""
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    row = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    call = pl.pallas_call(
        with_alias if ALIASED else kernel,
        out_shape=(row, row) if ALIASED else (row,),
        in_specs=[hbm, hbm, hbm],
        out_specs=(hbm, hbm) if ALIASED else (hbm,),
        scratch_shapes=[
            pltpu.VMEM((SLOTS, WIDTH, WIDTH), jnp.bfloat16),
            pltpu.VMEM((ROWS, WIDTH), jnp.bfloat16),
            pltpu.VMEM((ROWS, WIDTH), jnp.float32),
            pltpu.SemaphoreType.DMA((SLOTS,)),
            pltpu.SemaphoreType.DMA((3,)),
        ],
        input_output_aliases={2: 0} if ALIASED else {},
        compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
        interpret=interpret,
        name=NAME,
    )

    def per_rank(x, tape, sums):
        # XLA prefers VMEM for what fits there, and would copy it before the launch.
        pinned = (pltpu.with_memory_space_constraint(one, pltpu.HBM) for one in (x, tape, sums))
        results = call(*pinned)
        # `sums` first: its memory goes to the first result of its shape
        return tuple(results) if ALIASED else (sums, *results)

    by_rank = PartitionSpec("tp")
    sharded = jax.shard_map(
        per_rank,
        mesh=mesh,
        in_specs=(PartitionSpec(), by_rank, by_rank),
        out_specs=(by_rank, by_rank),
        check_vma=False,
    )
    return jax.jit(sharded, donate_argnums=(2,))


def with_alias(x_hbm, tape, sums, sums_out, received, *scratch):
    """`sums` and `sums_out` are the same memory."""
    kernel(x_hbm, tape, sums, received, *scratch)


def kernel(x_hbm, tape, sums, received, ring, x, total, arrived, done):
    """One rank."""
    rank = jax.lax.axis_index("tp")
    right = jax.lax.rem(rank + 1, RANKS)
    barrier = pltpu.get_barrier_semaphore()
    for peer in range(RANKS):
        pl.semaphore_signal(barrier, device_id={"tp": peer})
    pl.semaphore_wait(barrier, RANKS)

    def load(tile):
        slot = jax.lax.rem(tile, SLOTS)
        return pltpu.make_async_copy(tape.at[tile], ring.at[slot], arrived.at[slot])

    for tile in range(SLOTS - 1):
        load(tile).start()
    for source, destination in ((x_hbm, x), (sums, total)):
        read = pltpu.make_async_copy(source, destination, done.at[0])
        read.start()
        read.wait()

    def step(tile, carry):
        load(tile).wait()
        weights = ring[jax.lax.rem(tile, SLOTS)]
        total[...] += jnp.dot(x[...], weights, preferred_element_type=jnp.float32)

        @pl.when(tile + SLOTS - 1 < TILES)
        def _():
            load(tile + SLOTS - 1).start()

        return carry

    jax.lax.fori_loop(0, TILES, step, 0)
    send = pltpu.make_async_remote_copy(
        total, received, done.at[1], done.at[2], device_id={"tp": right}
    )
    send.start()
    send.wait()
    write = pltpu.make_async_copy(total, sums, done.at[0])
    write.start()
    write.wait()
