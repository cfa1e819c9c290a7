"""Attention over latent vectors for many rows, from the caches that the kernel reads."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax import lax

from mkc.ir.reference_ops import wide
from mkc.runtime.prefill_ops import ATTENTION_TILE
from mkc.runtime.prefill_ops import Softmax
from mkc.runtime.prefill_ops import contract
from mkc.runtime.prefill_ops import no_tiles
from mkc.runtime.prefill_ops import with_tile


def attend_latents(
    q: Array,
    shared_q: Array,
    up: Array,
    latents: Array,
    shared_keys: Array,
    layer: Array,
    slots: Array,
    positions: Array,
    scale: float,
) -> Array:
    """Causal attention, tile by tile up to the last position; see
    `mkc.ir.ops_mixing.LatentAttention`.

    Queries are folded with the key half of `up` once, so that scores are products with the latents
    themselves. From about 170 rows on it would take fewer products to project the latents to keys
    and values of the heads, but these are as large as the heads are many. Scores, weights and sums
    are f32, as in the kernel.

    Args:
      q: [L, T, heads, d].
      shared_q: [L, T, heads, s].
      up: [heads * (d + dv), rank].
      latents: [layers, batch, context, rank], rows of this step included.
      shared_keys: [layers, batch, context, s or more].
      layer: instance of the caches.
      slots: sequence of each lane, i32 [L].
      positions: i32 [L, T], negative for padding.

    Returns:
      f32 [L, T, heads, dv].
    """
    lanes, rows, heads, dim = q.shape
    context, rank = latents.shape[2:]
    tile = min(ATTENTION_TILE, context)
    by_head = up.reshape(heads, -1, rank)
    folded = contract("lthd,hdc->lhtc", wide(q), by_head[:, :dim])
    shared = jnp.swapaxes(shared_q, 1, 2)
    last = jnp.maximum(jnp.max(positions, axis=1), 0)[:, None]  # rows behind it may hold anything
    seen_until = jnp.maximum(positions, 0)[:, None, :, None]

    def fetch(cache: Array, first: Array, width: int) -> Array:
        shape = (1, 1, tile, width)
        parts = [
            lax.dynamic_slice(cache, (layer, slots[lane], first, 0), shape) for lane in range(lanes)
        ]
        return jnp.concatenate(parts, axis=1)[0]

    def one_tile(number: Array, carry: Softmax) -> Softmax:
        # The last tile of a context that is no multiple of tiles overlaps the one before.
        first = jnp.minimum(number * tile, context - tile)
        column = first + jnp.arange(tile)
        latent = fetch(latents, first, rank)
        scores = contract("lhtc,lpc->lhtp", folded, latent)
        scores += contract("lhts,lps->lhtp", shared, fetch(shared_keys, first, shared.shape[-1]))
        visible = (column <= seen_until) & (column >= number * tile)
        value = jnp.where((column <= last)[..., None], latent, 0)
        return with_tile(
            carry,
            scores * scale,
            visible,
            lambda weights: contract("lhtp,lpc->lhtc", weights, value),
        )

    tiles = jnp.max(last) // tile + 1
    _, total, mixed = lax.fori_loop(0, tiles, one_tile, no_tiles((lanes, heads, rows, rank)))
    return contract("lhtc,hdc->lthd", mixed / total, by_head[:, dim:])
