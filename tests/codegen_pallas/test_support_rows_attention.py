"""Attention of blocks of rows against its reference meaning: outputs, caches, borders, rest."""

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
from mkc.ir.ops import Attention
from mkc.ir.ops import Op
from mkc.ir.ops_spec import BlockAttention
from tests.codegen_pallas.round_reference import meaning
from tests.codegen_pallas.round_reference import padded
from tests.codegen_pallas.round_reference import rows_of
from tests.codegen_pallas.support_run import HBM
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

TILE = 32
BLOCK = 16  # rows of the cache that are written together
CONTEXT = 128
LAYERS = 2


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


def check(
    firsts: Sequence[int],
    entering: Sequence[int],
    own: Sequence[int] | None,
    *,
    rows: int = 8,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 16,
    window: int | None = None,
    fetched_window: bool = True,
    causal: bool = True,
    anchored: bool = False,
    slots: int = 3,
    mode: Mode = Mode.LATE,
) -> None:
    """Runs all layers and compares outputs and caches.

    Args:
      firsts: first position of each sequence; a negative one rests.
      entering: rows of each that enter the cache.
      own: rows of each block behind those; None when the entering rows are the block.
    """
    batch = len(firsts)
    block_op = BlockAttention(scale=head_dim**-0.5, window=window, causal=causal, anchored=anchored)
    random = np.random.default_rng(rows * batch)
    width, queries = kv_heads * head_dim, heads * head_dim
    sizes = {"batch": batch, "rows_per_sequence": rows}
    first = rows_of(firsts, entering, rows)
    following = [one + n if one >= 0 else -1 for one, n in zip(firsts, entering, strict=True)]
    block = first if own is None else rows_of(following, own, rows)
    mix = bf16(random.normal(size=(LAYERS, batch * rows, queries + 4 * width)))
    caches = [bf16(random.normal(size=(LAYERS, batch, CONTEXT, width))) for _ in range(2)]
    for sequence, position in enumerate(firsts):
        for cache in caches:  # what comes later may hold anything
            cache[:, sequence, max(position, 0) :] = np.nan

    def body(first: Any, block: Any, mix: Any, _k: Any, _v: Any, *rest: Any) -> None:
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
            window=block_op.reach if fetched_window else None,
        )
        out[...] = jnp.zeros_like(out)

        def layer(index: jax.Array, cursor: s.KvCursor) -> s.KvCursor:
            here, result = mix.at[index], out.at[index]
            views = [s.View(ref=here, start=queries + n * width, width=width) for n in range(4)]
            return s.rows_attention(
                kv,
                cursor,
                first,
                q=s.View(ref=here, start=0, width=queries),
                k=views[0],
                v=views[1],
                positions=block,
                remembered=None if own is None else (views[2], views[3], first),
                out=s.View(ref=result, start=0, width=queries),
                heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                causal=causal,
                window=block_op.reach,
                anchored=anchored,
                **sizes,
            )

        lax.fori_loop(0, LAYERS, layer, s.rows_prologue(kv, first, batch, rows))
        s.rows_drain(kv, first, batch, rows)

    wide = np.stack([padded(one.astype(np.float32)) for one in mix])
    ring = VMEM((slots, TILE, width), jnp.bfloat16)
    new = VMEM((batch, 2 * BLOCK, width), jnp.bfloat16)
    *found, out = run(
        body,
        operands=[(first, SMEM), (block, SMEM), (wide, VMEM), (caches[0], HBM), (caches[1], HBM)],
        results=[
            (caches[0].shape, jnp.bfloat16, HBM),
            (caches[1].shape, jnp.bfloat16, HBM),
            ((LAYERS, wide.shape[1], queries), jnp.float32, VMEM),
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
        aliases={3: 0, 4: 1},
        mode=mode,
    )
    for layer in range(LAYERS):
        q = mix[layer, :, :queries].reshape(-1, heads, head_dim)
        parts = np.split(mix[layer, :, queries:], 4, axis=1)
        own_k, own_v, other_k, other_v = (one.reshape(-1, kv_heads, head_dim) for one in parts)
        op: Op = Attention(scale=head_dim**-0.5)
        operands = [q, own_k, own_v, block]
        if own is not None:
            op = block_op
            operands += [other_k, other_v, first]
        states = [cache[layer].reshape(batch, CONTEXT, kv_heads, head_dim) for cache in caches]
        (expected,), new_states = meaning(op, operands, states, positions=block, batch=batch)
        real = block >= 0
        got = out[layer, : batch * rows]
        wanted = expected.reshape(-1, queries).astype(np.float32)
        # weights and result are rounded to bf16, 2^-9 relative each
        np.testing.assert_allclose(got[real], wanted[real], rtol=2**-7, atol=2**-7)
        np.testing.assert_array_equal(got, bf16(got).astype(np.float32))
        assert np.isfinite(got).all()
        resting = np.repeat(np.array(firsts) < 0, rows)
        np.testing.assert_array_equal(got[resting], 0)
        for cache, state in zip(found, new_states, strict=True):
            for sequence, position in enumerate(firsts):
                check_cache(
                    cache[layer, sequence].astype(np.float32),
                    np.asarray(state, np.float32).reshape(batch, CONTEXT, width)[sequence],
                    position,
                    entering[sequence],
                )


def check_cache(got: np.ndarray, wanted: np.ndarray, first: int, count: int) -> None:
    """One cache `[context, width]`: only the blocks of new rows may differ behind these."""
    if first < 0:
        np.testing.assert_array_equal(got, wanted)
        return
    written = -(-(first + count) // BLOCK) * BLOCK
    np.testing.assert_array_equal(got[: first + count], wanted[: first + count])
    assert np.isfinite(got[: min(written, CONTEXT)]).all()
    np.testing.assert_array_equal(got[written:], wanted[written:])


@pytest.mark.parametrize("first", range(0, 48, 16))
def test_every_position_of_a_tile(first: int) -> None:
    """From each position 8 rows enter the cache: across blocks of 16 and across tiles."""
    check(range(first, first + 16), [8] * 16, None)


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "head_dim", "slots", "mode"),
    [
        pytest.param(8, 3, 1, 128, 4, Mode.LATE, id="one group"),
        pytest.param(8, 4, 2, 32, 1, Mode.EAGER, id="two groups"),
        pytest.param(8, 10, 1, 16, 2, Mode.GENERIC, id="many heads"),
        pytest.param(3, 6, 2, 16, 2, Mode.LATE, id="short blocks"),
        pytest.param(16, 2, 2, 16, 2, Mode.LATE, id="long blocks"),
        pytest.param(1, 4, 2, 16, 2, Mode.LATE, id="single rows"),
    ],
)
def test_plain_attention_of_rows(
    rows: int, heads: int, kv_heads: int, head_dim: int, slots: int, mode: Mode
) -> None:
    """No row before the first one, no draft, rest, and the end of the context."""
    firsts = [0, 33, -1, CONTEXT - rows, CONTEXT - 2]
    entering = [rows, 1, 0, rows, min(rows, 2)]
    sizes = {"rows": rows, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    check(firsts, entering, None, slots=slots, mode=mode, **sizes)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 5, 40])
def test_blocks_with_remembered_rows(window: int | None, causal: bool) -> None:
    """Every number of remembered rows; with a window tiles before it are not fetched."""
    counts = list(range(1, 9))
    firsts = [0, 15, 31, 32, 60, 77, 95, 100]
    check(firsts, counts, [8] * 8, window=window, causal=causal, heads=4, kv_heads=2)


@pytest.mark.parametrize("window", [3, 31])
def test_anchored_windows(window: int) -> None:
    """All rows of a block see as many positions before it, and one another. The farthest position
    is the last one of a tile, or the first one of the next."""
    check([2, 26 + window, 30 + window, 100], [1, 5, 2, 8], [8] * 4, window=window, anchored=True)


@pytest.mark.parametrize("fetched_window", [False, True])
def test_blocks_that_rest_or_end(fetched_window: bool) -> None:
    """A block of padding behind the context's last rows, shorter ones, and rest."""
    firsts, entering, own = [120, -1, 119, 64, -1], [8, 0, 3, 2, 0], [0, 0, 6, 8, 0]
    sizes = {"window": 33, "fetched_window": fetched_window, "causal": False}
    check(firsts, entering, own, **sizes)
    check([-1, -1], [0, 0], [0, 0], **sizes)
    check([70, 3], [1, 3], [3, 2], rows=3, **sizes)


def test_refuses_more_rows_than_a_block_has() -> None:
    with pytest.raises(AssertionError, match="17 rows are more than a block has"):
        s.rows_attention(
            None, None, None, q=None, k=None, v=None, positions=None, remembered=None, out=None,
            heads=1, kv_heads=1, head_dim=128, scale=1.0, causal=True, window=None, batch=1,
            rows_per_sequence=17,
        )  # fmt: skip
