"""Reference meaning of `mkc.ir.ops_markov`; see `mkc.ir.reference_ops`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.facets import REFERENCE
from mkc.ir.ops_markov import CutDrafts
from mkc.ir.ops_markov import MarkovWalk
from mkc.ir.reference_ops import Arrays
from mkc.ir.reference_ops import OpContext
from mkc.ir.reference_ops import Outcome
from mkc.ir.reference_ops import wide

PADDING = -1  # position of a row without a token


@REFERENCE.register(MarkovWalk)
def _markov_walk(op: MarkovWalk, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    logits, predecessor, successor, tokens, hidden, head, bias = operands
    dtype = context.operand_types[0].dtype
    by_row = tuple(
        jnp.moveaxis(one.reshape(-1, op.rows, one.shape[1]), 1, 0)[:-1] for one in (logits, hidden)
    )
    anchor = tokens.reshape(-1, op.rows)[:, 0]

    def one_row(before: Array, row: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        scores, seen = map(wide, row)
        latent = wide(predecessor[before])
        exact = lax.Precision.HIGHEST
        product = jnp.einsum("br,vr->bv", latent, wide(successor), precision=exact)
        scores = context.round(scores + wide(context.round(product, dtype)), dtype)
        chosen = jnp.argmax(scores, axis=-1).astype(jnp.int32)
        both = jnp.concatenate([seen, latent], axis=-1)
        judged = jnp.einsum("bn,n->b", both, wide(head)[0], precision=exact) + wide(bias)
        return chosen, (chosen, jax.nn.sigmoid(judged))

    _, (chosen, confidence) = lax.scan(one_row, anchor, by_row)
    sure = jnp.ones((1, anchor.shape[0]), jnp.float32)
    walked = jnp.concatenate([anchor[None], chosen]).T.reshape(-1)
    return (walked, jnp.concatenate([sure, confidence]).T.reshape(-1)), states


@REFERENCE.register(CutDrafts)
def _cut_drafts(op: CutDrafts, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    positions, confidence = (one.reshape(-1, op.rows) for one in operands)
    doubtful = (confidence < op.threshold) & (jnp.arange(op.rows) > 0)
    cut = jnp.cumsum(doubtful, axis=1) > 0
    return (jnp.where(cut, PADDING, positions).reshape(-1),), states
