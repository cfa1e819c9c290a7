"""Experts in a form that is cheap to differentiate: every expert computes all rows at once."""

from __future__ import annotations

import jax.numpy as jnp

from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.reference_experts import decode
from mkc.ir.reference_experts import gated
from mkc.ir.reference_ops import Arrays
from mkc.ir.reference_ops import OpContext
from mkc.ir.reference_ops import Outcome
from mkc.ir.reference_ops import wide
from mkc.ir.types import DType


def expert_mlp(op: ExpertMlp, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    """The op's meaning, as in `mkc.ir.reference_experts`; matrices in MXFP4 have no gradient."""
    x, ids, weights, *stored = operands
    if context.operand_types[3].dtype is DType.E2M1X2:
        gate, up, down = (decode(*stored[place : place + 2]) for place in (0, 2, 4))
    else:
        gate, up, down = map(wide, stored)
    chosen = ids[..., None] == jnp.arange(gate.shape[0])
    share = jnp.sum(jnp.where(chosen, weights[..., None], 0.0), axis=1)
    value = gated(
        jnp.einsum("rk,enk->ern", wide(x), gate),
        jnp.einsum("rk,enk->ern", wide(x), up),
        op.gate_cap,
        op.up_cap,
    )
    total = jnp.einsum("ern,ekn->rk", value * share.T[..., None], down)
    return (context.result(total),), states
