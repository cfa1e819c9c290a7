"""The support functions of speculative rounds at full size; see `tests.codegen_pallas.support_aot`.

Shapes are those of one of eight ranks of a 27B model and its drafter, with blocks of 8 rows.
"""

from __future__ import annotations

from typing import Any

from tests.codegen_pallas.aot_case import Case
from tests.codegen_pallas.aot_case import types

BATCH = 2
BLOCK = 8  # rows of a sequence
ROWS = BATCH * BLOCK
HIDDEN = 5120
CONTEXT = 4096
LAYERS = 4
SIZES = {"batch": BATCH, "rows_per_sequence": BLOCK}


def round_cases(ranks: int) -> list[Case]:
    """Every support function that only rounds have."""
    return [
        scalars_case(),
        taps_case(),
        conv_case(),
        kept_delta_case("kept_delta", key_heads=2, value_heads=6),
        kept_delta_case("kept_delta_head_loop", key_heads=16, value_heads=48),
        rows_attention_case("rows_attention_target", heads=3, kv_heads=1, head_dim=256),
        rows_attention_case(
            "rows_attention_drafter", heads=4, kv_heads=1, head_dim=128, window=2048
        ),
        top_k_case(ranks),
        walk_case(),
        dynamic_conv_case(),
    ]


def scalars_case() -> Case:
    """Acceptance, positions and tokens of the next block, and the loop around two rounds."""
    _, jnp, array, _, pltpu = types()
    from types import SimpleNamespace

    from mkc.codegen_pallas import support as s

    by_row = ("tokens", "positions")
    by_sequence = ("kept", "rounds", "budgets")
    results = {
        "emitted": 2 * ROWS,
        "counts": 2 * BATCH,
        "drafts": 2 * BATCH,
        "ran": 1,
        "tokens_out": ROWS,
        "positions_out": ROWS,
        "kept_out": BATCH,
    }
    scratch = {
        "s_tokens": ROWS,
        "s_positions": ROWS,
        "s_kept": BATCH,
        "s_budgets": BATCH,
        "s_emitted": ROWS,
        "s_count": BATCH,
        "s_last": BATCH,
        "s_block": ROWS,
        "s_next": ROWS,
    }
    names = [*by_row, *by_sequence, "stop_ids", "best", *results, *scratch]

    def body(*refs: Any) -> None:
        m = SimpleNamespace(**dict(zip(names, refs, strict=True)))
        s.begin_block_rounds(m, **SIZES)
        for index in range(2):
            s.accept_greedy(
                m.best[...],
                tokens=m.s_tokens,
                positions=m.s_positions,
                emitted=m.s_emitted,
                count=m.s_count,
                last=m.s_last,
                **SIZES,
            )
            s.kept_positions(m.s_positions, m.s_count, m.s_next, **SIZES)
            s.next_positions(m.s_positions, m.s_count, m.s_next, context=CONTEXT, **SIZES)
            s.block_tokens(m.s_last, m.s_block, mask=7, **SIZES)
            s.end_block_round(
                m,
                index,
                emitted=m.s_emitted,
                count=m.s_count,
                tokens=m.s_block,
                positions=m.s_next,
                **SIZES,
            )

    def scalars(size: int) -> tuple[Any, Any]:
        return array((size,), jnp.int32), pltpu.SMEM

    return Case(
        name="round_scalars",
        body=body,
        operands=[
            *[scalars(ROWS) for _ in by_row],
            *[scalars(BATCH) for _ in by_sequence],
            scalars(8 * BATCH),
            (array((ROWS, 1), jnp.int32), pltpu.VMEM),
        ],
        results=[scalars(size) for size in results.values()],
        scratch=[pltpu.SMEM((size,), jnp.int32) for size in scratch.values()],
    )


def taps_case() -> Case:
    """Sixteen executions show [16, 5120], of which one is read."""
    jax, jnp, array, _, pltpu = types()
    from mkc.codegen_pallas import support as s

    width = HIDDEN
    places = tuple(0 if index == 5 else 1 for index in range(16))

    def body(x: Any, out: Any, taps: Any) -> None:
        def layer(index: Any, carry: Any) -> Any:
            s.store_tap(x[...], taps, index, places)
            return carry

        jax.lax.fori_loop(0, len(places), layer, jnp.int32(0))
        out[...] = taps[:, 0:width].astype(jnp.float32)

    return Case(
        name="taps",
        body=body,
        operands=[(array((ROWS, HIDDEN), jnp.float32), pltpu.VMEM)],
        results=[(array((ROWS, width), jnp.float32), pltpu.VMEM)],
        scratch=[pltpu.VMEM((ROWS, 2 * HIDDEN), jnp.bfloat16)],
    )


def conv_case() -> Case:
    """Convolutions of four taps over 1280 channels with both of their streams."""
    jax, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    channels, slots = 1280, 2
    histories = array((LAYERS, 3, 8, channels), jnp.bfloat16)
    inputs = array((LAYERS, ROWS, channels), jnp.bfloat16)

    def body(kept: Any, positions: Any, x: Any, taps: Any, *rest: Any) -> None:
        _, _, history, rows, out, history_ring, rows_ring, sems = rest
        history = _in_place(s, history, history_ring, sems.at[0], sems.at[1])
        rows = _in_place(s, rows, rows_ring, sems.at[2], sems.at[3])

        def layer(_: Any, cursors: Any) -> Any:
            for stream, cursor in zip((history, rows), cursors, strict=True):
                s.stream_wait(stream, cursor)
            out[...] = s.kept_conv(
                history,
                cursors[0],
                rows,
                cursors[1],
                x[...],
                [taps[tap : tap + 1] for tap in range(4)],
                kept=kept,
                positions=positions,
                activation=s.silu,
                **SIZES,
            )
            return tuple(
                s.stream_advance(stream, cursor)
                for stream, cursor in zip((history, rows), cursors, strict=True)
            )

        first = (s.stream_prologue(history), s.stream_prologue(rows))
        jax.lax.fori_loop(0, LAYERS, layer, first)
        s.stream_drain(history)
        s.stream_drain(rows)

    return Case(
        name="kept_conv",
        body=body,
        operands=[
            (array((BATCH,), jnp.int32), pltpu.SMEM),
            (array((ROWS,), jnp.int32), pltpu.SMEM),
            (array((ROWS, channels), jnp.float32), pltpu.VMEM),
            (array((4, channels), jnp.float32), pltpu.VMEM),
            (histories, pl.ANY),
            (inputs, pl.ANY),
        ],
        results=[
            (histories, pl.ANY),
            (inputs, pl.ANY),
            (array((ROWS, channels), jnp.float32), pltpu.VMEM),
        ],
        scratch=[
            pltpu.VMEM((slots, 3, 8, channels), jnp.bfloat16),
            pltpu.VMEM((slots, ROWS, channels), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((4, slots)),
        ],
        aliases={4: 0, 5: 1},
    )


def kept_delta_case(name: str, *, key_heads: int, value_heads: int) -> Case:
    """Layers of the delta rule over blocks of rows, head dimension 128."""
    jax, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    slots, items = 2, LAYERS * BATCH
    keys, values = key_heads * 128, value_heads * 128
    shapes = [(values, 128), (BLOCK, keys), (BLOCK, values), (BLOCK, 128)]
    arrays = [array((items, *shape), jnp.float32) for shape in shapes]

    def body(kept: Any, positions: Any, mix: Any, gates: Any, *rest: Any) -> None:
        hbms, out, rings, sems = rest[4:8], rest[8], rest[9:13], rest[13]
        streams = [
            _in_place(s, hbm, ring, sems.at[2 * index], sems.at[2 * index + 1])
            for index, (hbm, ring) in enumerate(zip(hbms, rings, strict=True))
        ]
        out[...] = jnp.zeros_like(out)

        def layer(_: Any, cursors: Any) -> Any:
            pairs = [one for pair in zip(streams, cursors, strict=True) for one in pair]
            return s.kept_delta_rule(
                *pairs,
                positions,
                kept,
                q=s.View(ref=mix, start=0, width=keys),
                k=s.View(ref=mix, start=keys, width=keys),
                v=s.View(ref=mix, start=2 * keys, width=values),
                beta=s.View(ref=gates, start=0, width=value_heads),
                decay=s.View(ref=gates, start=128, width=value_heads),
                out=s.View(ref=out, start=0, width=values),
                key_heads=key_heads,
                value_heads=value_heads,
                key_dim=128,
                value_dim=128,
                **SIZES,
            )

        jax.lax.fori_loop(0, LAYERS, layer, tuple(s.stream_prologue(one) for one in streams))
        for stream in streams:
            s.stream_drain(stream)

    return Case(
        name=name,
        body=body,
        operands=[
            (array((BATCH,), jnp.int32), pltpu.SMEM),
            (array((ROWS,), jnp.int32), pltpu.SMEM),
            (array((ROWS, 2 * keys + values), jnp.float32), pltpu.VMEM),
            (array((ROWS, 256), jnp.float32), pltpu.VMEM),
            *[(one, pl.ANY) for one in arrays],
        ],
        results=[
            *[(one, pl.ANY) for one in arrays],
            (array((ROWS, values), jnp.float32), pltpu.VMEM),
        ],
        scratch=[
            *[pltpu.VMEM((slots, *shape), jnp.float32) for shape in shapes],
            pltpu.SemaphoreType.DMA((8, slots)),
        ],
        aliases={4 + index: index for index in range(4)},
    )


def rows_attention_case(
    name: str, *, heads: int, kv_heads: int, head_dim: int, window: int | None = None
) -> Case:
    """Layers of attention of blocks; with a window it is a drafter's, with remembered rows."""
    jax, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    slots, tile = 4, 256
    width, queries = kv_heads * head_dim, heads * head_dim
    drafts = window is not None

    def body(first: Any, rows: Any, mix: Any, _k: Any, _v: Any, *rest: Any) -> None:
        key_hbm, value_hbm, out, key_ring, value_ring, arrived, *rest = rest
        key_new, value_new, written, awake = rest
        kv = s.KvStream(
            key_hbm=key_hbm,
            value_hbm=value_hbm,
            key_ring=key_ring,
            value_ring=value_ring,
            arrived=arrived,
            key_new=key_new,
            value_new=value_new,
            written=written,
            awake=awake,
            layers=LAYERS,
            slots=slots,
            tile=tile,
            window=window,
        )
        own, other = (
            [s.View(ref=mix, start=queries + n * width, width=width) for n in pair]
            for pair in ((0, 1), (2, 3))
        )

        def layer(_: Any, cursor: Any) -> Any:
            return s.rows_attention(
                kv,
                cursor,
                first,
                q=s.View(ref=mix, start=0, width=queries),
                k=own[0],
                v=own[1],
                positions=rows if drafts else first,
                remembered=(*other, first) if drafts else None,
                out=s.View(ref=out, start=0, width=queries),
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                causal=not drafts,
                window=window,
                **SIZES,
            )

        out[...] = jnp.zeros_like(out)
        jax.lax.fori_loop(0, LAYERS, layer, s.rows_prologue(kv, first, BATCH, BLOCK))
        s.rows_drain(kv, first, BATCH, BLOCK)

    cache = array((LAYERS, BATCH, CONTEXT, width), jnp.bfloat16)
    ring = pltpu.VMEM((slots, tile, width), jnp.bfloat16)
    new = pltpu.VMEM((BATCH, 32, width), jnp.bfloat16)
    return Case(
        name=name,
        body=body,
        operands=[
            (array((ROWS,), jnp.int32), pltpu.SMEM),
            (array((ROWS,), jnp.int32), pltpu.SMEM),
            (array((ROWS, queries + 4 * width), jnp.float32), pltpu.VMEM),
            (cache, pl.ANY),
            (cache, pl.ANY),
        ],
        results=[
            (cache, pl.ANY),
            (cache, pl.ANY),
            (array((ROWS, queries), jnp.float32), pltpu.VMEM),
        ],
        scratch=[
            ring,
            ring,
            pltpu.SemaphoreType.DMA((2, slots)),
            new,
            new,
            pltpu.SemaphoreType.DMA((2, BATCH)),
            pltpu.SMEM((BATCH,), jnp.int32),
        ],
        aliases={3: 0, 4: 1},
    )


def top_k_case(ranks: int) -> Case:
    """The 16 largest of 31040 columns per rank and row, then of all ranks'."""
    _, jnp, array, _, pltpu = types()
    from mkc.codegen_pallas import support as s

    columns, k = 31040, 16

    def body(logits: Any, values: Any, ids: Any, send: Any, receive: Any, sems: Any) -> None:
        s.entry_barrier(ranks)
        found = s.local_top_k(s.View(ref=logits, start=0, width=columns), k, columns)
        values[...], ids[...] = s.sharded_top_k(
            *found,
            k=k,
            send=send,
            receive=receive,
            send_sem=sems.at[0],
            receive_sem=sems.at[1],
            ranks=ranks,
            columns_per_rank=columns,
        )

    return Case(
        name="top_k",
        barrier=ranks > 1,
        body=body,
        operands=[(array((ROWS, columns), jnp.float32), pltpu.VMEM)],
        results=[
            (array((ROWS, 128), jnp.float32), pltpu.VMEM),
            (array((ROWS, 128), jnp.int32), pltpu.VMEM),
        ],
        scratch=[
            pltpu.VMEM((2 * ROWS, 128), jnp.int32),
            pltpu.VMEM((ranks, 2 * ROWS, 128), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )


def walk_case() -> Case:
    """Seven choices of 16 candidates for each sequence, codebooks [248320, 256]."""
    _, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    rank, k = 256, 16

    def body(tokens: Any, values: Any, ids: Any, hidden: Any, *rest: Any) -> None:
        predecessor, successor, out, candidate_ids, previous, candidates, sems = rest
        s.selector_walk(
            s.View(ref=values, start=0, width=128),
            s.View(ref=ids, start=0, width=128),
            s.View(ref=hidden, start=0, width=rank),
            predecessor=predecessor,
            successor=successor,
            candidate_ids=candidate_ids,
            previous=previous,
            candidates=candidates,
            sems=sems,
            tokens=tokens,
            out=out,
            k=k,
            **SIZES,
        )

    book = array((248320, rank), jnp.bfloat16)
    return Case(
        name="selector_walk",
        body=body,
        operands=[
            (array((ROWS,), jnp.int32), pltpu.SMEM),
            (array((ROWS, 128), jnp.float32), pltpu.VMEM),
            (array((ROWS, 128), jnp.int32), pltpu.VMEM),
            (array((ROWS, rank), jnp.float32), pltpu.VMEM),
            (book, pl.ANY),
            (book, pl.ANY),
        ],
        results=[(array((ROWS,), jnp.int32), pltpu.SMEM)],
        scratch=[
            pltpu.SMEM((ROWS, 128), jnp.int32),
            pltpu.VMEM((BATCH, 16, rank), jnp.bfloat16),
            pltpu.VMEM((2, BATCH * k * 16, rank), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((4,)),
        ],
    )


def dynamic_conv_case() -> Case:
    """Two taps over 5120 channels, 16 of which share a kernel; the second of two sides."""
    _, jnp, array, _, pltpu = types()
    from mkc.codegen_pallas import support as s

    def body(x: Any, kernels: Any, base: Any, out: Any) -> None:
        out[...] = s.dynamic_conv(
            x[...],
            kernels[...],
            [base[tap : tap + 1] for tap in range(2)],
            side=1,
            group=16,
            rows_per_sequence=BLOCK,
        )

    return Case(
        name="dynamic_conv",
        body=body,
        operands=[
            (array((ROWS, HIDDEN), jnp.float32), pltpu.VMEM),
            (array((ROWS, 4 * HIDDEN // 16), jnp.float32), pltpu.VMEM),
            (array((2, HIDDEN), jnp.float32), pltpu.VMEM),
        ],
        results=[(array((ROWS, HIDDEN), jnp.float32), pltpu.VMEM)],
        scratch=[],
    )


def _in_place(s: Any, hbm: Any, ring: Any, arrived: Any, written: Any) -> Any:
    """A stream whose items are changed in place."""
    items, slots = hbm.shape[0], ring.shape[0]
    return s.Stream(hbm=hbm, ring=ring, arrived=arrived, written=written, items=items, slots=slots)
