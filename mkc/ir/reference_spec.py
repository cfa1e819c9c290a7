"""Reference meaning of the operations of speculative rounds; see `mkc.ir.reference_ops`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.acceptance import accept
from mkc.ir.acceptance import walk
from mkc.ir.facets import REFERENCE
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
from mkc.ir.ops_spec import SelectorWalk
from mkc.ir.ops_spec import Tap
from mkc.ir.ops_spec import TopK
from mkc.ir.reference_ops import ACTIVATIONS
from mkc.ir.reference_ops import Arrays
from mkc.ir.reference_ops import OpContext
from mkc.ir.reference_ops import Outcome
from mkc.ir.reference_ops import by_sequence
from mkc.ir.reference_ops import wide

PADDING = -1  # position of a row that changes nothing
HIGHEST = lax.Precision.HIGHEST


@REFERENCE.register(Tap)
def _tap(op: Tap, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    return (), (operands[0],)


@REFERENCE.register(ReadTaps)
def _read_taps(op: ReadTaps, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    # Here a state is [instances, rows, width].
    parts = [states[n][i] for n, i in zip(op.numbers, op.instances, strict=True)]
    return (jnp.concatenate(parts, axis=-1),), states


def _keep(valid: Array, new: Array, old: Array) -> Array:
    """`new` [batch, ...] for the sequences that have a row, else `old`, bit for bit."""
    active = valid[:, 0].reshape(-1, *[1] * (new.ndim - 1))
    return jnp.where(active, new.astype(old.dtype), old)


@REFERENCE.register(KeptConv)
def _kept_conv(op: KeptConv, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    u, weight, kept = operands
    history, rows = states  # [batch, taps - 1, channels], [batch, T, channels]
    batch, length = rows.shape[:2]
    valid = context.rows_that_count(batch, u.shape[0])
    committed = committed_history(history, rows, kept)
    new = by_sequence(u, batch).astype(rows.dtype)
    inputs = jnp.concatenate([committed, new], axis=1)
    taps = wide(weight)[:, 0, :].T
    windows = jnp.stack([inputs[:, tap : tap + length] for tap in range(op.taps)], axis=2)
    total = jnp.sum(wide(windows) * taps, axis=2).reshape(u.shape)
    result = context.result(ACTIVATIONS[op.activation](total))
    return (result,), (_keep(valid, committed, history), _keep(valid, new, rows))


def committed_history(history: Array, rows: Array, kept: Array) -> Array:
    """The newest inputs of a convolution, the first `kept` of the kept rows included.

    Args:
      history: [batch, taps - 1, channels], oldest first.
      rows: [batch, T, channels].
      kept: i32 [batch].
    """
    before = jnp.concatenate([history, rows], axis=1)
    newest = kept[:, None] + jnp.arange(history.shape[1])
    return jnp.take_along_axis(before, newest[:, :, None], axis=1)


def committed_state(
    memory: Array, keys: Array, updates: Array, decays: Array, kept: Array
) -> Array:
    """The delta rule's state after the first `kept` of the kept rows.

    Args:
      memory: f32 [batch, value heads, dk, dv].
      keys: f32 [batch, T, key heads, dk].
      updates: f32 [batch, T, value heads, dv].
      decays: f32 [batch, T, value heads] or [batch, T, value heads, dk].
      kept: i32 [batch].
    """
    group = updates.shape[2] // keys.shape[2]
    counts = (jnp.arange(keys.shape[1]) < kept[:, None])[..., None, None]
    total = jnp.cumsum(jnp.where(counts, _by_channel(decays), 0.0), axis=1)
    left = jnp.where(counts, jnp.exp(total[:, -1:] - total), 0.0)  # decay from a row to the end
    scaled = jnp.repeat(keys, group, axis=2) * left
    added = jnp.einsum("bthk,bthv->bhkv", scaled, updates, precision=HIGHEST)
    committed = memory * jnp.exp(total[:, -1])[..., None] + added
    # Nothing kept changes no bit: a sum with zero may change the sign of a zero.
    return jnp.where((kept > 0)[:, None, None, None], committed, memory)


def _by_channel(decays: Array) -> Array:
    """[batch, T, value heads, 1] where a decay is one number of a head, else [..., dk]."""
    return decays.reshape(*decays.shape[:3], -1)


@REFERENCE.register(KeptDeltaRule)
def _kept_delta_rule(
    op: KeptDeltaRule, operands: Arrays, states: Arrays, context: OpContext
) -> Outcome:
    memory, old_keys, old_updates, old_decays = states
    kept = operands[5]
    batch = memory.shape[0]
    valid = context.rows_that_count(batch, operands[0].shape[0])
    q, k, v, beta, decay = (by_sequence(wide(one), batch) for one in operands[:5])
    group = v.shape[2] // k.shape[2]
    # Padding rows are no rows: no decay, no key, no update.
    beta = jnp.where(valid[..., None], beta, 0.0)
    decay = jnp.where(valid.reshape(*valid.shape, *[1] * (decay.ndim - 2)), decay, 0.0)
    k = jnp.where(valid[..., None, None], k, 0.0)
    committed = committed_state(memory, old_keys, old_updates, old_decays, kept)
    total = jnp.cumsum(_by_channel(decay), axis=1)
    queries, keys = jnp.repeat(q, group, axis=2), jnp.repeat(k, group, axis=2)
    row = jnp.arange(v.shape[1])
    difference = total[:, :, None] - total[:, None]  # [batch, i, j, value heads, 1 or dk]
    seen = (row[:, None] >= row)[None, :, :, None, None]
    # Masked before the exponential, which overflows for rows still to come.
    left = jnp.where(seen, jnp.exp(jnp.where(seen, difference, 0.0)), 0.0)

    def from_state(x: Array) -> Array:
        """S^T (e^(D_i) x_i) for every row."""
        return jnp.einsum("bthk,bhkv->bthv", x * jnp.exp(total), committed, precision=HIGHEST)

    def likeness(x: Array) -> Array:
        """The sum of e^(D_i - D_j) x_i k_j over channels, [batch, i, j, value heads]."""
        return jnp.sum(x[:, :, None] * keys[:, None] * left, axis=-1)

    def one_update(updates: Array, i: Array) -> tuple[Array, None]:
        # The updates of this and later rows are still zero.
        earlier = jnp.einsum("bjh,bjhv->bhv", between[:, i], updates, precision=HIGHEST)
        update = beta[:, i, :, None] * (wanted[:, i] - earlier)
        return updates.at[:, i].set(update), None

    wanted, between = v - from_state(keys), likeness(keys)
    updates, _ = lax.scan(one_update, jnp.zeros_like(v), row)
    outputs = from_state(queries) + jnp.einsum(
        "bijh,bjhv->bihv", likeness(queries), updates, precision=HIGHEST
    )
    result = context.result(outputs.reshape(operands[2].shape))
    new = (committed, k, updates, decay)
    return (result,), tuple(_keep(valid, a, b) for a, b in zip(new, states, strict=True))


@REFERENCE.register(KeptPositions)
def _kept_positions(
    op: KeptPositions, operands: Arrays, states: Arrays, context: OpContext
) -> Outcome:
    positions, count = operands
    rows = by_sequence(positions, count.shape[0])
    kept = jnp.arange(rows.shape[1]) < count[:, None]
    return (jnp.where(kept, rows, PADDING).reshape(-1),), states


@REFERENCE.register(NextPositions)
def _next_positions(
    op: NextPositions, operands: Arrays, states: Arrays, context: OpContext
) -> Outcome:
    positions, count = operands
    rows = by_sequence(positions, count.shape[0])
    moved = rows[:, :1] + count[:, None] + jnp.arange(rows.shape[1])
    there = (rows[:, :1] >= 0) & (moved < op.context)
    return (jnp.where(there, moved, PADDING).reshape(-1),), states


@REFERENCE.register(BlockTokens)
def _block_tokens(op: BlockTokens, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    anchor, positions = operands
    rows = by_sequence(positions, anchor.shape[0])
    first = jnp.arange(rows.shape[1]) == 0
    return (jnp.where(first, anchor[:, None], op.mask).astype(jnp.int32).reshape(-1),), states


@REFERENCE.register(DynamicConv)
def _dynamic_conv(op: DynamicConv, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    x, kernels, base = operands
    sides, taps, channels = base.shape
    batch = x.shape[0] // op.rows
    inputs = by_sequence(wide(x), batch)
    dynamic = wide(kernels).reshape(batch, op.rows, sides, taps, -1)[:, :, op.side]
    total = jnp.zeros_like(inputs)
    for tap in range(taps):
        factor = wide(base)[op.side, tap] + jnp.repeat(dynamic[:, :, tap], op.group, axis=-1)
        shifted = jnp.pad(inputs, ((0, 0), (tap, 0), (0, 0)))[:, : op.rows]
        total = total + factor * shifted
    return (context.result(total.reshape(x.shape)),), states


def append(cache: Array, new: Array, positions: Array) -> Array:
    """Writes new [rows, heads, dim] into a cache [batch, context, heads, dim]; padding nowhere."""
    batch, length = cache.shape[:2]
    rows = by_sequence(positions, batch)
    slots = jnp.where(rows >= 0, rows, length)
    sequence = jnp.arange(batch)[:, None]
    return cache.at[sequence, slots].set(by_sequence(new, batch).astype(cache.dtype), mode="drop")


@REFERENCE.register(CacheAppend)
def _cache_append(op: CacheAppend, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    *new, positions = operands
    changed = tuple(append(old, one, positions) for old, one in zip(states, new, strict=True))
    return (), changed


@REFERENCE.register(BlockAttention)
def _block_attention(
    op: BlockAttention, operands: Arrays, states: Arrays, context: OpContext
) -> Outcome:
    q, k, v, positions, context_k, context_v, context_positions = operands
    keys, values = (
        append(old, new, context_positions)
        for old, new in zip(states, (context_k, context_v), strict=True)
    )
    batch, length = keys.shape[:2]
    rows = by_sequence(positions, batch)
    size = rows.shape[1]
    # Keys: the cache, then the block.
    where = jnp.concatenate([jnp.broadcast_to(jnp.arange(length), (batch, length)), rows], axis=1)
    in_block = jnp.arange(length + size) >= length
    seen = jnp.where(in_block, where >= 0, where < rows[:, :1])[:, None, :]
    distance = rows[:, :, None] - where[:, None, :]
    if op.causal:
        seen = seen & (distance >= 0)
    if op.window is not None:
        first = rows[:, :1, None] - where[:, None, :]
        near = in_block | (first <= op.window) if op.anchored else jnp.abs(distance) < op.window
        seen = seen & near
    seen = jnp.broadcast_to(seen, distance.shape)
    # A padding row sees itself: a softmax of nothing is NaN.
    own = jnp.arange(length + size) == length + jnp.arange(size)[:, None]
    seen = jnp.where(rows[:, :, None] >= 0, seen, own)
    all_keys = jnp.concatenate([wide(keys), wide(by_sequence(k, batch))], axis=1)
    all_values = jnp.concatenate([wide(values), wide(by_sequence(v, batch))], axis=1)
    grouped = wide(q).reshape(batch, size, k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
    scores = jnp.einsum("btgqd,bcgd->btgqc", grouped, all_keys, precision=HIGHEST) * op.scale
    weights = jax.nn.softmax(jnp.where(seen[:, :, None, None, :], scores, -jnp.inf), axis=-1)
    # Slots that nobody sees may hold anything; a weight of zero does not remove a NaN.
    visible = jnp.where(jnp.any(seen, axis=1)[:, :, None, None], all_values, 0.0)
    output = jnp.einsum("btgqc,bcgd->btgqd", weights, visible, precision=HIGHEST)
    return (context.result(output.reshape(q.shape)),), (keys, values)


@REFERENCE.register(TopK)
def _top_k(op: TopK, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    values, ids = lax.top_k(wide(operands[0]), op.k)
    return (values, ids.astype(jnp.int32)), states


@REFERENCE.register(SelectorWalk)
def _selector_walk(
    op: SelectorWalk, operands: Arrays, states: Arrays, context: OpContext
) -> Outcome:
    return walk(*operands, rows=op.rows), states


@REFERENCE.register(Accept)
def _accept(op: Accept, operands: Arrays, states: Arrays, context: OpContext) -> Outcome:
    return accept(*operands, rows=op.rows), states
