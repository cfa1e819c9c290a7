"""Convolution and delta rule with late commit, against their reference meaning."""

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
from mkc.ir.ops import Activation
from mkc.ir.ops_spec import KeptConv
from mkc.ir.ops_spec import KeptDeltaRule
from mkc.ir.types import DType
from tests.codegen_pallas.round_reference import meaning
from tests.codegen_pallas.round_reference import padded
from tests.codegen_pallas.round_reference import rows_of
from tests.codegen_pallas.support_run import HBM
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import run

LAYERS = 2
# (T, first position, real rows and kept rows of each sequence); -1 rests
SEQUENCES = [
    pytest.param(8, [4], [8], [5], id="one"),
    pytest.param(8, [9] * 9, [8] * 9, list(range(9)), id="every count"),
    pytest.param(8, [0, -1, 7], [8, 0, 3], [0, 8, 3], id="padding and rest"),
    pytest.param(3, [5, -1, 6], [3, 0, 1], [3, 2, 1], id="short blocks"),
    pytest.param(1, [5, -1, 6], [1, 0, 1], [1, 1, 0], id="single rows"),
]


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


def in_place(hbm: Any, ring: Any, sems: Any) -> s.Stream:
    """A stream that is changed in place; `sems` `[2, slots]`."""
    items, slots = hbm.shape[0], ring.shape[0]
    return s.Stream(
        hbm=hbm, ring=ring, arrived=sems.at[0], written=sems.at[1], items=items, slots=slots
    )


@pytest.mark.parametrize(("rows", "firsts", "real", "kept"), SEQUENCES)
@pytest.mark.parametrize(("taps", "channels"), [(4, 256), (2, 32)])
def test_conv(
    taps: int,
    channels: int,
    rows: int,
    firsts: list[int],
    real: list[int],
    kept: list[int],
) -> None:
    random = np.random.default_rng(rows)
    batch = len(firsts)
    slots = 2
    positions = rows_of(firsts, real, rows)
    histories = bf16(random.normal(size=(LAYERS, taps - 1, -(-batch // 8) * 8, channels)))
    histories[:, 0, 0, 0] = -0.0  # a sum with zero would change its sign
    inputs = bf16(random.normal(size=(LAYERS, batch, rows, channels)))
    for sequence, number in enumerate(kept):
        inputs[:, sequence, number:] = np.nan  # rejected rows must not matter
    inputs = inputs.reshape(LAYERS, batch * rows, channels)
    x = bf16(random.normal(size=(batch * rows, channels)))
    weights = bf16(random.normal(size=(channels, 1, taps)))

    def body(kept: Any, positions: Any, x: Any, weights: Any, _h: Any, _r: Any, *rest: Any) -> None:
        history, inputs, out, history_ring, inputs_ring, sems = rest
        streams = (
            in_place(history, history_ring, sems.at[0:2]),
            in_place(inputs, inputs_ring, sems.at[2:4]),
        )

        def layer(index: jax.Array, cursors: Any) -> Any:
            for stream, cursor in zip(streams, cursors, strict=True):
                s.stream_wait(stream, cursor)
            out[index] = s.kept_conv(
                streams[0],
                cursors[0],
                streams[1],
                cursors[1],
                x[...],
                [weights[tap : tap + 1] for tap in range(taps)],
                kept=kept,
                positions=positions,
                batch=batch,
                rows_per_sequence=rows,
                activation=s.silu,
            )
            return tuple(
                s.stream_advance(stream, cursor)
                for stream, cursor in zip(streams, cursors, strict=True)
            )

        lax.fori_loop(0, LAYERS, layer, tuple(s.stream_prologue(one) for one in streams))
        for stream in streams:
            s.stream_drain(stream)

    wide = padded(x.astype(np.float32))
    new_histories, new_inputs, out = run(
        body,
        operands=[
            (np.array(kept, np.int32), SMEM),
            (positions, SMEM),
            (wide, VMEM),
            (weights[:, 0].T.astype(np.float32), VMEM),
            (histories, HBM),
            (inputs, HBM),
        ],
        results=[
            (histories.shape, jnp.bfloat16, HBM),
            (inputs.shape, jnp.bfloat16, HBM),
            ((LAYERS, *wide.shape), jnp.float32, VMEM),
        ],
        scratch=[
            VMEM((slots, *histories.shape[1:]), jnp.bfloat16),
            VMEM((slots, *inputs.shape[1:]), jnp.bfloat16),
            pltpu.SemaphoreType.DMA((4, slots)),
        ],
        aliases={4: 0, 5: 1},
    )
    op = KeptConv(taps=taps, activation=Activation.SILU)
    awake = np.repeat(np.array(firsts) >= 0, rows)
    for layer in range(LAYERS):
        states = (
            np.moveaxis(histories[layer, :, :batch], 0, 1),
            inputs[layer].reshape(batch, rows, channels),
        )
        (expected,), (history, kept_rows) = meaning(
            op,
            (x, weights, np.array(kept)),
            states,
            positions=positions,
            batch=batch,
            dtype=DType.F32,
        )
        got = out[layer, : batch * rows]
        np.testing.assert_allclose(got[awake], expected[awake], rtol=1e-5, atol=1e-6)
        for found, wanted in (
            (np.moveaxis(new_histories[layer, :, :batch], 0, 1), history),
            (new_inputs[layer].reshape(kept_rows.shape), kept_rows),
        ):
            same = found.view(np.uint16) == np.asarray(wanted).view(np.uint16)
            assert (same | np.isnan(np.asarray(wanted, np.float32))).all()
    np.testing.assert_array_equal(out[:, batch * rows :], 0)


@pytest.mark.parametrize(("rows", "firsts", "real", "kept"), SEQUENCES)
@pytest.mark.parametrize(
    ("key_heads", "value_heads", "key_dim", "value_dim"),
    [
        pytest.param(2, 6, 32, 16, id="unrolled"),
        pytest.param(7, 14, 16, 32, id="head loop"),
    ],
)
def test_delta_rule(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    rows: int,
    firsts: list[int],
    real: list[int],
    kept: list[int],
) -> None:
    random = np.random.default_rng(rows)
    batch = len(firsts)
    items, slots = LAYERS * batch, 2
    keys, values = key_heads * key_dim, value_heads * value_dim
    positions = rows_of(firsts, real, rows)
    shapes = [(value_heads * key_dim, value_dim), (rows, keys), (rows, values), (rows, 128)]
    arrays = [random.normal(size=(items, *shape)).astype(np.float32) for shape in shapes]
    arrays[0][:, 0, 0] = -0.0
    arrays[1] /= key_dim**0.5
    arrays[3] = -np.abs(arrays[3])
    for one in arrays[1:]:
        for sequence, number in enumerate(kept):
            one[sequence::batch, number:] = np.nan  # rejected rows must not matter
    mix = random.normal(size=(batch * rows, 16 + 2 * keys + values)).astype(np.float32)
    mix[:, : 16 + 2 * keys] /= key_dim**0.5
    gates = np.zeros((batch * rows, 128), np.float32)
    gates[:, 8 : 8 + value_heads] = random.uniform(size=(batch * rows, value_heads))
    gates[:, 32 : 32 + value_heads] = -3 * random.uniform(size=(batch * rows, value_heads))

    def body(kept: Any, positions: Any, mix: Any, gates: Any, *rest: Any) -> None:
        hbms, out, rings, sems = rest[4:8], rest[8], rest[9:13], rest[13]
        streams = [
            in_place(hbm, ring, sems.at[2 * index : 2 * index + 2])
            for index, (hbm, ring) in enumerate(zip(hbms, rings, strict=True))
        ]
        out[...] = jnp.zeros_like(out)

        def layer(index: jax.Array, cursors: Any) -> Any:
            pairs = [one for pair in zip(streams, cursors, strict=True) for one in pair]
            layer_out = out.at[index]
            return s.kept_delta_rule(
                *pairs,
                positions,
                kept,
                q=s.View(ref=mix, start=16, width=keys),
                k=s.View(ref=mix, start=16 + keys, width=keys),
                v=s.View(ref=mix, start=16 + 2 * keys, width=values),
                beta=s.View(ref=gates, start=8, width=value_heads),
                decay=s.View(ref=gates, start=32, width=value_heads),
                out=s.View(ref=layer_out, start=0, width=values),
                batch=batch,
                rows_per_sequence=rows,
                key_heads=key_heads,
                value_heads=value_heads,
                key_dim=key_dim,
                value_dim=value_dim,
            )

        lax.fori_loop(0, LAYERS, layer, tuple(s.stream_prologue(one) for one in streams))
        for stream in streams:
            s.stream_drain(stream)

    wide = padded(mix)
    *found, out = run(
        body,
        operands=[
            (np.array(kept, np.int32), SMEM),
            (positions, SMEM),
            (wide, VMEM),
            (padded(gates), VMEM),
            *[(one, HBM) for one in arrays],
        ],
        results=[
            *[(one.shape, jnp.float32, HBM) for one in arrays],
            ((LAYERS, len(wide), values), jnp.float32, VMEM),
        ],
        scratch=[
            *[VMEM((slots, *shape), jnp.float32) for shape in shapes],
            pltpu.SemaphoreType.DMA((8, slots)),
        ],
        aliases={4 + index: index for index in range(4)},
    )
    heads = ((value_heads, key_dim, value_dim), (rows, key_heads, key_dim))
    heads += ((rows, value_heads, value_dim), (rows, value_heads))
    q, k, v = np.split(mix[:, 16:], [keys, 2 * keys], axis=1)
    operands = (
        q.reshape(-1, key_heads, key_dim),
        k.reshape(-1, key_heads, key_dim),
        v.reshape(-1, value_heads, value_dim),
        gates[:, 8 : 8 + value_heads],
        gates[:, 32 : 32 + value_heads],
        np.array(kept, np.int32),
    )
    awake = np.array(firsts) >= 0
    for layer in range(LAYERS):
        mine = slice(layer * batch, (layer + 1) * batch)
        lanes = (value_dim, keys, values, value_heads)
        old = [
            one[mine, :, :n].reshape(batch, *h)
            for one, n, h in zip(arrays, lanes, heads, strict=True)
        ]
        # the reference wants finite numbers in the rows that it masks
        (expected,), new = meaning(
            KeptDeltaRule(),
            operands,
            [np.nan_to_num(one) for one in old],
            positions=positions,
            batch=batch,
            dtype=DType.F32,
        )
        shape = (batch, rows, values)
        got, wanted = out[layer, : batch * rows].reshape(shape), expected.reshape(shape)
        np.testing.assert_allclose(got[awake], wanted[awake], rtol=2**-7, atol=1e-4)
        np.testing.assert_array_equal(got, bf16(got).astype(np.float32))
        np.testing.assert_array_equal(got[~awake], 0)
        after = [
            one[mine, :, :n].reshape(batch, *h)
            for one, n, h in zip(found, lanes, heads, strict=True)
        ]
        for got, wanted, before in zip(after, new, old, strict=True):
            np.testing.assert_allclose(got[awake], wanted[awake], rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(got[~awake].view(np.int32), before[~awake].view(np.int32))
        nothing = np.array(kept) == 0  # not one bit of the state changes
        np.testing.assert_array_equal(
            after[0][nothing].view(np.int32), old[0][nothing].view(np.int32)
        )
