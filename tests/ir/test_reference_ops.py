"""Reference meaning of single ops, against the formula written out in numpy float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from mkc.ir.facets import REFERENCE
from mkc.ir.infer import infer
from mkc.ir.ops import Activation
from mkc.ir.ops import AllReduce
from mkc.ir.ops import Argmax
from mkc.ir.ops import Attention
from mkc.ir.ops import Binary
from mkc.ir.ops import BinaryKind
from mkc.ir.ops import Cast
from mkc.ir.ops import CausalConv
from mkc.ir.ops import DeltaRule
from mkc.ir.ops import Embed
from mkc.ir.ops import L2Norm
from mkc.ir.ops import Linear
from mkc.ir.ops import MergeHeads
from mkc.ir.ops import NormRounding
from mkc.ir.ops import NormWeight
from mkc.ir.ops import Op
from mkc.ir.ops import RmsNorm
from mkc.ir.ops import Rotary
from mkc.ir.ops import RotaryTable
from mkc.ir.ops import Scale
from mkc.ir.ops import Slice
from mkc.ir.ops import SplitHeads
from mkc.ir.ops import SplitParts
from mkc.ir.ops import Unary
from mkc.ir.reference_ops import OpContext
from mkc.ir.reference_ops import Rounding
from mkc.ir.register import BUILT_IN
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis
from mkc.ir.types import concat_axes
from mkc.ir.types import heads
from mkc.ir.types import tensor

type Numbers = NDArray[Any]

DTYPES = {"bfloat16": DType.BF16, "float32": DType.F32, "int32": DType.I32}


def numbers(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Numbers:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def type_of(array: Numbers, *axes: Any) -> TensorType:
    return tensor(DTYPES[str(array.dtype)], *(axes or array.shape))


def run(
    op: Op,
    operands: Sequence[Numbers],
    states: Sequence[Numbers] = (),
    *,
    types: Sequence[TensorType] = (),
    rounding: Rounding = "reference",
) -> tuple[list[Numbers], list[Numbers]]:
    """Results and new states, in the dtype they have; state arrays are [batch, ...]."""
    operand_types = tuple(types) or tuple(type_of(one) for one in operands)
    state_types = tuple(type_of(one[0]) for one in states)
    context = OpContext(
        rounding=rounding,
        operand_types=operand_types,
        result_types=infer(op, operand_types, state_types),
    )
    results, new_states = REFERENCE.table[type(op)](
        op,
        tuple(jnp.asarray(one) for one in operands),
        tuple(jnp.asarray(one) for one in states),
        context,
    )
    for result, type_ in zip(results, context.result_types, strict=True):
        assert result.shape == type_.shape
        if rounding == "reference":
            assert DTYPES[str(result.dtype)] is type_.dtype
    return [np.asarray(one) for one in results], [np.asarray(one) for one in new_states]


def one(op: Op, *operands: Numbers, **options: Any) -> Numbers:
    results, _ = run(op, operands, **options)
    return results[0]


def close(found: Numbers, expected: Numbers, tolerance: float = 2e-6) -> None:
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


def bf16(x: Numbers) -> Numbers:
    """Rounded to bf16 and back."""
    return np.asarray(x, np.float32).astype(bfloat16).astype(np.float64)


def softplus(x: Numbers) -> Numbers:
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def test_every_built_in_op_has_a_meaning() -> None:
    assert set(BUILT_IN) <= set(REFERENCE.table)


def test_embed() -> None:
    table = numbers(5, 3, dtype=bfloat16)
    np.testing.assert_array_equal(one(Embed(), np.int32([4, 0]), table), table[[4, 0]])


@pytest.mark.parametrize("weight_form", NormWeight)
def test_rms_norm(weight_form: NormWeight) -> None:
    x, w = numbers(2, 3, 8), numbers(8, seed=1)
    gain = w if weight_form is NormWeight.PLAIN else 1.0 + w
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 0.1) * gain
    close(one(RmsNorm(eps=0.1, weight=weight_form), x, w), expected)


def test_rms_norm_rounds_once_or_twice() -> None:
    x, w = numbers(4, 64, dtype=bfloat16), numbers(64, seed=1)
    wide = x.astype(np.float32)
    normalised = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + np.float32(1e-6))
    once = one(RmsNorm(eps=1e-6), x, w)
    twice = one(RmsNorm(eps=1e-6, rounding=NormRounding.TWICE), x, w)
    close(once, bf16(normalised * w), 1e-2)
    np.testing.assert_array_equal(twice.astype(np.float64), bf16(bf16(normalised) * w))
    assert (once != twice).any()


def test_l2_norm_sums_and_gives_f32() -> None:
    x = numbers(2, 3, 8, dtype=bfloat16)
    wide = x.astype(np.float64)
    close(one(L2Norm(eps=0.1), x), wide / np.sqrt((wide**2).sum(-1, keepdims=True) + 0.1))


def test_linear_accumulates_in_f32_and_rounds_once() -> None:
    x, w = numbers(2, 256, dtype=bfloat16), numbers(5, 256, seed=1, dtype=bfloat16)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    close(one(Linear(dtype=DType.F32), x, w), exact, 1e-5)
    # One rounding to 8 significant bits: at most half a unit in the last place.
    rounded = one(Linear(), x, w).astype(np.float64)
    assert (np.abs(rounded - exact) <= 2.0**-8 * np.abs(exact) + 1e-5).all()


def test_heads_and_parts() -> None:
    x = numbers(2, 12)
    split = one(SplitHeads(), x, types=[tensor(DType.F32, 2, heads(3, 4))])
    np.testing.assert_array_equal(split, x.reshape(2, 3, 4))
    np.testing.assert_array_equal(one(MergeHeads(), split), x)
    parts = concat_axes([heads(2, 2), heads(1, 5), axis(3)])
    results, _ = run(SplitParts(), [x], types=[tensor(DType.F32, 2, parts)])
    assert [one.shape[1] for one in results] == [4, 5, 3]
    np.testing.assert_array_equal(np.concatenate(results, axis=1), x)
    np.testing.assert_array_equal(one(Slice(start=3, size=4), x), x[:, 3:7])


def test_rotary_table() -> None:
    (cos, sin), _ = run(RotaryTable(theta=1e4, dim=8, dtype=DType.F32), [np.int32([0, 3, 1000])])
    angle = np.array([0, 3, 1000])[:, None] * 1e4 ** (-np.arange(0, 8, 2) / 8)
    # The angle is an f32 product: its error grows with the position.
    close(cos, np.cos(angle), 1e-4)
    close(sin, np.sin(angle), 1e-4)


def test_rotary_rotates_pairs_half_the_rotated_width_apart() -> None:
    x = numbers(2, 3, 8)
    angle = numbers(2, 2, seed=1)
    found = one(Rotary(), x, np.cos(angle), np.sin(angle))
    expected = x.astype(np.float64)
    for i in range(2):
        pair = x[..., i] + 1j * x[..., i + 2]
        turned = pair * np.exp(1j * angle[:, i])[:, None]
        expected[..., i], expected[..., i + 2] = turned.real, turned.imag
    close(found, expected)
    np.testing.assert_array_equal(found[..., 4:], x[..., 4:])


def test_rotary_rounds_products_and_their_sum() -> None:
    x = numbers(1, 1, 2, dtype=bfloat16)
    cos, sin = (numbers(1, 1, seed=seed, dtype=bfloat16) for seed in (1, 2))
    a, b, c, s = (one.astype(np.float64).item() for one in (x[..., 0], x[..., 1], cos, sin))
    expected = [bf16(bf16(a * c) - bf16(b * s)), bf16(bf16(b * c) + bf16(a * s))]
    found = one(Rotary(), x, cos, sin)
    np.testing.assert_array_equal(found[0, 0].astype(np.float64), np.array(expected))


def test_causal_conv_over_several_steps() -> None:
    """Row by row it is the convolution of the whole sequence; the state is the newest inputs."""
    length, channels, taps = 6, 3, 4
    u, weight = numbers(length, channels), numbers(channels, 1, taps, seed=1)
    state = np.zeros((1, taps - 1, channels), np.float32)
    found = []
    for row in u:
        (result,), (state,) = run(CausalConv(taps=taps), [row[None], weight], [state])
        found.append(result[0])
    padded = np.concatenate([np.zeros((taps - 1, channels)), u])
    total = np.stack([(padded[t : t + taps] * weight[:, 0].T).sum(0) for t in range(length)])
    close(np.stack(found), total / (1 + np.exp(-total)))
    np.testing.assert_array_equal(state[0], u[-3:])


def test_delta_rule_over_several_steps() -> None:
    """Against the recurrence with explicit outer products; value head h reads key head h // 2."""
    batch, key_heads, value_heads, dk, dv = 2, 2, 4, 8, 5
    state = np.zeros((batch, value_heads, dk, dv), np.float32)
    memory = np.zeros((batch, value_heads, dk, dv))
    for step in range(3):
        q, k = (numbers(batch, key_heads, dk, seed=10 * step + n) for n in (1, 2))
        v = numbers(batch, value_heads, dv, seed=10 * step + 3)
        beta = np.abs(numbers(batch, value_heads, seed=10 * step + 4))
        decay = -np.abs(numbers(batch, value_heads, seed=10 * step + 5))
        op = DeltaRule(dtype=DType.F32)
        (found,), (state,) = run(op, [q, k, v, beta, decay], [state])
        for b in range(batch):
            for h in range(value_heads):
                key, query = k[b, h // 2].astype(np.float64), q[b, h // 2]
                memory[b, h] *= np.exp(decay[b, h])
                wrong = v[b, h] - memory[b, h].T @ key
                memory[b, h] += beta[b, h] * np.outer(key, wrong)
                close(found[b, h], memory[b, h].T @ query, 1e-4)
    close(state, memory, 1e-4)


def test_attention_writes_then_attends_up_to_the_position() -> None:
    """Rows are sequences at different positions; what lies behind the position is not read."""
    batch, context, kv_heads, group, dim = 2, 16, 2, 3, 4
    positions = np.int32([0, 9])
    q = numbers(batch, kv_heads * group, dim)
    k, v = (numbers(batch, kv_heads, dim, seed=seed) for seed in (1, 2))
    keys, values = (numbers(batch, context, kv_heads, dim, seed=seed) for seed in (3, 4))
    for row, position in enumerate(positions):
        keys[row, position:] = np.nan
        values[row, position:] = np.nan
    (found,), (new_keys, new_values) = run(
        Attention(scale=0.7), [q, k, v, positions], [keys, values]
    )
    for row, position in enumerate(positions):
        np.testing.assert_array_equal(new_keys[row, position], k[row])
        np.testing.assert_array_equal(new_values[row, position], v[row])
        np.testing.assert_array_equal(new_keys[row, :position], keys[row, :position])
        for head in range(kv_heads * group):
            kv = head // group
            scores = 0.7 * new_keys[row, : position + 1, kv].astype(np.float64) @ q[row, head]
            weights = np.exp(scores - scores.max())
            expected = weights / weights.sum() @ new_values[row, : position + 1, kv]
            close(found[row, head], expected, 1e-5)


FORMULAS = {
    Activation.NONE: lambda x: x,
    Activation.SILU: lambda x: x / (1 + np.exp(-x)),
    Activation.SIGMOID: lambda x: 1 / (1 + np.exp(-x)),
    Activation.SOFTPLUS: softplus,
    Activation.EXP: np.exp,
    Activation.TANH: np.tanh,
    Activation.GELU_TANH: lambda x: (
        0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    ),
    Activation.NEGATE: np.negative,
}


@pytest.mark.parametrize("function", Activation)
def test_unary(function: Activation) -> None:
    x = np.float32([[-30.0, -2.0, -0.5, 0.0, 0.1, 3.0, 30.0]])
    close(one(Unary(function=function), x), FORMULAS[function](x.astype(np.float64)), 1e-5)
    rounded = one(Unary(function=function, dtype=DType.BF16), x)
    close(rounded, FORMULAS[function](x.astype(np.float64)), 4e-3)


@pytest.mark.parametrize(
    ("kind", "formula"),
    [
        (BinaryKind.ADD, np.add),
        (BinaryKind.SUB, np.subtract),
        (BinaryKind.MUL, np.multiply),
    ],
)
def test_binary_computes_in_f32_and_rounds_once(kind: BinaryKind, formula: Any) -> None:
    a, b = numbers(2, 3, 8, dtype=bfloat16), numbers(8, seed=1)
    exact = formula(a.astype(np.float64), b.astype(np.float64))
    close(one(Binary(function=kind), a, b), exact)
    rounded = one(Binary(function=kind, dtype=DType.BF16), a, b)
    np.testing.assert_array_equal(
        rounded.astype(np.float64), bf16(formula(a.astype(np.float32), b))
    )


def test_scale_cast_and_sum_over_one_rank() -> None:
    x = numbers(2, 8)
    close(one(Scale(factor=0.25), x), 0.25 * x)
    np.testing.assert_array_equal(one(Cast(dtype=DType.BF16), x).astype(np.float64), bf16(x))
    np.testing.assert_array_equal(one(AllReduce(ranks=1), x).astype(np.float64), bf16(x))


def test_argmax_takes_the_lowest_index_of_equal_elements() -> None:
    x = np.float32([[1, 3, 3, 2], [5, 5, 5, 5]])
    np.testing.assert_array_equal(one(Argmax(), x), [1, 0])


def test_float32_keeps_what_bf16_would_round() -> None:
    x, w = numbers(2, 16), numbers(4, 16, seed=1)
    types = [tensor(DType.BF16, 2, 16), tensor(DType.BF16, 4, 16)]
    found = one(Linear(), x, w, types=types, rounding="float32")
    assert found.dtype == np.float32
    close(found, x.astype(np.float64) @ w.T, 1e-5)
