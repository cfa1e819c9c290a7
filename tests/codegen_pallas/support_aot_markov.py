"""The walk of a drafter at the sizes of one of 32 ranks; see `tests.codegen_pallas.support_aot`."""

from __future__ import annotations

from typing import Any

from tests.codegen_pallas.aot_case import Case
from tests.codegen_pallas.aot_case import types

COLUMNS = 5120  # of a rank
VOCABULARY = 32 * COLUMNS
RANK = 256
WIDTH = 7168
BLOCK = 8
ROWS = 8


def markov_case(ranks: int) -> Case:
    """One block of eight rows, and its cut."""
    _, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    lanes = WIDTH + RANK

    def body(tokens: Any, positions: Any, logits: Any, hidden: Any, head: Any, *rest: Any) -> None:
        successor, predecessor, out, cut, confidence, previous, scores, *buffers, sems = rest
        send, receive, exchanged = buffers
        s.entry_barrier(ranks)
        sizes = {"batch": 1, "rows_per_sequence": BLOCK}
        judged = s.View(ref=confidence, start=0, width=128)
        s.markov_walk(
            s.View(ref=logits, start=0, width=COLUMNS),
            s.View(ref=hidden, start=0, width=WIDTH),
            judge=(judged, head[0:1], head[1:2, 0:1]),
            predecessor=predecessor,
            successor=successor,
            previous=previous,
            scores=scores,
            sems=sems,
            exchanges=tuple(
                s.Exchange(
                    send=send.at[turn],
                    receive=receive.at[turn],
                    send_sem=exchanged.at[turn, 0],
                    receive_sem=exchanged.at[turn, 1],
                )
                for turn in range(2)
            ),
            tokens=tokens,
            out=out,
            ranks=ranks,
            rounds=True,
            **sizes,
        )
        s.cut_drafts(positions, judged, cut, threshold=0.5, **sizes)

    return Case(
        name="markov_walk",
        barrier=ranks > 1,
        body=body,
        operands=[
            (array((BLOCK,), jnp.int32), pltpu.SMEM),
            (array((BLOCK,), jnp.int32), pltpu.SMEM),
            (array((ROWS, COLUMNS), jnp.float32), pltpu.VMEM),
            (array((ROWS, WIDTH), jnp.float32), pltpu.VMEM),
            (array((8, lanes), jnp.float32), pltpu.VMEM),
            (array((COLUMNS, RANK), jnp.bfloat16), pltpu.VMEM),
            (array((VOCABULARY, RANK), jnp.bfloat16), pl.ANY),
        ],
        results=[
            (array((BLOCK,), jnp.int32), pltpu.SMEM),
            (array((BLOCK,), jnp.int32), pltpu.SMEM),
            (array((ROWS, 128), jnp.float32), pltpu.VMEM),
        ],
        scratch=[
            pltpu.VMEM((1, 16, RANK), jnp.bfloat16),
            pltpu.VMEM((ROWS, COLUMNS), jnp.float32),
            pltpu.VMEM((2, 2 * ROWS, 128), jnp.int32),
            pltpu.VMEM((2, ranks, 2 * ROWS, 128), jnp.int32),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SemaphoreType.DMA((1,)),
        ],
    )
