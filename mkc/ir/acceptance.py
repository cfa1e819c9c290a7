"""Draft walk, filtered distributions and speculative rejection sampling in `jax.numpy`.

Rejection sampling: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative
decoding", ICML 2023, appendix A. The order of the filters is that of `mkc.runtime.sampling`:
temperature, top-k, min-p, top-p.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.counter_random import ACCEPT
from mkc.ir.counter_random import CHOICE
from mkc.ir.counter_random import DRAFT
from mkc.ir.counter_random import race
from mkc.ir.counter_random import uniform

NO_TOKEN = -1


def walk(
    values: Array,
    ids: Array,
    hidden: Array,
    predecessor: Array,
    successor: Array,
    tokens: Array,
    positions: Array,
    temperature: Array | None = None,
    seed: Array | None = None,
    *,
    rows: int,
) -> tuple[Array, Array]:
    """See `mkc.ir.ops_spec.SelectorWalk`."""
    batch, count = values.shape[0] // rows, values.shape[1]
    if temperature is None or seed is None:
        temperature, seed = jnp.zeros(batch, jnp.float32), jnp.zeros((batch, 2), jnp.int32)
    values, ids = (one.reshape(batch, rows, count) for one in (values, ids))
    hidden = hidden.astype(jnp.float32).reshape(batch, rows, -1)
    positions = positions.reshape(batch, rows)
    greedy = temperature == 0
    heat = jnp.where(greedy, 1.0, temperature)[:, None]
    anchor = tokens.reshape(batch, rows)[:, 0]

    def one_row(previous: Array, row: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        value, candidate, projected, position = row
        query = predecessor[previous].astype(jnp.float32) * projected
        likeness = successor[candidate].astype(jnp.float32)
        score = value + jnp.einsum("br,bkr->bk", query, likeness, precision=lax.Precision.HIGHEST)
        q = jax.nn.softmax(score / heat, axis=-1)
        drawn = race(q, seed, position, DRAFT, candidate)
        place = jnp.where(greedy, jnp.argmax(score, axis=-1), drawn)
        q = jnp.where(greedy[:, None], place[:, None] == jnp.arange(count), q)
        chosen = jnp.take_along_axis(candidate, place[:, None], axis=1)[:, 0]
        return chosen, (chosen, q)

    by_row = tuple(jnp.moveaxis(one, 1, 0)[1:] for one in (values, ids, hidden, positions))
    _, (chosen, proposal) = lax.scan(one_row, anchor, by_row)
    nothing = jnp.zeros((1, batch, count), jnp.float32)
    proposal = jnp.moveaxis(jnp.concatenate([nothing, proposal]), 0, 1)
    chosen = jnp.moveaxis(jnp.concatenate([anchor[None], chosen]), 0, 1)
    return chosen.reshape(-1), proposal.reshape(-1, count)


def distribution(
    logits: Array, temperature: Array, top_k: Array, top_p: Array, min_p: Array
) -> Array:
    """What a token is drawn from, f32 [rows, vocab], each row with sum 1.

    Args:
      logits: f32 [rows, vocab].
      temperature: f32 [rows], above 0.
      top_k: i32 [rows], 0 for all.
      top_p, min_p: f32 [rows].
    """
    rows, vocab = logits.shape
    order = jnp.argsort(-logits, axis=-1, stable=True)  # lowest ids first on ties
    best = jnp.take_along_axis(logits, order, axis=-1)
    weight = jnp.exp((best - best[:, :1]) / temperature[:, None])
    place = jnp.arange(vocab)
    kept = (top_k[:, None] == 0) | (place < top_k[:, None])
    kept &= weight >= min_p[:, None]  # the largest weight is 1
    weight = jnp.where(kept, weight, 0.0)
    sums = jnp.cumsum(weight, axis=-1)
    before = sums - weight
    # The best token stays, also where rounding leaves nothing before the wanted mass.
    nucleus = (before < top_p[:, None] * sums[:, -1:]) | (place == 0) | (top_p[:, None] >= 1)
    weight = jnp.where(nucleus, weight, 0.0)
    weight = weight / jnp.sum(weight, axis=-1, keepdims=True)
    return jnp.zeros_like(weight).at[jnp.arange(rows)[:, None], order].set(weight)


def accept(
    logits: Array,
    tokens: Array,
    positions: Array,
    *sampling: Array,
    rows: int,
) -> tuple[Array, Array, Array]:
    """See `mkc.ir.ops_spec.Accept`.

    Args:
      sampling: temperature, top_k, top_p, min_p, seed and perhaps candidates, proposal; or nothing.
    """
    batch = logits.shape[0] // rows
    logits = logits.astype(jnp.float32)
    tokens, positions = tokens.reshape(batch, rows), positions.reshape(batch, rows)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32).reshape(batch, rows)
    real = positions[:, 1:] >= 0
    matched = real & (tokens[:, 1:] == best[:, :-1])
    accepted = _leading(matched)
    final = _at(best, accepted)
    if sampling:
        accepted, final = _sampled(accepted, final, logits, tokens, positions, real, sampling)
    active = positions[:, 0] >= 0
    place = jnp.arange(rows)
    drafts = jnp.concatenate([tokens[:, 1:], tokens[:, :1]], axis=1)
    emitted = jnp.where(place < accepted[:, None], drafts, NO_TOKEN)
    emitted = jnp.where(place == accepted[:, None], final[:, None], emitted)
    emitted = jnp.where(active[:, None], emitted, NO_TOKEN)
    count = jnp.where(active, accepted + 1, 0)
    return emitted.reshape(-1), count, jnp.where(active, final, NO_TOKEN)


def _sampled(
    accepted: Array,
    final: Array,
    logits: Array,
    tokens: Array,
    positions: Array,
    real: Array,
    sampling: Sequence[Array],
) -> tuple[Array, Array]:
    """Accepted drafts and the token behind them, i32 [batch], given those of greedy acceptance.

    Args:
      logits: f32 [batch * T, vocab].
      tokens, positions: i32 [batch, T].
      real: bool [batch, T - 1].
    """
    batch, rows = tokens.shape
    vocab = logits.shape[1]
    temperature, top_k, top_p, min_p, seed, *proposed = sampling

    def drawn() -> tuple[Array, Array]:
        heat = jnp.where(temperature == 0, 1.0, temperature)
        filters = (jnp.repeat(one, rows) for one in (heat, top_k, top_p, min_p))
        p = distribution(logits, *filters).reshape(batch, rows, vocab)
        if proposed:
            candidates, proposal = proposed
            q = _dense(candidates, proposal, vocab).reshape(batch, rows, vocab)
        else:
            q = jax.nn.one_hot(tokens, vocab, dtype=jnp.float32)
        # q of row t belongs to the draft of row t, whose p is of row t - 1.
        q = jnp.where(real[..., None], q[:, 1:], 0.0)
        return _rejection(p, q, tokens, positions, real, seed)

    def greedy() -> tuple[Array, Array]:
        return accepted, final

    hot = temperature > 0
    drawn_accepted, drawn_final = lax.cond(jnp.any(hot), drawn, greedy)
    return jnp.where(hot, drawn_accepted, accepted), jnp.where(hot, drawn_final, final)


def _rejection(
    p: Array, q: Array, tokens: Array, positions: Array, real: Array, seed: Array
) -> tuple[Array, Array]:
    """Accepted drafts and the token behind them, both i32 [batch].

    Args:
      p: f32 [batch, T, vocab].
      q: f32 [batch, T - 1, vocab], zero for rows without a draft.
      tokens, positions: i32 [batch, T].
      real: bool [batch, T - 1].
    """
    drafts = tokens[:, 1:, None]
    p_draft = jnp.take_along_axis(p[:, :-1], drafts, axis=2)[..., 0]
    q_draft = jnp.take_along_axis(q, drafts, axis=2)[..., 0]
    place = positions[:, :1] + 1 + jnp.arange(tokens.shape[1] - 1)
    u = uniform(seed[:, None], place, ACCEPT, jnp.zeros_like(place))
    accepted = _leading(real & (u * q_draft < p_draft))
    nothing = jnp.zeros_like(p[:, :1])
    target = _at(p, accepted)
    rest = jnp.maximum(target - _at(jnp.concatenate([q, nothing], axis=1), accepted), 0.0)
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, target)
    ids = jnp.arange(p.shape[2])
    return accepted, race(rest, seed, positions[:, 0] + 1 + accepted, CHOICE, ids)


def _leading(flags: Array) -> Array:
    """How many flags of each row hold before the first that does not: i32 [batch]."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _at(x: Array, place: Array) -> Array:
    """x[b, place[b]] of x [batch, T, ...]."""
    return x[jnp.arange(x.shape[0]), place]


def _dense(candidates: Array, proposal: Array, vocab: int) -> Array:
    """Probabilities of candidates [rows, K] spread over the vocabulary, [rows, vocab]."""
    rows = candidates.shape[0]
    empty = jnp.zeros((rows, vocab), jnp.float32)
    return empty.at[jnp.arange(rows)[:, None], candidates].add(proposal)
