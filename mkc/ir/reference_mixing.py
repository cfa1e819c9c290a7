"""Reference meaning of `mkc.ir.ops_mixing`; see `mkc.ir.reference_ops`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.facets import REFERENCE
from mkc.ir.ops_mixing import CacheForm
from mkc.ir.ops_mixing import LatentAttention
from mkc.ir.ops_mixing import MixBlocks
from mkc.ir.ops_mixing import ResidualBlocks
from mkc.ir.ops_mixing import ScaleHeads
from mkc.ir.ops_mixing import StoreBlock
from mkc.ir.reference_ops import Arrays
from mkc.ir.reference_ops import OpContext
from mkc.ir.reference_ops import Outcome
from mkc.ir.reference_ops import by_sequence
from mkc.ir.reference_ops import wide


def _einsum(form: str, *operands: Array) -> Array:
    return jnp.einsum(form, *map(wide, operands), precision=lax.Precision.HIGHEST)


@REFERENCE.register(LatentAttention)
def _latent_attention(
    op: LatentAttention, operands: Arrays, states: Arrays, context: OpContext
) -> Outcome:
    q, shared_q, latent, shared_k, up, positions = operands
    batch, length = states[0].shape[:2]
    heads, dim = q.shape[1:]
    up = up.reshape(heads, -1, up.shape[1])
    up_key, up_value = up[:, :dim], up[:, dim:]
    if op.cache is CacheForm.LATENT:
        new = (latent[:, None], shared_k[:, None])
    else:
        keys = context.round(_einsum("rc,hdc->rhd", latent, up_key), context.operand_types[2].dtype)
        shared = jnp.broadcast_to(shared_k[:, None], (*q.shape[:2], shared_k.shape[1]))
        new = (jnp.concatenate([keys, shared], axis=-1), _einsum("rc,hdc->rhd", latent, up_value))
    positions = by_sequence(positions, batch)
    # Padding is written behind the end, that is nowhere.
    slots = jnp.where(context.rows_that_count(batch, q.shape[0]), positions, length)
    place = (jnp.arange(batch)[:, None], slots)
    first, second = (
        old.at[place].set(by_sequence(one, batch).astype(old.dtype), mode="drop")
        for old, one in zip(states, new, strict=True)
    )
    # A padding row sees the first slot: a softmax of nothing is NaN.
    seen = jnp.arange(length) <= jnp.maximum(positions, 0)[:, :, None]
    # Slots past the last position may hold anything; a weight of zero does not remove a NaN.
    written = jnp.any(seen, axis=1)[:, :, None, None]
    keys, values = (jnp.where(written, wide(one), 0.0) for one in (first, second))
    own, shared_own = by_sequence(q, batch), by_sequence(shared_q, batch)
    if op.cache is CacheForm.LATENT:
        folded = _einsum("bthd,hdc->bthc", own, up_key)
        scores = _einsum("bthc,bsc->bths", folded, keys[:, :, 0])
        scores += _einsum("bthd,bsd->bths", shared_own, values[:, :, 0])
    else:
        scores = _einsum("bthd,bshd->bths", jnp.concatenate([own, shared_own], axis=-1), keys)
    scores = jnp.where(seen[:, :, None], scores * op.scale, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1)
    if op.cache is CacheForm.LATENT:
        mixed = _einsum("bths,bsc->bthc", weights, keys[:, :, 0])
        output = _einsum("bthc,hdc->bthd", mixed, up_value)
    else:
        output = _einsum("bths,bshd->bthd", weights, values)
    return (context.result(output.reshape(context.result_types[0].shape)),), (first, second)


@REFERENCE.register(ScaleHeads)
def _scale_heads(op: ScaleHeads, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    x, factor = operands
    return (context.result(wide(x) * wide(factor)[:, None]),), states


@REFERENCE.register(ResidualBlocks)
def _residual_blocks(
    op: ResidualBlocks, operands: Arrays, states: Arrays, context: OpContext
) -> Outcome:
    (x,) = operands
    rows, width = x.shape
    blocks = jnp.zeros((rows, op.slots, width), jnp.float32)
    return (context.result(blocks), jnp.zeros(rows, jnp.int32)), states


@REFERENCE.register(StoreBlock)
def _store_block(op: StoreBlock, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    blocks, count, x = operands
    stores = count % op.period == 0
    slot = jnp.where(stores, count // op.period, blocks.shape[1])  # behind the end: nowhere
    stored = blocks.at[jnp.arange(x.shape[0]), slot].set(x, mode="drop")
    return (stored, count + 1, jnp.where(stores[:, None], jnp.zeros_like(x), x)), states


@REFERENCE.register(MixBlocks)
def _mix_blocks(op: MixBlocks, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    blocks, count, x, norm, projection = operands
    vectors = wide(jnp.concatenate([blocks, x[:, None]], axis=1))
    scale = lax.rsqrt(jnp.mean(vectors * vectors, axis=-1, keepdims=True) + op.eps)
    scores = jnp.sum(vectors * scale * wide(norm) * wide(projection)[0], axis=-1)
    slot = jnp.arange(vectors.shape[1])
    there = (slot * op.period < count[:, None]) | (slot == blocks.shape[1])
    weights = jax.nn.softmax(jnp.where(there, scores, -jnp.inf), axis=-1)
    return (context.result(jnp.sum(weights[..., None] * vectors, axis=1)),), states
