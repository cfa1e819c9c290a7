"""Latent attention over a streamed cache against its reference meaning: outputs, caches, rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from mkc.ir.ops_mixing import LatentAttention
from mkc.ir.types import DType
from tests.codegen_pallas.round_reference import meaning
from tests.codegen_pallas.round_reference import padded
from tests.codegen_pallas.round_reference import rows_of
from tests.codegen_pallas.support_run import HBM
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

TILE, CONTEXT, LAYERS = 32, 96, 2
LANES = 128  # of the shared keys in the cache
BLOCK = 16  # rows of the cache that are written together


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


def check(
    firsts: Sequence[int],
    entering: Sequence[int],
    *,
    rows: int,
    heads: int,
    key_dim: int = 32,
    shared_dim: int = 16,
    value_dim: int = 48,
    rank: int = 64,
    slots: int = 2,
    tile: int = TILE,
    context: int = CONTEXT,
    mode: Mode = Mode.LATE,
    rounds: bool = False,
) -> None:
    """Runs all layers and compares outputs and caches.

    Args:
      firsts: first position of each sequence; a negative one rests.
      entering: real rows of each.
    """
    batch = len(firsts)
    random = np.random.default_rng(rows * batch)
    sizes = {"heads": heads, "key_dim": key_dim, "shared_dim": shared_dim, "rank": rank}
    query, value = heads * (key_dim + shared_dim), heads * value_dim
    positions = rows_of(firsts, entering, rows)
    mix = bf16(random.normal(size=(LAYERS, batch * rows, query + rank + shared_dim)))
    ups = bf16(random.normal(size=(LAYERS, heads * (key_dim + value_dim), rank)) / key_dim**0.5)
    latents = bf16(random.normal(size=(LAYERS, batch, context, rank)))
    shared = bf16(random.normal(size=(LAYERS, batch, context, LANES)))
    shared[..., shared_dim:] = 0
    for sequence, position in enumerate(firsts):
        for cache in (latents, shared):  # what comes later may hold anything
            cache[:, sequence, max(position, 0) :] = np.nan

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
            tile=tile,
        )
        up = s.Stream(
            hbm=ups, ring=up_ring, arrived=up_sems, written=None, items=LAYERS, slots=LAYERS
        )
        out[...] = jnp.zeros_like(out)

        def layer(index: jax.Array, cursors: Any) -> Any:
            cursor, up_cursor = cursors
            here = mix.at[index]
            s.stream_wait(up, up_cursor)
            cursor = s.latent_attention(
                kv,
                cursor,
                up,
                up_cursor,
                positions,
                q=s.View(ref=here, start=0, width=query),
                latent=s.View(ref=here, start=query, width=rank),
                shared=s.View(ref=here, start=query + rank, width=shared_dim),
                out=s.View(ref=out.at[index], start=0, width=value),
                value_dim=value_dim,
                batch=batch,
                rows_per_sequence=rows,
                scale=(key_dim + shared_dim) ** -0.5,
                rounds=rounds,
                **sizes,
            )
            return cursor, s.stream_advance(up, up_cursor)

        start = (s.rows_prologue(kv, positions, batch, rows), s.stream_prologue(up))
        lax.fori_loop(0, LAYERS, layer, start)
        s.rows_drain(kv, positions, batch, rows)
        s.stream_drain(up)

    wide = np.stack([padded(one.astype(np.float32)) for one in mix])
    *found, out = run(
        body,
        operands=[
            (positions, SMEM),
            (wide, VMEM),
            (ups, HBM),
            (latents, HBM),
            (shared, HBM),
        ],
        results=[
            (latents.shape, jnp.bfloat16, HBM),
            (shared.shape, jnp.bfloat16, HBM),
            ((LAYERS, wide.shape[1], value), jnp.float32, VMEM),
        ],
        scratch=[
            VMEM((LAYERS, *ups.shape[1:]), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((LAYERS,)),
            VMEM((slots, tile, rank), jnp.bfloat16),
            VMEM((slots, tile, LANES), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((2, slots)),
            VMEM((batch, 2 * BLOCK, rank), jnp.bfloat16),
            VMEM((batch, 2 * BLOCK, LANES), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((2, batch)),
            SMEM((batch,), jnp.int32),
        ],
        aliases={3: 0, 4: 1},
        mode=mode,
    )
    op = LatentAttention(scale=(key_dim + shared_dim) ** -0.5)
    real = positions >= 0
    for layer in range(LAYERS):
        q = mix[layer, :, :query].reshape(-1, heads, key_dim + shared_dim)
        operands = (
            q[..., :key_dim],
            q[..., key_dim:],
            mix[layer, :, query : query + rank],
            mix[layer, :, query + rank :],
            ups[layer],
            positions,
        )
        states = (latents[layer][:, :, None], shared[layer][:, :, None, :shared_dim])
        expected, new_states = reference(op, operands, states, positions, batch, value_dim)
        got = out[layer, : batch * rows]
        wanted = expected.reshape(-1, value)
        error = 2**-8 if rounds else 2**-14
        np.testing.assert_allclose(got[real], wanted[real], rtol=error, atol=error)
        assert rounds == np.array_equal(got[real], bf16(got[real]).astype(np.float32))
        resting = np.repeat(np.array(firsts) < 0, rows)
        np.testing.assert_array_equal(got[resting], 0)
        for cache, state in zip(found, new_states, strict=True):
            width = state.shape[-1]
            for sequence, position in enumerate(firsts):
                check_cache(
                    cache[layer, sequence].astype(np.float32),
                    state[sequence, :, 0].astype(np.float32),
                    position,
                    entering[sequence],
                )
                behind = cache[layer, sequence, : max(position, 0) + entering[sequence], width:]
                np.testing.assert_array_equal(behind.astype(np.float32), 0)


def reference(
    op: LatentAttention,
    operands: tuple[np.ndarray, ...],
    states: tuple[np.ndarray, ...],
    positions: np.ndarray,
    batch: int,
    value_dim: int,
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Output and caches, in f32."""
    rows, heads = operands[0].shape[:2]
    (expected,), new_states = meaning(
        op,
        operands,
        states,
        positions=positions,
        batch=batch,
        dtype=DType.F32,
        shape=(rows, heads, value_dim),
    )
    return expected, new_states


def check_cache(got: np.ndarray, wanted: np.ndarray, first: int, count: int) -> None:
    """One cache `[context, lanes]`: only the blocks of new rows may differ behind these."""
    got = got[:, : wanted.shape[1]]
    if first < 0:
        np.testing.assert_array_equal(got, wanted)
        return
    written = -(-(first + count) // BLOCK) * BLOCK
    np.testing.assert_array_equal(got[: first + count], wanted[: first + count])
    np.testing.assert_array_equal(got[written:], wanted[written:])


@pytest.mark.parametrize(
    ("rows", "heads", "mode", "firsts", "entering"),
    [
        pytest.param(1, 3, Mode.LATE, [0, 45, -1, 95], [1, 1, 0, 1], id="one row"),
        pytest.param(8, 3, Mode.LATE, [0, 27, -1, 90], [8, 5, 0, 6], id="rows of a round"),
        pytest.param(3, 2, Mode.EAGER, [30, 15], [3, 2], id="short blocks"),
    ],
)
def test_latent_attention(
    rows: int, heads: int, mode: Mode, firsts: list[int], entering: list[int]
) -> None:
    """Nothing before the first row, tiles that end in a block, padding, rest, the last position."""
    check(firsts, entering, rows=rows, heads=heads, mode=mode)


def test_other_sizes_and_rounding() -> None:
    sizes = {"key_dim": 16, "shared_dim": 32, "value_dim": 16, "rank": 128}
    check([33, 1], [2, 2], rows=2, heads=4, slots=1, rounds=True, mode=Mode.GENERIC, **sizes)


def test_tiles_of_several_parts() -> None:
    """A tile wider than what enters the softmax together, and no multiple of it."""
    check([767, 300], [1, 1], rows=1, heads=2, tile=384, context=768)
