"""Residual blocks and scaled heads against their reference meaning."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mkc.codegen_pallas import support as s
from mkc.ir.ops_mixing import MixBlocks
from mkc.ir.ops_mixing import ScaleHeads
from mkc.ir.ops_mixing import StoreBlock
from mkc.ir.types import DType
from tests.codegen_pallas.round_reference import meaning
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

EPS = 1e-5


@pytest.mark.parametrize(
    ("rows", "width", "slots", "period", "mode"),
    [
        (8, 256, 3, 1, Mode.LATE),
        (8, 256, 3, 2, Mode.LATE),
        (16, 48, 4, 1, Mode.EAGER),
        (8, 48, 2, 3, Mode.GENERIC),
    ],
)
def test_blocks_are_stored_and_mixed(
    rows: int, width: int, slots: int, period: int, mode: Mode
) -> None:
    """A mixture before every store and behind the last one; slots start as NaN."""
    random = np.random.default_rng(slots)
    layers = slots * period
    streams = random.normal(size=(layers + 1, rows, width)).astype(np.float32)
    streams[1] *= 100  # the norm takes that out of the score, and only there
    norm, projection = random.normal(size=(2, 1, width)).astype(np.float32)

    def body(streams: Any, norm: Any, projection: Any, out: Any, after: Any, *rest: Any) -> None:
        blocks, count, stream = rest
        buffer = s.View(ref=blocks, start=128, width=slots * width)
        number = s.View(ref=count, start=128, width=128)
        here = s.View(ref=stream, start=128, width=width)
        sizes = {"slots": slots, "period": period}
        s.clear_blocks(number)
        for index in range(layers + 1):
            x = streams[index]
            out[index] = s.mix_blocks(
                buffer, number, x, norm[...], projection[...], eps=EPS, **sizes
            )
            if index < layers:
                here.store(x)
                s.store_block(buffer, number, here, number.load()[0, 0], **sizes)
                after[index] = here.load()

    out, after = run(
        body,
        operands=[(streams, VMEM), (norm, VMEM), (projection, VMEM)],
        results=[
            (streams.shape, jnp.float32, VMEM),
            ((layers, rows, width), jnp.float32, VMEM),
        ],
        scratch=[
            VMEM((rows, 128 + slots * width), jnp.float32),
            VMEM((rows, 256), jnp.int32),
            VMEM((rows, 128 + width), jnp.float32),
        ],
        mode=mode,
    )
    blocks, count = np.zeros((rows, slots, width), np.float32), np.zeros(rows, np.int32)
    for index, x in enumerate(streams):
        operands = (blocks, count, x, norm[0], projection)
        (expected,), _ = meaning(MixBlocks(eps=EPS, period=period), operands, dtype=DType.F32)
        np.testing.assert_allclose(out[index], expected, rtol=1e-4, atol=1e-5)
        if index < layers:
            results, _ = meaning(StoreBlock(period=period), (blocks, count, x))
            blocks, count, stream = results
            np.testing.assert_array_equal(after[index], stream)
            assert (stream == (0 if index % period == 0 else x)).all()
    np.testing.assert_array_equal(out[0], streams[0])  # bit for bit


@pytest.mark.parametrize(
    ("rows", "width", "mode"),
    [(8, 256, Mode.LATE), (16, 48, Mode.EAGER), (8, 48, Mode.GENERIC)],
)
def test_a_mixture_in_two_parts(rows: int, width: int, mode: Mode) -> None:
    """The stream joins what is stored, with none to all slots in use; the others hold NaN."""
    slots = 3
    random = np.random.default_rng(width)
    streams = random.normal(size=(slots + 1, rows, width)).astype(np.float32)
    streams[1] *= 100
    # Scores far apart: the largest one is that of the stream in some rows, of a block in others.
    norm = random.normal(size=(1, width)).astype(np.float32)
    projection = 3 * random.normal(size=(1, width)).astype(np.float32)

    def body(streams: Any, norm: Any, projection: Any, out: Any, *rest: Any) -> None:
        softmax, blocks, count, stream = rest
        buffer = s.View(ref=blocks, start=128, width=slots * width)
        number = s.View(ref=count, start=128, width=128)
        s.clear_blocks(number)
        for index in range(slots + 1):
            x = streams[index]
            vectors = norm[...], projection[...]
            stored = s.mix_stored(buffer, number, *vectors, slots=slots, period=1, eps=EPS)
            softmax[index] = stored[1]
            out[index] = s.mix_stream(x, *stored, *vectors, eps=EPS)
            if index < slots:
                stream[...] = x
                here = s.View(ref=stream, start=0, width=width)
                s.store_block(buffer, number, here, index, slots=slots, period=1)

    out, softmax = run(
        body,
        operands=[(streams, VMEM), (norm, VMEM), (projection, VMEM)],
        results=[
            (streams.shape, jnp.float32, VMEM),
            ((slots + 1, rows, 2), jnp.float32, VMEM),
        ],
        scratch=[
            VMEM((rows, 128 + slots * width), jnp.float32),
            VMEM((rows, 256), jnp.int32),
            VMEM((rows, width), jnp.float32),
        ],
        mode=mode,
    )
    for index, x in enumerate(streams):
        blocks = np.zeros((rows, slots, width), np.float32)
        blocks[:, :index] = streams[:index].swapaxes(0, 1)
        operands = (blocks, np.full(rows, index, np.int32), x, norm[0], projection)
        (expected,), _ = meaning(MixBlocks(eps=EPS), operands, dtype=DType.F32)
        np.testing.assert_allclose(out[index], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(out[0], streams[0])  # bit for bit
    assert (softmax[0] == [-np.inf, 0]).all()
    # Relative to the largest score: a weight is at most one, and that of the only block is one.
    np.testing.assert_allclose(softmax[1, :, 1], 1, rtol=1e-4)
    assert (softmax[1:, :, 1] < slots).all()


@pytest.mark.parametrize("first", [0, 6])
def test_heads_are_scaled(first: int) -> None:
    random = np.random.default_rng(first)
    heads, size = 3, 40
    x = random.normal(size=(8, heads * size)).astype(np.float32)
    factors = random.normal(size=(1, 12)).astype(np.float32)
    factors[:, 9:] = np.nan

    def body(first: Any, x: Any, factors: Any, out: Any) -> None:
        out[...] = s.scale_heads(x[...], factors[...], heads=heads, first=first[0])

    (out,) = run(
        body,
        operands=[(np.array([first], np.int32), SMEM), (x, VMEM), (factors, VMEM)],
        results=[(x.shape, jnp.float32, VMEM)],
    )
    operands = (x.reshape(8, heads, size), factors[0, first : first + heads])
    (expected,), _ = meaning(ScaleHeads(), operands, dtype=DType.F32)
    np.testing.assert_array_equal(out, expected.reshape(8, -1))
