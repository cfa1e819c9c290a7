"""Reference meaning of every op in `jax.numpy`.

A function takes `(op, operands, states, context)` and returns `(results, new states)`, both tuples.
State arrays are [batch, ...]; row s * T + t is token t of sequence s, T rows per sequence. A
padding row (see `Graph.inputs`) leaves every state as it is, bit for bit; its results mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.facets import REFERENCE
from mkc.ir.ops import MASK_BITS
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
from mkc.ir.ops import MaskTokens
from mkc.ir.ops import MergeHeads
from mkc.ir.ops import NormRounding
from mkc.ir.ops import NormWeight
from mkc.ir.ops import RmsNorm
from mkc.ir.ops import Rotary
from mkc.ir.ops import RotaryTable
from mkc.ir.ops import Scale
from mkc.ir.ops import ShardedArgmax
from mkc.ir.ops import Slice
from mkc.ir.ops import SplitHeads
from mkc.ir.ops import SplitParts
from mkc.ir.ops import Unary
from mkc.ir.types import DType
from mkc.ir.types import TensorType

type Rounding = Literal["reference", "float32"]
type Arrays = tuple[Array, ...]
type Outcome = tuple[Arrays, Arrays]

DTYPES = {
    DType.BF16: jnp.bfloat16,
    DType.F32: jnp.float32,
    DType.I32: jnp.int32,
    DType.E2M1X2: jnp.uint8,
    DType.E8M0: jnp.uint8,
}


@dataclass(frozen=True, kw_only=True)
class OpContext:
    """What an op's reference meaning may know besides its operands.

    Attributes:
      rounding: "reference" rounds where the graph says; "float32" keeps every number in f32.
      operand_types, result_types: as in the graph.
      valid: bool [batch, T], False for padding rows; None when the step has none.
    """

    rounding: Rounding
    operand_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    valid: Array | None = None

    def round(self, x: Array, dtype: DType) -> Array:
        """`x` in `dtype`, or in f32 when nothing is rounded."""
        return x.astype(storage_dtype(dtype, self.rounding))

    def result(self, x: Array, number: int = 0) -> Array:
        """`x` rounded to the dtype of a result."""
        return self.round(x, self.result_types[number].dtype)

    def rows_that_count(self, batch: int, rows: int) -> Array:
        """`valid`, True everywhere when the step has no padding: bool [batch, rows / batch]."""
        if self.valid is None:
            return jnp.ones((batch, rows // batch), bool)
        return self.valid


def storage_dtype(dtype: DType, rounding: Rounding) -> jnp.dtype:
    """The array dtype of a value of the graph."""
    if rounding == "float32" and dtype is DType.BF16:
        return jnp.dtype(jnp.float32)
    return jnp.dtype(DTYPES[dtype])


def wide(x: Array) -> Array:
    return x.astype(jnp.float32)


ACTIVATIONS = {
    Activation.NONE: lambda x: x,
    Activation.SILU: lambda x: x * jax.nn.sigmoid(x),
    Activation.SIGMOID: jax.nn.sigmoid,
    Activation.SOFTPLUS: lambda x: jnp.logaddexp(x, 0.0),
    Activation.EXP: jnp.exp,
    Activation.TANH: jnp.tanh,
    Activation.GELU_TANH: lambda x: jax.nn.gelu(x, approximate=True),
    Activation.NEGATE: jnp.negative,
}

_BINARY = {
    BinaryKind.ADD: jnp.add,
    BinaryKind.SUB: jnp.subtract,
    BinaryKind.MUL: jnp.multiply,
}


@REFERENCE.register(Embed)
def _embed(op: Embed, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    tokens, table = operands
    return (context.result(table[tokens]),), states


@REFERENCE.register(RmsNorm)
def _rms_norm(op: RmsNorm, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    x, weight = wide(operands[0]), wide(operands[1])
    y = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + op.eps)
    if op.rounding is NormRounding.TWICE:
        y = wide(context.result(y))
    if op.weight is NormWeight.ZERO_CENTRED:
        weight = 1.0 + weight
    return (context.result(y * weight),), states


@REFERENCE.register(L2Norm)
def _l2_norm(op: L2Norm, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    x = wide(operands[0])
    y = x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + op.eps)
    return (context.result(y),), states


@REFERENCE.register(Linear)
def _linear(op: Linear, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    x, weight = operands
    y = jnp.einsum(
        "rk,nk->rn",
        wide(x),
        wide(weight),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return (context.result(y),), states


@REFERENCE.register(SplitHeads)
@REFERENCE.register(MergeHeads)
def _reshape(
    op: SplitHeads | MergeHeads, operands: Arrays, states: Arrays, context: OpContext
) -> Outcome:
    return (operands[0].reshape(context.result_types[0].shape),), states


@REFERENCE.register(SplitParts)
def _split_parts(op: SplitParts, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    parts = []
    start = 0
    for type_ in context.result_types:
        parts.append(operands[0][:, start : start + type_.shape[1]])
        start += type_.shape[1]
    return tuple(parts), states


@REFERENCE.register(Slice)
def _slice(op: Slice, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    return (operands[0][..., op.start : op.start + op.size],), states


@REFERENCE.register(RotaryTable)
def _rotary_table(op: RotaryTable, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    exponent = jnp.arange(0, op.dim, 2, dtype=jnp.float32) / op.dim
    inverse = 1.0 / jnp.float32(op.theta) ** exponent
    angle = wide(operands[0])[:, None] * inverse
    return (context.result(jnp.cos(angle)), context.result(jnp.sin(angle), 1)), states


@REFERENCE.register(Rotary)
def _rotary(op: Rotary, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    x, cos, sin = operands
    half = cos.shape[-1]
    low, high = wide(x[..., :half]), wide(x[..., half : 2 * half])
    cos, sin = wide(cos)[:, None, :], wide(sin)[:, None, :]

    def product(a: Array, b: Array) -> Array:
        return wide(context.result(a * b))

    rotated = jnp.concatenate(
        [product(low, cos) - product(high, sin), product(high, cos) + product(low, sin)], axis=-1
    )
    return (jnp.concatenate([context.result(rotated), x[..., 2 * half :]], axis=-1),), states


def by_sequence(x: Array, batch: int) -> Array:
    """[rows, ...] -> [batch, T, ...]."""
    return x.reshape(batch, x.shape[0] // batch, *x.shape[1:])


@REFERENCE.register(CausalConv)
def _causal_conv(op: CausalConv, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    u, weight = operands
    (history,) = states  # [batch, taps - 1, channels], oldest first
    batch = history.shape[0]
    valid = context.rows_that_count(batch, u.shape[0])
    inputs = jnp.concatenate([history, by_sequence(u, batch).astype(history.dtype)], axis=1)
    taps = wide(weight)[:, 0, :].T  # [taps, channels]
    length = valid.shape[1]
    windows = jnp.stack([inputs[:, tap : tap + length] for tap in range(op.taps)], axis=2)
    total = jnp.sum(wide(windows) * taps, axis=2).reshape(u.shape)
    # The newest inputs that count: padding comes last.
    first = jnp.sum(valid, axis=1)[:, None] + jnp.arange(op.taps - 1)
    newest = jnp.take_along_axis(inputs, first[:, :, None], axis=1)
    return (context.result(ACTIVATIONS[op.activation](total)),), (newest,)


def sum_over_keys(memory: Array, weights: Array) -> Array:
    """[batch, heads, dk, dv] weighted by [batch, heads, dk]: f32 [batch, heads, dv]."""
    return jnp.sum(memory * weights[..., None], axis=2)


@REFERENCE.register(DeltaRule)
def delta_rule(
    op: DeltaRule,
    operands: Arrays,
    states: Arrays,
    context: OpContext,
    *,
    read: Callable[[Array, Array], Array] = sum_over_keys,
) -> Outcome:
    """`read` may sum in another order."""
    (memory,) = states  # [batch, value heads, dk, dv]
    batch = memory.shape[0]
    valid = context.rows_that_count(batch, operands[0].shape[0])
    group = operands[2].shape[1] // operands[0].shape[1]

    def one_row(memory: Array, row: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, beta, decay, counts = row
        q, k = jnp.repeat(q, group, axis=1), jnp.repeat(k, group, axis=1)
        new = memory * jnp.exp(decay).reshape(*decay.shape[:2], -1, 1)
        predicted = read(new, k)
        correction = beta[..., None] * (v - predicted)
        new = new + k[..., None] * correction[:, :, None, :]
        output = read(new, q)
        return jnp.where(counts[:, None, None, None], new, memory), output

    rows = [jnp.moveaxis(by_sequence(wide(one), batch), 1, 0) for one in operands]
    memory, output = lax.scan(one_row, memory, (*rows, valid.T))
    output = jnp.moveaxis(output, 0, 1).reshape(operands[2].shape)
    return (context.result(output),), (memory,)


@REFERENCE.register(Attention)
def _attention(op: Attention, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    q, k, v, positions = operands
    keys, values = states  # [batch, context, kv heads, dim]
    batch, length = keys.shape[:2]
    sequence = jnp.arange(batch)[:, None]
    positions = by_sequence(positions, batch)
    # Padding is written behind the end, that is nowhere.
    slots = jnp.where(context.rows_that_count(batch, q.shape[0]), positions, length)
    keys = keys.at[sequence, slots].set(by_sequence(k, batch).astype(keys.dtype), mode="drop")
    values = values.at[sequence, slots].set(by_sequence(v, batch).astype(values.dtype), mode="drop")
    rows, heads, dim = q.shape
    grouped = wide(q).reshape(batch, rows // batch, k.shape[1], heads // k.shape[1], dim)
    highest = lax.Precision.HIGHEST
    scores = jnp.einsum("btgqd,bcgd->btgqc", grouped, wide(keys), precision=highest) * op.scale
    # A padding row sees the first slot: a softmax of nothing is NaN.
    seen = jnp.arange(length) <= jnp.maximum(positions, 0)[:, :, None]
    weights = jax.nn.softmax(jnp.where(seen[:, :, None, None, :], scores, -jnp.inf), axis=-1)
    # Slots past the last position may hold anything; a weight of zero does not remove a NaN.
    visible = jnp.where(jnp.any(seen, axis=1)[:, :, None, None], wide(values), 0.0)
    output = jnp.einsum("btgqc,bcgd->btgqd", weights, visible, precision=highest)
    return (context.result(output.reshape(q.shape)),), (keys, values)


@REFERENCE.register(Unary)
def _unary(op: Unary, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    return (context.result(ACTIVATIONS[op.function](wide(operands[0]))),), states


@REFERENCE.register(Binary)
def _binary(op: Binary, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    a, b = operands
    if context.result_types[0].dtype is DType.I32:
        return (_BINARY[op.function](a, b),), states
    return (context.result(_BINARY[op.function](wide(a), wide(b))),), states


@REFERENCE.register(Scale)
def _scale(op: Scale, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    return (context.result(wide(operands[0]) * jnp.float32(op.factor)),), states


@REFERENCE.register(Cast)
@REFERENCE.register(AllReduce)
def _cast(op: Cast | AllReduce, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    return (context.result(operands[0]),), states


@REFERENCE.register(Argmax)
@REFERENCE.register(ShardedArgmax)
def _argmax(
    op: Argmax | ShardedArgmax, operands: Arrays, states: Arrays, context: OpContext
) -> Outcome:
    return (jnp.argmax(operands[0], axis=-1).astype(jnp.int32),), states


@REFERENCE.register(MaskTokens)
def _mask_tokens(op: MaskTokens, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    """Of all ranks' columns together."""
    x, masks = operands
    token = jnp.arange(x.shape[1])
    allowed = (masks[:, token // MASK_BITS] >> (token % MASK_BITS)) & 1
    return (jnp.where(allowed == 1, x, jnp.asarray(-jnp.inf, x.dtype)),), states
