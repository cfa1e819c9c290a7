"""Reference meaning of `mkc.ir.ops_experts`; see `mkc.ir.reference_ops`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.facets import REFERENCE
from mkc.ir.mxfp4 import CODES
from mkc.ir.mxfp4 import GROUP
from mkc.ir.ops_experts import NORM_EPS
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.ops_experts import Route
from mkc.ir.ops_experts import RouterScore
from mkc.ir.reference_ops import Arrays
from mkc.ir.reference_ops import OpContext
from mkc.ir.reference_ops import Outcome
from mkc.ir.reference_ops import wide
from mkc.ir.types import DType


def decode(codes: Array, scales: Array) -> Array:
    """Values f32 [..., K] of codes u8 [..., K / 2] and scales u8 [..., K / 32], exact."""
    pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
    groups = jnp.asarray(CODES)[pairs].reshape(*scales.shape, GROUP)
    # The bits of a power of two in f32 are its biased exponent.
    factors = lax.bitcast_convert_type(scales.astype(jnp.uint32) << 23, jnp.float32)
    return (groups * factors[..., None]).reshape(*codes.shape[:-1], -1)


@REFERENCE.register(Route)
def _route(op: Route, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    logits, *bias = map(wide, operands)
    is_sigmoid = op.score is RouterScore.SIGMOID
    scores = jax.nn.sigmoid(logits) if is_sigmoid else jax.nn.softmax(logits, axis=-1)
    _, ids = lax.top_k(scores + bias[0] if bias else scores, op.k)
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if op.renormalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + NORM_EPS)
    return (ids.astype(jnp.int32), weights * jnp.float32(op.scale)), states


@REFERENCE.register(ExpertMlp)
def _expert_mlp(op: ExpertMlp, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    """Every expert computes all rows, which is slow and simple; rows that did not choose it get a
    weight of zero. One at a time, so that no more than one matrix is decoded.
    """
    x, ids, weights, *stored = operands
    dtypes = [one.dtype for one in context.operand_types[3:]]

    def rounded(value: Array) -> Array:
        return wide(context.result(value))

    def product(value: Array, matrix: Array) -> Array:
        exact = lax.Precision.HIGHEST
        return rounded(jnp.einsum("rk,nk->rn", value, matrix, precision=exact))

    def one_expert(total: Array, expert: tuple[Array, list[Array]]) -> tuple[Array, None]:
        number, own = expert
        gate, up, down = (
            decode(one, own[place + 1]) if dtype is DType.E2M1X2 else wide(one)
            for place, (one, dtype) in enumerate(zip(own, dtypes, strict=True))
            if dtype is not DType.E8M0
        )
        value = gated(product(wide(x), gate), product(wide(x), up), op.gate_cap, op.up_cap)
        output = product(rounded(value), down)
        weight = jnp.sum(jnp.where(ids == number, weights, 0.0), axis=-1, keepdims=True)
        # Not a product with zero: an expert that nobody chose may overflow.
        return total + jnp.where(weight != 0, weight * output, 0.0), None

    experts = jnp.arange(stored[0].shape[0])
    total, _ = lax.scan(one_expert, jnp.zeros(x.shape, jnp.float32), (experts, stored))
    return (context.result(total),), states


def gated(gate: Array, up: Array, gate_cap: float | None, up_cap: float | None) -> Array:
    """cap(gate) sigmoid(gate) cap(up) in f32, see `ExpertMlp`."""

    def capped(value: Array, cap: float | None) -> Array:
        return value if cap is None else cap * jnp.tanh(value / cap)

    return capped(gate, gate_cap) * jax.nn.sigmoid(gate) * capped(up, up_cap)
