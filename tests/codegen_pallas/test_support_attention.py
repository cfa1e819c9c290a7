"""Cached attention against plain numpy: outputs, cache contents, tile borders, batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from tests.codegen_pallas.support_run import BATCHES
from tests.codegen_pallas.support_run import HBM
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

TILE = 32
CONTEXT = 128
LAYERS = 3
# the first row, both sides of a block of 16, both sides of a tile border, the last row
POSITIONS = (31, 0, 32, 127, 15, 63, 64, 17)


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


def run_attention(
    positions: np.ndarray,
    mix: np.ndarray,
    caches: tuple[np.ndarray, np.ndarray],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    slots: int,
    mode: Mode,
) -> list[np.ndarray]:
    """All layers; `mix` `[layers, 8, q + k + v]` f32. Returns key cache, value cache, output."""
    batch = len(positions)
    width, queries = kv_heads * head_dim, heads * head_dim
    cache_shape = caches[0].shape

    def body(positions: Any, mix: Any, _k: Any, _v: Any, *rest: Any) -> None:
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
            tile=TILE,
        )
        out[...] = jnp.zeros_like(out)

        def layer(index: jax.Array, cursor: s.KvCursor) -> s.KvCursor:
            operands, result = mix.at[index], out.at[index]
            return s.attention(
                kv,
                cursor,
                positions,
                q=s.View(ref=operands, start=0, width=queries),
                k=s.View(ref=operands, start=queries, width=width),
                v=s.View(ref=operands, start=queries + width, width=width),
                out=s.View(ref=result, start=0, width=queries),
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
            )

        lax.fori_loop(0, LAYERS, layer, s.kv_prologue(kv, positions, batch))
        s.kv_drain(kv, positions, batch)

    ring = VMEM((slots, TILE, width), jnp.bfloat16)
    new = VMEM((batch, 16, width), jnp.bfloat16)
    return run(
        body,
        operands=[(positions, SMEM), (mix, VMEM), (caches[0], HBM), (caches[1], HBM)],
        results=[
            (cache_shape, jnp.bfloat16, HBM),
            (cache_shape, jnp.bfloat16, HBM),
            ((LAYERS, 8, queries), jnp.float32, VMEM),
        ],
        scratch=[
            ring,
            ring,
            pltpu.SemaphoreType.DMA((2, slots)),
            new,
            new,
            pltpu.SemaphoreType.DMA((2, batch)),
            SMEM((batch,), jnp.int32),
        ],
        aliases={2: 0, 3: 1},
        mode=mode,
    )


def reference(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One head in f64: query `[d]`, keys and values `[rows, d]`."""
    scores = keys.astype(np.float64) @ query * len(query) ** -0.5
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum()) @ values.astype(np.float64)


@pytest.mark.parametrize(("mode", "batch"), BATCHES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [
        pytest.param(3, 1, 128, id="one group"),
        pytest.param(4, 2, 32, id="two groups"),
        pytest.param(10, 1, 16, id="more heads than a register has rows"),
    ],
)
def test_attention(heads: int, kv_heads: int, head_dim: int, batch: int, mode: Mode) -> None:
    random = np.random.default_rng(batch)
    width, queries = kv_heads * head_dim, heads * head_dim
    positions = np.array(POSITIONS[:batch], np.int32)
    mix = bf16(random.normal(size=(LAYERS, 8, queries + 2 * width))).astype(np.float32)
    caches = [bf16(random.normal(size=(LAYERS, batch, CONTEXT, width))) for _ in range(2)]
    for sequence, position in enumerate(positions):
        for cache in caches:
            cache[:, sequence, position:] = np.nan  # what was never written must not matter
    key_cache, value_cache, out = run_attention(
        positions,
        mix,
        (caches[0], caches[1]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        slots=4,  # more than there are tiles when the batch is 1
        mode=mode,
    )
    q, k, v = np.split(mix, [queries, queries + width], axis=2)
    for layer in range(LAYERS):
        for sequence, position in enumerate(positions):
            for cache, rows in ((caches[0], k), (caches[1], v)):
                cache[layer, sequence, position] = rows[layer, sequence]
            for head in range(heads):
                kv_head = head * kv_heads // heads
                of_kv = slice(kv_head * head_dim, (kv_head + 1) * head_dim)
                of_query = slice(head * head_dim, (head + 1) * head_dim)
                expected = reference(
                    q[layer, sequence, of_query],
                    caches[0][layer, sequence, : position + 1, of_kv],
                    caches[1][layer, sequence, : position + 1, of_kv],
                )
                got = out[layer, sequence, of_query]
                # weights and result are rounded to bf16, 2^-9 relative each
                np.testing.assert_allclose(got, expected, rtol=2**-7, atol=2**-7)
                np.testing.assert_array_equal(got, got.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(out[:, batch:], 0)
    for got, cache in zip((key_cache, value_cache), caches, strict=True):
        # as f32: numpy takes equal NaNs for equal in its own types only
        np.testing.assert_array_equal(got.astype(np.float32), cache.astype(np.float32))


@pytest.mark.parametrize("position", [0, 15, 16, 31, 32, 95, 96, 127])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_attention_at_every_kind_of_border(position: int, slots: int) -> None:
    """With equal keys the result is the mean of the visible values; more slots than tiles too."""
    positions = np.array([position, CONTEXT - 1 - position], np.int32)
    caches = [np.full((LAYERS, 2, CONTEXT, 16), np.nan, ml_dtypes.bfloat16) for _ in range(2)]
    for sequence, here in enumerate(positions):
        caches[0][:, sequence, :here] = 1
        caches[1][:, sequence, :here] = np.arange(here)[:, None] % 8
    mix = np.zeros((LAYERS, 8, 48), np.float32)
    mix[:, :, :32] = 1  # queries and keys
    mix[:, :2, 32:] = (positions % 8)[:, None]
    _, value_cache, out = run_attention(
        positions, mix, (caches[0], caches[1]), heads=1, kv_heads=1, head_dim=16, slots=slots,
        mode=Mode.LATE,
    )  # fmt: skip
    for sequence, here in enumerate(positions):
        mean = (np.arange(here + 1) % 8).mean()
        np.testing.assert_allclose(out[:, sequence], mean, rtol=2**-8)
        np.testing.assert_array_equal(value_cache[:, sequence, here], here % 8)
        assert np.isnan(value_cache[:, sequence, here + 1 :].astype(np.float32)).all()


def test_attention_refuses_heads_that_do_not_group() -> None:
    with pytest.raises(AssertionError, match="3 query heads over 2 key heads"):
        s.attention(
            None, None, None, q=None, k=None, v=None, out=None, heads=3, kv_heads=2,
            head_dim=128, scale=1.0,
        )  # fmt: skip


@pytest.mark.parametrize(
    "positions",
    [
        pytest.param((-1, 40, -1, 16), id="first rests"),
        pytest.param((63, -1, -1, -1), id="last ones rest"),
        pytest.param((-1, -1, 5, 100), id="two in a row rest"),
        pytest.param((-1, -1, -1, -1), id="all rest"),
    ],
)
def test_sequences_that_rest_leave_the_caches_alone(positions: tuple[int, ...]) -> None:
    """Others get what they get alone; rows of the result stay as they were."""
    random = np.random.default_rng(7)
    mix = bf16(random.normal(size=(LAYERS, 8, 48))).astype(np.float32)
    caches = [bf16(random.normal(size=(LAYERS, 4, CONTEXT, 16))) for _ in range(2)]

    def of(here: np.ndarray, mode: Mode) -> list[np.ndarray]:
        return run_attention(
            here, mix, (caches[0], caches[1]), heads=1, kv_heads=1, head_dim=16, slots=4, mode=mode
        )

    resting = np.array(positions, np.int32)
    everybody = of(np.maximum(resting, 0), Mode.GENERIC)
    found = of(resting, Mode.LATE)
    for sequence, position in enumerate(positions):
        if position >= 0:
            for one, other in zip(found[:2], everybody[:2], strict=True):
                np.testing.assert_array_equal(one[:, sequence], other[:, sequence])
            np.testing.assert_array_equal(found[2][:, sequence], everybody[2][:, sequence])
        else:
            for one, cache in zip(found[:2], caches, strict=True):
                np.testing.assert_array_equal(one[:, sequence], cache[:, sequence])
            np.testing.assert_array_equal(found[2][:, sequence], 0)
