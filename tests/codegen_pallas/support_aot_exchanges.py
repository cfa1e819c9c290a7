"""Exchanges of full-size kernels for the TPU compiler; see `support_aot`."""

from __future__ import annotations

from typing import Any

from tests.codegen_pallas.aot_case import Case
from tests.codegen_pallas.aot_case import types

BATCH = 8
ROWS = 8
HIDDEN = 5120
VOCABULARY = 31232 * 8
LAYERS = 4


def one_shot_case(ranks: int, *, rows: int) -> Case:
    """Two one-shot exchanges of [rows, 5120] f32 per loop step, buffers in turn."""
    jax, jnp, array, _, pltpu = types()
    from mkc.codegen_pallas import support as s

    def body(x: Any, out: Any, send: Any, even: Any, odd: Any, sems: Any) -> None:
        s.entry_barrier(ranks)
        out[...] = x[...]

        def step(_: Any, carry: Any) -> Any:
            for parity, receive in enumerate((even, odd)):
                out[...] = s.all_reduce_one_shot(
                    out[...],
                    send=send,
                    receive=receive,
                    send_sem=sems.at[2],
                    receive_sem=sems.at[parity],
                    ranks=ranks,
                )
            return carry

        jax.lax.fori_loop(0, LAYERS, step, jnp.int32(0))

    value = array((rows, HIDDEN), jnp.float32)
    receive = pltpu.VMEM((ranks, rows, HIDDEN), jnp.float32)
    return Case(
        name=f"one_shot_{rows}",
        barrier=ranks > 1,
        body=body,
        operands=[(value, pltpu.VMEM)],
        results=[(value, pltpu.VMEM)],
        scratch=[
            pltpu.VMEM((rows, HIDDEN), jnp.float32),
            receive,
            receive,
            pltpu.SemaphoreType.DMA((3,)),
        ],
    )


def two_phase_case(ranks: int) -> Case:
    """One two-phase exchange of [8, 5120] per loop step, the same buffers every time."""
    jax, jnp, array, _, pltpu = types()
    from mkc.codegen_pallas import support as s

    columns = HIDDEN // ranks

    def body(x: Any, out: Any, scattered: Any, send: Any, gathered: Any, sems: Any) -> None:
        s.entry_barrier(ranks)
        out[...] = x[...]

        def step(_: Any, carry: Any) -> Any:
            out[...] = s.all_reduce_two_phase(
                out,
                scattered=scattered,
                send=send,
                gathered=gathered,
                scatter_send_sem=sems.at[0],
                scatter_receive_sem=sems.at[1],
                gather_send_sem=sems.at[2],
                gather_receive_sem=sems.at[3],
                ranks=ranks,
            )
            return carry

        jax.lax.fori_loop(0, LAYERS, step, jnp.int32(0))

    value = array((ROWS, HIDDEN), jnp.float32)
    return Case(
        name="two_phase",
        barrier=ranks > 1,
        body=body,
        operands=[(value, pltpu.VMEM)],
        results=[(value, pltpu.VMEM)],
        scratch=[
            pltpu.VMEM((ranks, ROWS, columns), jnp.float32),
            pltpu.VMEM((ROWS, columns), jnp.bfloat16),
            pltpu.VMEM((ranks, ROWS, columns), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((4,)),
        ],
    )


def argmax_case(ranks: int) -> Case:
    """Argmax over 31232 columns per rank, over the ranks, into SMEM."""
    _, jnp, array, _, pltpu = types()
    from mkc.codegen_pallas import support as s

    columns = VOCABULARY // 8

    def body(logits: Any, out: Any, send: Any, receive: Any, sems: Any) -> None:
        s.entry_barrier(ranks)
        best, index = s.local_argmax(s.View(ref=logits, start=0, width=columns), columns - 100)
        index = s.sharded_argmax(
            best,
            index,
            send=send,
            receive=receive,
            send_sem=sems.at[0],
            receive_sem=sems.at[1],
            ranks=ranks,
            columns_per_rank=columns,
        )
        s.store_tokens(index, out, BATCH)

    return Case(
        name="argmax",
        barrier=ranks > 1,
        body=body,
        operands=[(array((ROWS, columns), jnp.float32), pltpu.VMEM)],
        results=[(array((BATCH,), jnp.int32), pltpu.SMEM)],
        scratch=[
            pltpu.VMEM((16, 128), jnp.int32),
            pltpu.VMEM((ranks, 16, 128), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )
