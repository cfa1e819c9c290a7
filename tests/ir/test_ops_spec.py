"""The operations of speculative rounds: every facet, and each meaning against a plain one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.errors import ShapeError
from mkc.ir import ops_spec
from mkc.ir.facets import COST
from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.facets import REFERENCE
from mkc.ir.infer import infer
from mkc.ir.ops import CausalConv
from mkc.ir.ops import DeltaRule
from mkc.ir.ops import Op
from mkc.ir.ops_spec import SPEC_OPS
from mkc.ir.ops_spec import Accept
from mkc.ir.ops_spec import BlockAttention
from mkc.ir.ops_spec import BlockTokens
from mkc.ir.ops_spec import CacheAppend
from mkc.ir.ops_spec import DynamicConv
from mkc.ir.ops_spec import KeptConv
from mkc.ir.ops_spec import KeptDeltaRule
from mkc.ir.ops_spec import KeptPositions
from mkc.ir.ops_spec import NextPositions
from mkc.ir.ops_spec import ReadTaps
from mkc.ir.ops_spec import Tap
from mkc.ir.ops_spec import TopK
from mkc.ir.reference import OpContext
from mkc.ir.reference_spec import committed_state
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import tensor

I32, F32 = DType.I32, DType.F32
RANDOM = np.random.default_rng(5)
type Arrays = list[NDArray[Any]]


def types_of(arrays: Sequence[NDArray[Any]], *, states: bool = False) -> tuple[TensorType, ...]:
    names = {"i": DType.I32, "f": DType.F32}
    return tuple(
        tensor(names[one.dtype.kind], *(one.shape[1:] if states else one.shape)) for one in arrays
    )


def run(
    op: Op, operands: Arrays, states: Sequence[NDArray[Any]] = (), valid: Any = None
) -> tuple[Arrays, Arrays]:
    """Results and new states, states [batch, ...]; also checks the inferred types."""
    operand_types = types_of(operands)
    result_types = infer(op, operand_types, types_of(states, states=True))
    context = OpContext(
        rounding="float32",
        operand_types=operand_types,
        result_types=result_types,
        valid=None if valid is None else jnp.asarray(valid),
    )
    function = REFERENCE.find(op)
    assert function is not None
    given = tuple(jnp.asarray(one) for one in operands), tuple(jnp.asarray(one) for one in states)
    results, new = jax.jit(lambda *arrays: function(op, *arrays, context))(*given)
    assert [one.shape for one in results] == [one.shape for one in result_types]
    assert [one.shape for one in new] == [one.shape for one in states]
    return [np.asarray(one) for one in results], [np.asarray(one) for one in new]


def normal(*shape: int) -> NDArray[np.float32]:
    return RANDOM.normal(size=shape).astype(np.float32)


def numbers(*values: Any) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def test_every_op_is_complete() -> None:
    defined = {
        one
        for one in vars(ops_spec).values()
        if isinstance(one, type) and issubclass(one, Op) and one is not Op
    }
    assert defined == set(SPEC_OPS)
    for facet in (INFER, REFERENCE, COST):
        assert [one.__name__ for one in SPEC_OPS if one not in facet.table] == []
    assert {one.mnemonic: one for one in SPEC_OPS}.items() <= MNEMONICS.items()


# States that are committed late.

ROWS, KEY_HEADS, VALUE_HEADS, DK, DV = 8, 2, 6, 5, 7


def delta_operands(batch: int, rows: int) -> Arrays:
    """q, k, v, beta, decay of a step; keys have length 1, as everywhere."""
    count = batch * rows
    q, k = normal(count, KEY_HEADS, DK), normal(count, KEY_HEADS, DK)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    beta = RANDOM.random((count, VALUE_HEADS), np.float32)
    decay = -2 * RANDOM.random((count, VALUE_HEADS), np.float32)
    return [q, k, normal(count, VALUE_HEADS, DV), beta, decay]


def no_rows(batch: int) -> Arrays:
    return [
        np.zeros((batch, ROWS, KEY_HEADS, DK), np.float32),
        np.zeros((batch, ROWS, VALUE_HEADS, DV), np.float32),
        np.zeros((batch, ROWS, VALUE_HEADS), np.float32),
    ]


def test_the_chunked_delta_rule_is_the_stepwise_one() -> None:
    """Outputs of all rows, and the state after any number of them; the worst of 64 sequences."""
    batch = 64
    operands, memory = delta_operands(batch, ROWS), normal(batch, VALUE_HEADS, DK, DV)
    nothing = np.zeros(batch, np.int32)
    (found,), states = run(KeptDeltaRule(), [*operands, nothing], [memory, *no_rows(batch)])
    assert (states[0] == memory).all(), "nothing is committed, bit for bit"
    rows = [one.reshape(batch, ROWS, *one.shape[1:]) for one in operands]
    expected, stepped = [], [memory]
    for row in range(ROWS):
        (output,), (state,) = run(DeltaRule(), [one[:, row] for one in rows], stepped[-1:])
        expected.append(output)
        stepped.append(state)
    # Sums of a few tens of products of numbers around 1, in another order.
    wanted = np.stack(expected, axis=1).reshape(found.shape)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    for count, state in enumerate(stepped):
        committed = committed_state(*map(jnp.asarray, states), jnp.full(batch, count, jnp.int32))
        np.testing.assert_allclose(np.asarray(committed), state, atol=1e-5)


def test_the_commit_comes_before_the_rows() -> None:
    """Each sequence keeps another number of rows; then both go on from the same state."""
    batch = ROWS + 1
    memory, kept = normal(batch, VALUE_HEADS, DK, DV), np.arange(batch).astype(np.int32)
    first, second = delta_operands(batch, ROWS), delta_operands(batch, ROWS)
    none = np.zeros(batch, np.int32)
    _, states = run(KeptDeltaRule(), [*first, none], [memory, *no_rows(batch)])
    (found,), after = run(KeptDeltaRule(), [*second, kept], states)
    valid = np.arange(ROWS) < kept[:, None]
    _, (stepped,) = run(DeltaRule(), first, [memory], valid)
    (expected,), _ = run(DeltaRule(), second, [stepped])
    np.testing.assert_allclose(found, expected, atol=3e-5)
    np.testing.assert_allclose(after[0], stepped, atol=1e-5)


def test_strong_decay_does_not_overflow() -> None:
    """Decays to nothing within the rows: e^(D_i - D_j) of later rows would be infinite."""
    operands = delta_operands(1, ROWS)
    operands[4] = np.full_like(operands[4], -80.0)
    (found,), states = run(
        KeptDeltaRule(), [*operands, numbers(0)], [normal(1, VALUE_HEADS, DK, DV), *no_rows(1)]
    )
    assert np.isfinite(found).all()
    kept = committed_state(*map(jnp.asarray, states), jnp.array([ROWS]))
    assert np.isfinite(np.asarray(kept)).all()


def test_padding_and_idle_sequences_of_the_delta_rule() -> None:
    operands, memory = delta_operands(3, ROWS), normal(3, VALUE_HEADS, DK, DV)
    rows = [one + 0.5 for one in no_rows(3)]
    valid = np.array([[True] * ROWS, [True] * 3 + [False] * 5, [False] * ROWS])
    kept = numbers(2, 0, 2)
    (found,), states = run(KeptDeltaRule(), [*operands, kept], [memory, *rows], valid)
    for old, new in zip([memory, *rows], states, strict=True):
        assert (old[2] == new[2]).all(), "an idle sequence keeps every bit"
    assert (states[0][1] == memory[1]).all()
    changed = [one.copy() for one in operands]
    for one in changed:
        one[ROWS + 3 : 2 * ROWS] = 99.0
    (again,), others = run(KeptDeltaRule(), [*changed, kept], [memory, *rows], valid)
    assert (found[: ROWS + 3] == again[: ROWS + 3]).all(), "padding has no influence"
    assert all((a == b).all() for a, b in zip(states, others, strict=True))


def test_the_convolution_commits_the_kept_inputs() -> None:
    batch, channels, taps = ROWS + 1, 4, 4
    weight = normal(channels, 1, taps)
    history = normal(batch, taps - 1, channels)
    first, second = normal(batch * ROWS, channels), normal(batch * ROWS, channels)
    kept = np.arange(batch).astype(np.int32)
    op, plain = KeptConv(taps=taps), CausalConv(taps=taps)
    empty = np.zeros((batch, ROWS, channels), np.float32)
    none = np.zeros(batch, np.int32)
    (found,), states = run(op, [first, weight, none], [history, empty])
    (expected,), _ = run(plain, [first, weight], [history])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert (states[0] == history).all()
    (found,), after = run(op, [second, weight, kept], states)
    valid = np.arange(ROWS) < kept[:, None]
    _, (newest,) = run(plain, [first, weight], [history], valid)
    (expected,), _ = run(plain, [second, weight], [newest])
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert (after[0] == newest).all()
    assert (after[1].reshape(second.shape) == second).all()


# Positions and tokens of a block.


def test_positions() -> None:
    positions = numbers(5, 6, 7, 8, -1, -1, 0, -1, -1)
    count = numbers(3, 0, 1)
    (kept,), _ = run(KeptPositions(), [positions, count])
    assert kept.reshape(3, 3).tolist() == [[5, 6, 7], [-1, -1, -1], [0, -1, -1]]
    (moved,), _ = run(NextPositions(context=10), [positions, count])
    assert moved.reshape(3, 3).tolist() == [[8, 9, -1], [8, 9, -1], [1, 2, 3]]
    (moved,), _ = run(NextPositions(context=10), [numbers(-1, -1, 9, -1), numbers(0, 1)])
    assert moved.tolist() == [-1] * 4


def test_block_tokens() -> None:
    (found,), _ = run(BlockTokens(mask=99), [numbers(4, 7), np.zeros(6, np.int32)])
    assert found.tolist() == [4, 99, 99, 7, 99, 99]


# The drafter.


@pytest.mark.parametrize("side", [0, 1])
def test_dynamic_convolution(side: int) -> None:
    """Against the sum as it is written; the second block does not see the first."""
    rows, channels, group, taps = 4, 6, 3, 3
    x, base = normal(2 * rows, channels), normal(2, taps, channels)
    kernels = normal(2 * rows, 2 * taps * channels // group)
    (found,), _ = run(DynamicConv(side=side, group=group, rows=rows), [x, kernels, base])
    dynamic = kernels.reshape(2 * rows, 2, taps, channels // group)
    for row in range(2 * rows):
        for c in range(channels):
            total = 0.0
            for tap in range(min(taps, row % rows + 1)):
                factor = base[side, tap, c] + dynamic[row, side, tap, c // group]
                total += factor * x[row - tap, c]
            assert found[row, c] == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 5, 3])
def test_block_attention(causal: bool, window: int | None) -> None:
    """One softmax per row and head over the keys that may be seen; slots beyond hold NaN."""
    heads, kv_heads, dim, rows, length = 4, 2, 3, 4, 12
    positions = numbers(7, 8, 9, 10, 3, 4, -1, -1)
    context_positions = numbers(5, 6, -1, -1, 2, -1, -1, -1)
    q, k, v = normal(8, heads, dim), normal(8, kv_heads, dim), normal(8, kv_heads, dim)
    new_k, new_v = normal(8, kv_heads, dim), normal(8, kv_heads, dim)
    caches = [normal(2, length, kv_heads, dim) for _ in range(2)]
    for one in caches:
        one[0, 7:], one[1, 3:] = np.nan, np.nan
    op = BlockAttention(scale=0.7, window=window, causal=causal)
    operands = [q, k, v, positions, new_k, new_v, context_positions]
    (found,), after = run(op, operands, caches)
    keys, values = (one.copy() for one in caches)
    for cache, new in ((keys, new_k), (values, new_v)):
        cache[0, 5:7], cache[1, 2] = new[:2], new[4]
    for mine, wanted in zip(after, (keys, values), strict=True):
        np.testing.assert_array_equal(mine, wanted)
    for row in np.flatnonzero(positions >= 0):
        sequence, first = row // rows, row // rows * rows
        seen = [(p, keys[sequence, p], values[sequence, p]) for p in range(positions[first])]
        seen += [
            (positions[j], k[j], v[j]) for j in range(first, first + rows) if positions[j] >= 0
        ]
        near = [one for one in seen if window is None or abs(one[0] - positions[row]) < window]
        near = [one for one in near if not causal or one[0] <= positions[row]]
        for head in range(heads):
            group = head * kv_heads // heads
            scores = np.array([0.7 * one[1][group] @ q[row, head] for one in near])
            weights = np.exp(scores - scores.max())
            mixed = sum(w * one[2][group] for w, one in zip(weights, near, strict=True))
            np.testing.assert_allclose(found[row, head], mixed / weights.sum(), atol=1e-5)
    assert np.isfinite(found).all()


def test_cache_append() -> None:
    caches = [normal(2, 6, 1, 2) for _ in range(2)]
    k, v = normal(4, 1, 2), normal(4, 1, 2)
    _, after = run(CacheAppend(), [k, v, numbers(4, 5, -1, -1)], caches)
    for mine, old, new in zip(after, caches, (k, v), strict=True):
        wanted = old.copy()
        wanted[0, 4:6] = new[:2]
        np.testing.assert_array_equal(mine, wanted)


def test_top_k_takes_the_lowest_of_equal_elements() -> None:
    x = np.array([[1, 3, 3, 0, 3], [5, 5, 5, 5, 5]], np.float32)
    (values, ids), _ = run(TopK(k=3), [x])
    assert values.tolist() == [[3, 3, 3], [5, 5, 5]]
    assert ids.tolist() == [[1, 2, 4], [0, 1, 2]]


# What does not fit together.

ROWS_I32, BATCH_I32, BATCH_F32 = tensor(I32, 8), tensor(I32, 2), tensor(F32, 2)
X = tensor(F32, 8, 6)
SAMPLING = (BATCH_F32, BATCH_I32, BATCH_F32, BATCH_F32, tensor(I32, 2, 2))


@pytest.mark.parametrize(
    ("op", "operands", "states", "message"),
    [
        (Tap(), (X,), (tensor(F32, 5),), r"expected a state f32\[6\]"),
        (
            ReadTaps(name="t", layers=(1,), width=6, dtype=DType.F32),
            (ROWS_I32,),
            (tensor(F32, 5),),
            "states f32",
        ),
        (
            ReadTaps(name="t", layers=(1, 2), width=6, numbers=(0,), instances=(0,)),
            (ROWS_I32,),
            (),
            "for each of the layers",
        ),
        (KeptPositions(), (ROWS_I32, tensor(I32, 3)), (), "divides the 8 rows"),
        (NextPositions(context=4), (ROWS_I32, BATCH_F32), (), "count i32"),
        (BlockTokens(mask=1), (X, ROWS_I32), (), "anchor i32"),
        (
            DynamicConv(side=2, group=3, rows=4),
            (X, tensor(F32, 8, 8), tensor(F32, 2, 2, 6)),
            (),
            "a side below 2",
        ),
        (
            DynamicConv(side=0, group=4, rows=4),
            (X, tensor(F32, 8, 8), tensor(F32, 2, 2, 6)),
            (),
            "groups of 4",
        ),
        (
            DynamicConv(side=0, group=3, rows=4),
            (X, tensor(F32, 8, 9), tensor(F32, 2, 2, 6)),
            (),
            "Project to one number per side, tap and group",
        ),
        (TopK(k=7), (X,), (), "k from 1 to 6"),
        (Accept(rows=4), (X, ROWS_I32), (), "3 of: logits"),
        (Accept(rows=3), (X, ROWS_I32, ROWS_I32), (), "rows of a sequence that divide 8"),
        (Accept(rows=2), (X, ROWS_I32, ROWS_I32, *SAMPLING), (), "temperature of 4 sequences"),
        (Accept(rows=4), (X, BATCH_I32, ROWS_I32, *SAMPLING), (), r"tokens i32\[8\]"),
        (
            Accept(rows=4),
            (X, ROWS_I32, ROWS_I32, *SAMPLING, tensor(I32, 8, 4), tensor(F32, 8, 3)),
            (),
            "candidates i32",
        ),
    ],
)
def test_a_misfit_is_named(
    op: Op, operands: tuple[TensorType, ...], states: tuple[TensorType, ...], message: str
) -> None:
    with pytest.raises(ShapeError, match=message):
        infer(op, operands, states)
