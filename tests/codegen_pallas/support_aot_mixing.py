"""Support functions of latent and linear attention and of residual blocks, at the sizes of one of
32 ranks of a 2.8T model; see `tests.codegen_pallas.support_aot`."""

from __future__ import annotations

from typing import Any

from tests.codegen_pallas.aot_case import Case
from tests.codegen_pallas.aot_case import types

LAYERS = 4
CONTEXT = 4096
TILE = 256
ROWS = 8
WIDTH = 7168
BLOCKS = 8
LATENT_SIZES = {"key_dim": 128, "shared_dim": 64, "value_dim": 128, "rank": 512}
SHARED_LANES = 128


def mixing_cases() -> list[Case]:
    """Small heads and those of a rank; one row and eight rows of a sequence."""
    return [
        channel_delta_case("channel_delta", heads=3),
        channel_delta_case("channel_delta_head_loop", heads=16),
        kept_channel_delta_case("kept_channel_delta", heads=3),
        latent_case("latent_attention_row", heads=3, batch=8, rows_per_sequence=1),
        latent_case("latent_attention_rows", heads=3, batch=1, rows_per_sequence=8),
        latent_case("latent_attention_many_heads", heads=12, batch=1, rows_per_sequence=1),
        blocks_case(),
        mixture_parts_case(),
    ]


def _streams(s: Any, hbms: Any, rings: Any, sems: Any) -> list[Any]:
    return [
        s.Stream(
            hbm=hbm,
            ring=ring,
            arrived=sems.at[2 * index],
            written=sems.at[2 * index + 1],
            items=hbm.shape[0],
            slots=ring.shape[0],
        )
        for index, (hbm, ring) in enumerate(zip(hbms, rings, strict=True))
    ]


def channel_delta_case(name: str, *, heads: int) -> Case:
    """One row for each of eight sequences."""
    jax, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    slots, width = 4, heads * 128
    state = (width, 128)

    def body(positions: Any, mix: Any, beta: Any, _: Any, hbm: Any, out: Any, *rest: Any) -> None:
        ring, sems = rest
        (stream,) = _streams(s, [hbm], [ring], sems)
        out[...] = jnp.zeros_like(out)
        views = [s.View(ref=mix, start=n * width, width=width) for n in range(4)]

        def layer(_: Any, cursor: Any) -> Any:
            return s.channel_delta_rule(
                stream,
                cursor,
                positions,
                q=views[0],
                k=views[1],
                v=views[2],
                decay=views[3],
                beta=s.View(ref=beta, start=0, width=heads),
                out=s.View(ref=out, start=0, width=width),
                batch=ROWS,
                key_heads=heads,
                value_heads=heads,
                key_dim=128,
                value_dim=128,
                rounds=False,
            )

        jax.lax.fori_loop(0, LAYERS, layer, s.stream_prologue(stream))
        s.stream_drain(stream)

    states = array((LAYERS * ROWS, *state), jnp.float32)
    return Case(
        name=name,
        body=body,
        operands=[
            (array((ROWS,), jnp.int32), pltpu.SMEM),
            (array((ROWS, 4 * width), jnp.float32), pltpu.VMEM),
            (array((ROWS, 128), jnp.float32), pltpu.VMEM),
            (states, pl.ANY),
        ],
        results=[(states, pl.ANY), (array((ROWS, width), jnp.float32), pltpu.VMEM)],
        scratch=[pltpu.VMEM((slots, *state), jnp.float32), pltpu.SemaphoreType.DMA((2, slots))],
        aliases={3: 0},
    )


def kept_channel_delta_case(name: str, *, heads: int) -> Case:
    """Eight rows of one sequence."""
    jax, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    slots, width = 2, heads * 128
    shapes = [(width, 128), (ROWS, width), (ROWS, width), (ROWS, width)]

    def body(kept: Any, positions: Any, mix: Any, beta: Any, *rest: Any) -> None:
        hbms, out, rings, sems = rest[4:8], rest[8], rest[9:13], rest[13]
        streams = _streams(s, hbms, rings, sems)
        views = [s.View(ref=mix, start=n * width, width=width) for n in range(4)]

        def layer(_: Any, cursors: Any) -> Any:
            pairs = [one for pair in zip(streams, cursors, strict=True) for one in pair]
            return s.kept_channel_delta_rule(
                *pairs,
                positions,
                kept,
                q=views[0],
                k=views[1],
                v=views[2],
                decay=views[3],
                beta=s.View(ref=beta, start=0, width=heads),
                out=s.View(ref=out, start=0, width=width),
                batch=1,
                rows_per_sequence=ROWS,
                key_heads=heads,
                value_heads=heads,
                key_dim=128,
                value_dim=128,
                rounds=False,
            )

        jax.lax.fori_loop(0, LAYERS, layer, tuple(s.stream_prologue(one) for one in streams))
        for stream in streams:
            s.stream_drain(stream)

    arrays = [array((LAYERS, *shape), jnp.float32) for shape in shapes]
    return Case(
        name=name,
        body=body,
        operands=[
            (array((1,), jnp.int32), pltpu.SMEM),
            (array((ROWS,), jnp.int32), pltpu.SMEM),
            (array((ROWS, 4 * width), jnp.float32), pltpu.VMEM),
            (array((ROWS, 128), jnp.float32), pltpu.VMEM),
            *[(one, pl.ANY) for one in arrays],
        ],
        results=[
            *[(one, pl.ANY) for one in arrays],
            (array((ROWS, width), jnp.float32), pltpu.VMEM),
        ],
        scratch=[
            *[pltpu.VMEM((slots, *shape), jnp.float32) for shape in shapes],
            pltpu.SemaphoreType.DMA((8, slots)),
        ],
        aliases={4 + index: index for index in range(4)},
    )


def latent_case(name: str, *, heads: int, batch: int, rows_per_sequence: int) -> Case:
    """All layers over a cache of latents with three tiles in flight."""
    jax, jnp, array, pl, pltpu = types()
    from mkc.codegen_pallas import support as s

    slots = 3
    rank, shared = LATENT_SIZES["rank"], LATENT_SIZES["shared_dim"]
    query = heads * (LATENT_SIZES["key_dim"] + shared)
    value = heads * LATENT_SIZES["value_dim"]
    lanes = 128 * -(-query // 128)
    up_rows = heads * (LATENT_SIZES["key_dim"] + LATENT_SIZES["value_dim"])

    def body(positions: Any, mix: Any, ups: Any, _l: Any, _s: Any, *rest: Any) -> None:
        latent_hbm, shared_hbm, out, up_ring, up_sems, latent_ring, shared_ring, *rest = rest
        arrived, latent_new, shared_new, written, awake = rest
        kv = s.KvStream(
            key_hbm=latent_hbm,
            value_hbm=shared_hbm,
            key_ring=latent_ring,
            value_ring=shared_ring,
            arrived=arrived,
            key_new=latent_new,
            value_new=shared_new,
            written=written,
            awake=awake,
            layers=LAYERS,
            slots=slots,
            tile=TILE,
        )
        up = s.Stream(hbm=ups, ring=up_ring, arrived=up_sems, written=None, items=LAYERS, slots=2)

        def layer(_: Any, cursors: Any) -> Any:
            cursor, up_cursor = cursors
            s.stream_wait(up, up_cursor)
            cursor = s.latent_attention(
                kv,
                cursor,
                up,
                up_cursor,
                positions,
                q=s.View(ref=mix, start=0, width=query),
                latent=s.View(ref=mix, start=lanes, width=rank),
                shared=s.View(ref=mix, start=lanes + rank, width=shared),
                out=s.View(ref=out, start=0, width=value),
                heads=heads,
                batch=batch,
                rows_per_sequence=rows_per_sequence,
                scale=0.1,
                **LATENT_SIZES,
            )
            return cursor, s.stream_advance(up, up_cursor)

        start = (
            s.rows_prologue(kv, positions, batch, rows_per_sequence),
            s.stream_prologue(up),
        )
        jax.lax.fori_loop(0, LAYERS, layer, start)
        s.rows_drain(kv, positions, batch, rows_per_sequence)
        s.stream_drain(up)

    caches = [
        array((LAYERS, batch, CONTEXT, width), jnp.bfloat16) for width in (rank, SHARED_LANES)
    ]
    return Case(
        name=name,
        body=body,
        operands=[
            (array((batch * rows_per_sequence,), jnp.int32), pltpu.SMEM),
            (array((ROWS, lanes + rank + 128), jnp.float32), pltpu.VMEM),
            (array((LAYERS, up_rows, rank), jnp.bfloat16), pl.ANY),
            (caches[0], pl.ANY),
            (caches[1], pl.ANY),
        ],
        results=[
            (caches[0], pl.ANY),
            (caches[1], pl.ANY),
            (array((ROWS, value), jnp.float32), pltpu.VMEM),
        ],
        scratch=[
            pltpu.VMEM((2, up_rows, rank), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.VMEM((slots, TILE, rank), jnp.bfloat16),
            pltpu.VMEM((slots, TILE, SHARED_LANES), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((2, slots)),
            pltpu.VMEM((batch, 32, rank), jnp.bfloat16),
            pltpu.VMEM((batch, 32, SHARED_LANES), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((2, batch)),
            pltpu.SMEM((batch,), jnp.int32),
        ],
        aliases={3: 0, 4: 1},
    )


def blocks_case() -> Case:
    """A store and a mixture of eight stored blocks, and scaled heads."""
    _, jnp, array, _, pltpu = types()
    from mkc.codegen_pallas import support as s

    def body(first: Any, x: Any, norms: Any, factors: Any, out: Any, *rest: Any) -> None:
        blocks, count, stream = (s.View(ref=one, start=0, width=one.shape[1]) for one in rest)
        s.clear_blocks(count)
        stream.store(x[...])
        s.store_block(blocks, count, stream, first[0], slots=BLOCKS, period=12)
        out[...] = s.mix_blocks(
            blocks, count, x[...], norms[0:1], norms[1:2], slots=BLOCKS, period=12, eps=1e-5
        )
        out[:, 0:384] = s.scale_heads(out[:, 0:384], factors[...], heads=3, first=first[0])

    return Case(
        name="blocks",
        body=body,
        operands=[
            (array((1,), jnp.int32), pltpu.SMEM),
            (array((ROWS, WIDTH), jnp.float32), pltpu.VMEM),
            (array((8, WIDTH), jnp.float32), pltpu.VMEM),
            (array((1, 128), jnp.float32), pltpu.VMEM),
        ],
        results=[(array((ROWS, WIDTH), jnp.float32), pltpu.VMEM)],
        scratch=[
            pltpu.VMEM((ROWS, BLOCKS * WIDTH), jnp.float32),
            pltpu.VMEM((ROWS, 128), jnp.int32),
            pltpu.VMEM((ROWS, WIDTH), jnp.float32),
        ],
    )


def mixture_parts_case() -> Case:
    """Both parts of a mixture of eight stored blocks."""
    _, jnp, array, _, pltpu = types()
    from mkc.codegen_pallas import support as s

    def body(x: Any, norms: Any, blocks: Any, count: Any, out: Any, *parts: Any) -> None:
        total, softmax = parts
        views = (s.View(ref=one, start=0, width=one.shape[1]) for one in (blocks, count))
        vectors = norms[0:1], norms[1:2]
        sizes = {"slots": BLOCKS, "period": 12, "eps": 1e-5}
        total[...], softmax[:, 0:2] = s.mix_stored(*views, *vectors, **sizes)
        out[...] = s.mix_stream(x[...], total[...], softmax[:, 0:2], *vectors, eps=1e-5)

    return Case(
        name="mixture_parts",
        body=body,
        operands=[
            (array((ROWS, WIDTH), jnp.float32), pltpu.VMEM),
            (array((8, WIDTH), jnp.float32), pltpu.VMEM),
            (array((ROWS, BLOCKS * WIDTH), jnp.float32), pltpu.VMEM),
            (array((ROWS, 128), jnp.int32), pltpu.VMEM),
        ],
        results=[(array((ROWS, WIDTH), jnp.float32), pltpu.VMEM)],
        scratch=[pltpu.VMEM((ROWS, WIDTH), jnp.float32), pltpu.VMEM((ROWS, 128), jnp.float32)],
    )
