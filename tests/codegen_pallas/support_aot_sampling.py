"""Sampling inside rounds at full size; see `tests.codegen_pallas.support_aot`.

Shapes are those of one of eight ranks with a vocabulary of 248,320 and blocks of 8 rows.
"""

from __future__ import annotations

from typing import Any

from tests.codegen_pallas.aot_case import Case
from tests.codegen_pallas.aot_case import types

BLOCK = 8  # rows of a sequence
COLUMNS = 31_040
CANDIDATES = 16
VOCABULARY = 248_320


def sampling_cases(ranks: int) -> list[Case]:
    """Acceptance for one sequence and for four, and the walk of two."""
    return [accept_case(ranks, batch=1), accept_case(ranks, batch=4), walk_case(batch=2)]


def accept_case(ranks: int, *, batch: int) -> Case:
    """The largest 16 logits of each of eight ranks, two exchanges, one race for each sequence."""
    _, jnp, array, _, pltpu = types()
    from mkc.codegen_pallas import support as s

    rows, listed = batch * BLOCK, 128 // ranks
    messages = (3 * rows, 16)

    def body(*refs: Any) -> None:
        logits, candidates, proposal, temperature, top_p, min_p, top_k, seed, *refs_ = refs
        tokens, positions, forced, emitted, count, last, *buffers, sems = refs_
        s.entry_barrier(ranks)
        view = s.View(ref=logits, start=0, width=COLUMNS)
        values, ids = s.local_top_k(view, listed, COLUMNS)
        first, second = (
            s.Exchange(
                send=buffers[2 * index],
                receive=buffers[2 * index + 1],
                send_sem=sems.at[2],
                receive_sem=sems.at[index],
            )
            for index in range(2)
        )
        s.accept_sampled(
            view,
            values,
            ids,
            listed=listed,
            columns=COLUMNS,
            ranks=ranks,
            sampling=s.Sampling(
                temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, seed=seed
            ),
            proposal=(
                s.View(ref=candidates, start=0, width=CANDIDATES),
                s.View(ref=proposal, start=0, width=CANDIDATES),
            ),
            first=None if ranks == 1 else first,
            second=None if ranks == 1 else second,
            tokens=tokens,
            positions=positions,
            forced=forced,
            emitted=emitted,
            count=count,
            last=last,
            batch=batch,
            rows_per_sequence=BLOCK,
        )

    def scalars(size: int, dtype: Any = jnp.int32) -> tuple[Any, Any]:
        return array((size,), dtype), pltpu.SMEM

    return Case(
        name=f"sampled_accept_{batch}",
        body=body,
        operands=[
            (array((rows, COLUMNS), jnp.float32), pltpu.VMEM),
            (array((rows, CANDIDATES), jnp.int32), pltpu.VMEM),
            (array((rows, CANDIDATES), jnp.float32), pltpu.VMEM),
            *[scalars(batch, jnp.float32) for _ in range(3)],
            scalars(batch),
            scalars(2 * batch),
            *[scalars(rows) for _ in range(3)],
        ],
        results=[scalars(rows), scalars(batch), scalars(batch)],
        scratch=[
            *[
                buffer
                for height in messages
                for buffer in (
                    pltpu.VMEM((height, 128), jnp.int32),
                    pltpu.VMEM((ranks, height, 128), jnp.int32),
                )
            ],
            pltpu.SemaphoreType.DMA((3,)),
        ],
        barrier=ranks > 1,
    )


def walk_case(*, batch: int) -> Case:
    """Seven draws of 16 candidates for each sequence, codebooks [248320, 256]."""
    _, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    rank, rows = 256, batch * BLOCK
    names = ("candidate_ids", "previous", "candidates", "sems")

    def body(tokens: Any, positions: Any, temperature: Any, seed: Any, *rest: Any) -> None:
        values, ids, hidden, predecessor, successor, out, proposal, *scratch = rest
        s.sampled_walk(
            s.View(ref=values, start=0, width=128),
            s.View(ref=ids, start=0, width=128),
            s.View(ref=hidden, start=0, width=rank),
            proposal=s.View(ref=proposal, start=0, width=CANDIDATES),
            temperature=temperature,
            seed=seed,
            positions=positions,
            predecessor=predecessor,
            successor=successor,
            tokens=tokens,
            out=out,
            batch=batch,
            rows_per_sequence=BLOCK,
            k=CANDIDATES,
            **dict(zip(names, scratch, strict=True)),
        )

    book = array((VOCABULARY, rank), jnp.bfloat16)
    return Case(
        name="sampled_walk",
        body=body,
        operands=[
            *[(array((rows,), jnp.int32), pltpu.SMEM) for _ in range(2)],
            (array((batch,), jnp.float32), pltpu.SMEM),
            (array((2 * batch,), jnp.int32), pltpu.SMEM),
            (array((rows, 128), jnp.float32), pltpu.VMEM),
            (array((rows, 128), jnp.int32), pltpu.VMEM),
            (array((rows, rank), jnp.float32), pltpu.VMEM),
            (book, pl.ANY),
            (book, pl.ANY),
        ],
        results=[
            (array((rows,), jnp.int32), pltpu.SMEM),
            (array((rows, 128), jnp.float32), pltpu.VMEM),
        ],
        scratch=[
            pltpu.SMEM((rows, 128), jnp.int32),
            pltpu.VMEM((batch, 16, rank), jnp.bfloat16),
            pltpu.VMEM((2, batch * CANDIDATES * 16, rank), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((4,)),
        ],
    )
