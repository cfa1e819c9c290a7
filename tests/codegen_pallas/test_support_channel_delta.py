"""The delta rule with a decay of each key channel against its reference meaning: one step, and the
rows of a round with late commit; outputs, states in HBM, strong decays, rest."""

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
from mkc.ir.ops import DeltaRule
from mkc.ir.ops_spec import KeptDeltaRule
from mkc.ir.types import DType
from tests.codegen_pallas.round_reference import meaning
from tests.codegen_pallas.round_reference import padded
from tests.codegen_pallas.round_reference import rows_of
from tests.codegen_pallas.support_run import HBM
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

LAYERS = 2
STRONGEST = 60.0  # decay of a channel and row; e^60^8 is far beyond f32


def in_place(hbm: Any, ring: Any, sems: Any) -> s.Stream:
    """A stream that is changed in place; `sems` `[2, slots]`."""
    items, slots = hbm.shape[0], ring.shape[0]
    return s.Stream(
        hbm=hbm, ring=ring, arrived=sems.at[0], written=sems.at[1], items=items, slots=slots
    )


def inputs_of(
    random: np.random.Generator, rows: int, sizes: tuple[int, int, int, int]
) -> tuple[np.ndarray, ...]:
    """q, k `[rows, key heads, dk]`, v, beta and decay: zero, weak, and strong ones."""
    key_heads, value_heads, key_dim, value_dim = sizes
    q, k = random.normal(size=(2, rows, key_heads, key_dim)) / key_dim**0.5
    v = random.normal(size=(rows, value_heads, value_dim))
    beta = random.uniform(size=(rows, value_heads))
    decay = -2 * random.uniform(size=(rows, value_heads, key_dim))
    decay[:, :, ::5] = 0.0
    decay[:, :, 1::5] = -STRONGEST
    return tuple(one.astype(np.float32) for one in (q, k, v, beta, decay))


@pytest.mark.parametrize(
    ("mode", "batch", "key_heads", "value_heads", "key_dim", "value_dim", "rounds"),
    [
        pytest.param(Mode.LATE, 3, 3, 3, 32, 16, True, id="unrolled"),
        pytest.param(Mode.EAGER, 1, 2, 4, 16, 32, False, id="two values for a key"),
        pytest.param(Mode.GENERIC, 8, 14, 14, 16, 16, False, id="head loop"),
    ],
)
def test_one_step(
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    batch: int,
    mode: Mode,
    rounds: bool,
) -> None:
    random = np.random.default_rng(batch)
    sizes = (key_heads, value_heads, key_dim, value_dim)
    widths = [key_heads * key_dim] * 2 + [value_heads * one for one in (value_dim, 1, key_dim)]
    starts = [16 + sum(widths[:index]) for index in range(len(widths))]
    items, slots = LAYERS * batch, 2
    states = random.normal(size=(items, value_heads * key_dim, value_dim)).astype(np.float32)
    operands = inputs_of(random, batch, sizes)
    mix = np.zeros((8, 16 + sum(widths)), np.float32)
    for operand, start, width in zip(operands, starts, widths, strict=True):
        mix[:batch, start : start + width] = operand.reshape(batch, -1)
    positions = np.arange(batch, dtype=np.int32)
    positions[1::3] = -1  # rest

    def body(positions: Any, mix: Any, _: Any, hbm: Any, out: Any, ring: Any, sems: Any) -> None:
        stream = in_place(hbm, ring, sems)
        out[...] = jnp.zeros_like(out)
        views = [
            s.View(ref=mix, start=start, width=width)
            for start, width in zip(starts, widths, strict=True)
        ]

        def layer(index: jax.Array, cursor: s.StreamCursor) -> s.StreamCursor:
            return s.channel_delta_rule(
                stream,
                cursor,
                positions,
                **dict(zip(("q", "k", "v", "beta", "decay"), views, strict=True)),
                out=s.View(ref=out.at[index], start=0, width=widths[2]),
                batch=batch,
                key_heads=key_heads,
                value_heads=value_heads,
                key_dim=key_dim,
                value_dim=value_dim,
                rounds=rounds,
            )

        lax.fori_loop(0, LAYERS, layer, s.stream_prologue(stream))
        s.stream_drain(stream)

    new_states, out = run(
        body,
        operands=[(positions, SMEM), (mix, VMEM), (states, HBM)],
        results=[(states.shape, jnp.float32, HBM), ((LAYERS, 8, widths[2]), jnp.float32, VMEM)],
        scratch=[
            VMEM((slots, *states.shape[1:]), jnp.float32),
            pltpu.SemaphoreType.DMA((2, slots)),
        ],
        aliases={2: 0},
        mode=mode,
    )
    awake = positions >= 0
    for layer in range(LAYERS):
        shape = (batch, value_heads, key_dim, value_dim)
        old = states[layer * batch : (layer + 1) * batch].reshape(shape)
        (expected,), (state,) = meaning(
            DeltaRule(), operands, [old], positions=positions, batch=batch, dtype=DType.F32
        )
        got = out[layer, :batch].reshape(expected.shape)
        error = {"rtol": 2**-7, "atol": 1e-4} if rounds else {"rtol": 1e-5, "atol": 1e-6}
        np.testing.assert_allclose(got[awake], expected[awake], **error)
        assert rounds == np.array_equal(got, got.astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(got[~awake], 0)
        after = new_states[layer * batch : (layer + 1) * batch].reshape(shape)
        np.testing.assert_allclose(after[awake], state[awake], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(after[~awake], old[~awake])
    np.testing.assert_array_equal(out[:, batch:], 0)


# Sizes of the heads; T; first position, real rows and kept rows of each sequence; -1 rests.
@pytest.mark.parametrize(
    ("mode", "key_heads", "value_heads", "key_dim", "value_dim", "rows", "firsts", "real", "kept"),
    [
        pytest.param(
            Mode.GENERIC, 1, 1, 32, 16, 8, [9] * 9, [8] * 9, list(range(9)), id="every count"
        ),
        pytest.param(
            Mode.LATE, 1, 2, 16, 32, 8, [0, -1, 7], [8, 0, 3], [0, 8, 3], id="padding and rest"
        ),
        pytest.param(
            Mode.GENERIC, 14, 14, 16, 16, 3, [5, -1, 6], [3, 0, 1], [3, 2, 1], id="short blocks"
        ),
        pytest.param(Mode.EAGER, 3, 3, 16, 16, 1, [5, 6], [1, 1], [1, 0], id="one row"),
    ],
)
def test_rows_of_a_round(
    mode: Mode,
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
    sizes = (key_heads, value_heads, key_dim, value_dim)
    batch, slots = len(firsts), 2
    rounds = rows > 1
    keys, values, channels = key_heads * key_dim, value_heads * value_dim, value_heads * key_dim
    positions = rows_of(firsts, real, rows)
    shapes = [(channels, value_dim), (rows, keys), (rows, values), (rows, channels)]
    arrays = [random.normal(size=(batch, *shape)).astype(np.float32) for shape in shapes]
    arrays[0][:, 0, 0] = -0.0
    arrays[1] /= key_dim**0.5
    arrays[3] = -np.abs(arrays[3])
    arrays[3][:, :, 2::7] = -STRONGEST
    for one in arrays[1:]:
        for sequence, number in enumerate(kept):
            one[sequence::batch, number:] = np.nan  # rejected rows must not matter
    operands = inputs_of(random, batch * rows, sizes)
    flat = [padded(one.reshape(batch * rows, -1)) for one in operands]

    def body(kept: Any, positions: Any, *rest: Any) -> None:
        inputs, hbms, out, rings, sems = rest[:5], rest[9:13], rest[13], rest[14:18], rest[18]
        streams = [
            in_place(hbm, ring, sems.at[2 * index : 2 * index + 2])
            for index, (hbm, ring) in enumerate(zip(hbms, rings, strict=True))
        ]
        out[...] = jnp.zeros_like(out)
        views = [s.View(ref=one, start=0, width=one.shape[1]) for one in inputs]

        pairs = [part for one in streams for part in (one, s.stream_prologue(one))]
        s.kept_channel_delta_rule(
            *pairs,
            positions,
            kept,
            **dict(zip(("q", "k", "v", "beta", "decay"), views, strict=True)),
            out=s.View(ref=out, start=0, width=values),
            batch=batch,
            rows_per_sequence=rows,
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            rounds=rounds,
        )
        for stream in streams:
            s.stream_drain(stream)

    *found, out = run(
        body,
        operands=[
            (np.array(kept, np.int32), SMEM),
            (positions, SMEM),
            *[(one, VMEM) for one in flat],
            *[(one, HBM) for one in arrays],
        ],
        results=[
            *[(one.shape, jnp.float32, HBM) for one in arrays],
            ((len(flat[0]), values), jnp.float32, VMEM),
        ],
        scratch=[
            *[VMEM((slots, *shape), jnp.float32) for shape in shapes],
            pltpu.SemaphoreType.DMA((8, slots)),
        ],
        aliases={7 + index: index for index in range(4)},
        mode=mode,
    )
    heads = ((value_heads, key_dim, value_dim), (rows, key_heads, key_dim))
    heads += ((rows, value_heads, value_dim), (rows, value_heads, key_dim))
    awake = np.array(firsts) >= 0
    old = [one.reshape(batch, *h) for one, h in zip(arrays, heads, strict=True)]
    # the reference wants finite numbers in the rows that it masks
    (expected,), new = meaning(
        KeptDeltaRule(),
        (*operands, np.array(kept, np.int32)),
        [np.nan_to_num(one) for one in old],
        positions=positions,
        batch=batch,
        dtype=DType.F32,
    )
    shape = (batch, rows, values)
    got, wanted = out[: batch * rows].reshape(shape), expected.reshape(shape)
    error = {"rtol": 2**-7, "atol": 1e-4} if rounds else {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(got[awake], wanted[awake], **error)
    assert rounds == np.array_equal(got, got.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(got[~awake], 0)
    after = [one.reshape(batch, *h) for one, h in zip(found, heads, strict=True)]
    for got, wanted, before in zip(after, new, old, strict=True):
        np.testing.assert_allclose(got[awake], wanted[awake], rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got[~awake].view(np.int32), before[~awake].view(np.int32))
    nothing = np.array(kept) == 0  # not one bit of the state changes
    np.testing.assert_array_equal(after[0][nothing].view(np.int32), old[0][nothing].view(np.int32))
