"""Each op that prefill computes in another order, against its plain form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from mkc.runtime import prefill_ops
from mkc.runtime.kernel import mesh_of
from mkc.runtime.prefill_ops import append_rows
from mkc.runtime.prefill_ops import argmax_over_ranks
from mkc.runtime.prefill_ops import attend
from mkc.runtime.prefill_ops import chunked_delta_rule
from mkc.runtime.prefill_ops import sum_over_ranks
from mkc.runtime.prefill_ops import tape_product

type Floats = NDArray[np.float64]

LANES, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 2, 4, 8, 6


def delta_operands(rows: int, *, decay: float, alike: float) -> dict[str, Floats]:
    """Unit keys, of which `alike` is common to all rows; decays around `decay`."""
    random = np.random.default_rng(rows)

    def unit(x: Floats) -> Floats:
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    keys = random.standard_normal((LANES, rows, KEY_HEADS, KEY_DIM))
    return {
        "q": unit(random.standard_normal(keys.shape)),
        "k": unit((1 - alike) * keys + alike),
        "v": random.standard_normal((LANES, rows, VALUE_HEADS, VALUE_DIM)),
        "beta": random.uniform(0.05, 1.0, (LANES, rows, VALUE_HEADS)),
        "decay": -decay * random.uniform(0.5, 1.5, (LANES, rows, VALUE_HEADS)),
        "memory": random.standard_normal((LANES, VALUE_HEADS, KEY_DIM, VALUE_DIM)),
    }


def one_by_one(operands: dict[str, Floats], counts: list[int]) -> tuple[Floats, Floats]:
    """The definition, in doubles; rows of padding give zeros."""
    memory, out = operands["memory"].copy(), np.zeros_like(operands["v"])
    group = VALUE_HEADS // KEY_HEADS
    for lane, count in enumerate(counts):
        for row in range(count):
            for head in range(VALUE_HEADS):
                q, k = (operands[one][lane, row, head // group] for one in ("q", "k"))
                decay = operands["decay"][lane, row, head].reshape(-1, 1)  # of a head, or channels
                state = memory[lane, head] * np.exp(decay)
                error = operands["v"][lane, row, head] - state.T @ k
                state = state + np.outer(k, operands["beta"][lane, row, head] * error)
                memory[lane, head] = state
                out[lane, row, head] = state.T @ q
    return out, memory


@pytest.mark.parametrize("alike", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("rows", [1, 5, 64, 100, 192])
def test_delta_rule_in_chunks(rows: int, decay: float, alike: float) -> None:
    """Weak and strong decay (e^-30 per row), keys that hardly differ, a state that is not zero."""
    operands = delta_operands(rows, decay=decay, alike=alike)
    counts = [rows, rows // 2]
    valid = np.arange(rows) < np.array(counts)[:, None]
    single = {key: jnp.asarray(one, jnp.float32) for key, one in operands.items()}
    out, memory = jax.jit(chunked_delta_rule)(**single, valid=jnp.asarray(valid))
    expected_out, expected_memory = one_by_one(operands, counts)
    for lane, count in enumerate(counts):
        np.testing.assert_allclose(out[lane, :count], expected_out[lane, :count], rtol=0, atol=2e-5)
    np.testing.assert_allclose(memory, expected_memory, rtol=0, atol=2e-5)


@pytest.mark.parametrize("decay", [1.0, 30.0])
@pytest.mark.parametrize("rows", [1, 5, 48, 100])
def test_delta_rule_in_chunks_with_a_decay_of_each_channel(rows: int, decay: float) -> None:
    """Channels that stay (no decay) beside channels that vanish at once."""
    operands = delta_operands(rows, decay=decay, alike=0.5)
    shares = np.random.default_rng(2).uniform(0.0, 2.0, (LANES, rows, VALUE_HEADS, KEY_DIM))
    operands["decay"] = operands["decay"][..., None] * shares
    operands["decay"][..., 0] = 0.0
    counts = [rows, rows // 2]
    valid = np.arange(rows) < np.array(counts)[:, None]
    single = {key: jnp.asarray(one, jnp.float32) for key, one in operands.items()}
    out, memory = jax.jit(chunked_delta_rule)(**single, valid=jnp.asarray(valid))
    expected_out, expected_memory = one_by_one(operands, counts)
    for lane, count in enumerate(counts):
        np.testing.assert_allclose(out[lane, :count], expected_out[lane, :count], rtol=0, atol=2e-5)
    np.testing.assert_allclose(memory, expected_memory, rtol=0, atol=2e-5)


def test_delta_rule_without_rows_keeps_every_bit() -> None:
    """Negative zeros too, whatever stands in the padding."""
    operands = {
        key: jnp.full(one.shape, jnp.nan, jnp.float32)
        for key, one in delta_operands(5, decay=1.0, alike=0.0).items()
    }
    memory = jnp.full_like(operands["memory"], -0.0)
    operands["memory"] = memory
    _, new = chunked_delta_rule(**operands, valid=jnp.zeros((LANES, 5), bool))
    assert np.asarray(new).tobytes() == np.asarray(memory).tobytes()


@pytest.mark.parametrize("start", [0, 3, 24, 29])
@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_rows_are_appended_nowhere_else(start: int, count: int) -> None:
    """Also where the padded block reaches behind the end of the cache."""
    context, rows, width = 32, 8, 4
    if start + count > context:
        count = context - start
    random = np.random.default_rng(1)
    cache = random.standard_normal((3, 2, context, width)).astype(np.float32)
    new = random.standard_normal((1, rows, width)).astype(np.float32)
    scalars = [jnp.array([one]) for one in (1, start, count)]
    found = append_rows(jnp.asarray(cache), jnp.asarray(new), jnp.int32(2), *scalars)
    expected = cache.copy()
    expected[2, 1, start : start + count] = new[0, :count]
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("tile", [16, 48, 128])
def test_attention_tile_by_tile(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that divide the context or not; rows behind the last position are NaN."""
    monkeypatch.setattr(prefill_ops, "ATTENTION_TILE", tile)
    context, rows, heads, kv_heads, dim, scale = 100, 6, 4, 2, 8, 0.3
    random = np.random.default_rng(tile)
    starts, counts = [93, 20], [6, 2]
    keys, values = random.standard_normal((2, 2, 3, context, kv_heads, dim))
    q = random.standard_normal((2, rows, heads, dim))
    slots = [2, 0]
    number = np.arange(rows)
    positions = np.array(
        [
            np.where(number < count, start + number, -1)
            for start, count in zip(starts, counts, strict=True)
        ]
    )
    for lane, slot in enumerate(slots):
        for cache in (keys, values):
            cache[1, slot, starts[lane] + counts[lane] :] = np.nan
    flat = [jnp.asarray(one.reshape(2, 3, context, -1), jnp.float32) for one in (keys, values)]
    out = attend(
        jnp.asarray(q, jnp.float32),
        *flat,
        jnp.int32(1),
        jnp.array(slots),
        jnp.asarray(positions),
        kv_heads,
        scale,
    )
    for lane, slot in enumerate(slots):
        for row in range(counts[lane]):
            end = positions[lane, row] + 1
            for head in range(heads):
                group = head * kv_heads // heads
                scores = keys[1, slot, :end, group] @ q[lane, row, head] * scale
                weights = np.exp(scores - scores.max())
                expected = weights @ values[1, slot, :end, group] / weights.sum()
                np.testing.assert_allclose(out[lane, row, head], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("granule", [16, 32, 96])
def test_a_strided_product_is_the_plain_one(granule: int) -> None:
    """The form for the TPU compiler reads the same rows; sums may differ in their last bits."""
    K, blocks, lanes, rows = 96, 3, 256, 5
    random = np.random.default_rng(granule)
    tape = random.standard_normal((granule * 7 + K * blocks, lanes)).astype(ml_dtypes.bfloat16)
    tape = np.concatenate([tape, np.zeros((-len(tape) % granule, lanes), tape.dtype)])
    x = jnp.asarray(random.standard_normal((rows, K)), jnp.bfloat16)
    forms = [
        tape_product(
            x,
            jnp.asarray(tape),
            jnp.int32(granule * 7),
            blocks=blocks,
            granule=granule,
            strided=strided,
        )
        for strided in (False, True)
    ]
    matrix = tape[granule * 7 :][: K * blocks].reshape(blocks, K, lanes).astype(np.float64)
    expected = np.einsum("rk,bkn->rbn", np.asarray(x, np.float64), matrix).reshape(rows, -1)
    for found in forms:
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("columns", [10, 16])
def test_sums_are_in_rank_order(columns: int) -> None:
    """Numbers whose sum depends on the order; shared between the ranks or not, same bits."""
    ranks, rows = 4, 3
    parts = np.random.default_rng(2).standard_normal((ranks, rows, columns)).astype(np.float32)
    parts *= 10.0 ** np.arange(ranks)[::-1, None, None]
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    assert (expected != parts[::-1].cumsum(axis=0)[-1]).any(), "the order does not matter here"
    found = jax.shard_map(
        lambda x: sum_over_ranks(x[0], ranks, jnp.dtype(jnp.bfloat16))[None],
        mesh=mesh_of(jax.devices()[:ranks]),
        in_specs=PartitionSpec("tp"),
        out_specs=PartitionSpec("tp"),
        check_vma=False,
    )(parts)
    for one in np.asarray(found):
        assert one.tobytes() == expected.astype(ml_dtypes.bfloat16).tobytes()


def test_the_largest_of_all_ranks() -> None:
    """The lowest index on ties, within a rank and between ranks."""
    x = np.zeros((4, 12), np.float32)
    x[0, [5, 9]] = 1.0
    x[1, 11] = 2.0
    x[2, [7, 8]] = 3.0
    found = jax.shard_map(
        argmax_over_ranks,
        mesh=mesh_of(jax.devices()[:4]),
        in_specs=PartitionSpec(None, "tp"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )(x)
    assert found.tolist() == [5, 11, 7, 0] == x.argmax(axis=1).tolist()
    assert found.dtype == jnp.int32
