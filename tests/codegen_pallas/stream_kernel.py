"""The smallest module that follows the protocol of a generated kernel; the tests compile it.

Every rank streams its own weight tiles through a ring, adds the products to a buffer it was given to
keep, and sends the result to its right neighbour.
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


def abstract_arguments(mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """x bf16 [ROWS, WIDTH], tape bf16 [RANKS * TILES, WIDTH, WIDTH], sums f32 [RANKS * ROWS, WIDTH]."""
    replicated = NamedSharding(mesh, PartitionSpec())
    by_rank = NamedSharding(mesh, PartitionSpec("tp"))
    return (
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16, sharding=replicated),
        jax.ShapeDtypeStruct((RANKS * TILES, WIDTH, WIDTH), jnp.bfloat16, sharding=by_rank),
        jax.ShapeDtypeStruct((RANKS * ROWS, WIDTH), jnp.float32, sharding=by_rank),
    )


def build(mesh: Mesh, interpret: bool = False):
    """(x, tape, sums) -> (sums, what the left neighbour sent); `sums` is updated in place."""

    def per_rank(x, tape, sums):
        # Not `pl.ANY`: there XLA may choose VMEM, and copies the operand into it before the launch.
        hbm = pl.BlockSpec(memory_space=pltpu.HBM)
        return pl.pallas_call(
            kernel,
            out_shape=(
                jax.ShapeDtypeStruct(sums.shape, sums.dtype),
                jax.ShapeDtypeStruct(sums.shape, sums.dtype),
            ),
            in_specs=[hbm, hbm, hbm],
            out_specs=(hbm, hbm),
            scratch_shapes=[
                pltpu.VMEM((SLOTS, WIDTH, WIDTH), jnp.bfloat16),
                pltpu.VMEM((ROWS, WIDTH), jnp.bfloat16),
                pltpu.VMEM((ROWS, WIDTH), jnp.float32),
                pltpu.SemaphoreType.DMA((SLOTS,)),
                pltpu.SemaphoreType.DMA((3,)),
            ],
            input_output_aliases={2: 0},
            compiler_params=pltpu.CompilerParams(collective_id=0, has_side_effects=True),
            interpret=interpret,
            name=NAME,
        )(x, tape, sums)

    sharded = jax.shard_map(
        per_rank,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("tp"), PartitionSpec("tp")),
        out_specs=(PartitionSpec("tp"), PartitionSpec("tp")),
        check_vma=False,
    )
    return jax.jit(sharded, donate_argnums=(2,))


def kernel(x_hbm, tape, sums_in, sums_out, received, ring, x, total, arrived, done):
    """One rank. `sums_in` and `sums_out` are the same memory."""
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
    for source, destination in ((x_hbm, x), (sums_in, total)):
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
    write = pltpu.make_async_copy(total, sums_out, done.at[0])
    write.start()
    write.wait()
