"""Drafts whose logits are corrected by the token before, and where a block of drafts ends.

A correction needs the chosen token, which all ranks must agree on: an exchange of one block per
draft. The table of corrections is divided over the ranks like the logits, and stays in VMEM.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.support.accept import each_sequence
from mkc.codegen_pallas.support.argmax import local_argmax
from mkc.codegen_pallas.support.exchange import sharded_argmax
from mkc.codegen_pallas.support.refs import BF16_ROWS
from mkc.codegen_pallas.support.refs import SUBLANES
from mkc.codegen_pallas.support.refs import Ref
from mkc.codegen_pallas.support.refs import Scalar
from mkc.codegen_pallas.support.refs import View
from mkc.codegen_pallas.support.streams import AHEAD_OF_TAPE
from mkc.codegen_pallas.support.vector import round_bf16
from mkc.codegen_pallas.support.vector import sigmoid
from mkc.schedule.program import RESTING

SEND, BLOCKS, RECEIVE = 0, 1, 2  # semaphores; exchanges have two to receive, in turn


def markov_walk(
    logits: View,
    hidden: View,
    head: jax.Array,
    *,
    predecessor: Ref,
    successor: Ref,
    blocks: Ref,
    scores: Ref,
    send: Ref,
    receive: Ref,
    sems: Ref,
    tokens: Ref,
    out: Ref,
    confidence: View,
    batch: int,
    rows_per_sequence: int,
    valid: Scalar,
    ranks: int,
    rounds: bool,
) -> None:
    """Row t takes the best of `logits[t - 1]` and a correction; see `mkc.ir.ops_markov.MarkovWalk`.

    The correction is `predecessor[token of row t - 1] @ successor`, in f32; the lowest column wins
    ties. Row 0 of a sequence keeps its token.

    Args:
      logits: `[R, n]` f32 of this rank's columns; the T rows of a sequence are consecutive.
      hidden: `[R, m]` f32.
      head: `[1, m + r + 1]` f32: what a draft's confidence is made of, and behind it its bias.
      predecessor: `[V, r]` bf16 in HBM, V a multiple of 16.
      successor: `[r, n]` bf16 in VMEM, of this rank's columns.
      blocks: `[batch, 16, r]` bf16 in VMEM.
      scores: `[S, n]` f32 in VMEM, S the batch rounded up to 8.
      send: `[2 * S, 128]` i32 in VMEM.
      receive: `[2, ranks, 2 * S, 128]` i32 in VMEM.
      sems: DMA semaphores `[4]`.
      tokens: `[batch * T]` i32 in SMEM; a negative one stands for row 0 of the table.
      out: `[batch * T]` i32 in SMEM.
      confidence: `[R, 128]` f32, the same in every lane; 1 in row 0 of a sequence.
      valid: columns of this rank that count, at least 1.
      rounds: round the correction, and the sum, to bf16.
    """
    rounded = round_bf16 if rounds else lambda value: value
    rank_columns, width = logits.width, hidden.width
    size = successor.shape[0]
    of_hidden, of_latent = head[:, :width], head[:, width : width + size]
    bias = head[:, width + size : width + size + 1]

    def block(sequence: jax.Array, token: Scalar) -> Any:
        first = pl.multiple_of(jnp.maximum(token, 0) & -BF16_ROWS, BF16_ROWS)
        rows = predecessor.at[pl.ds(first, BF16_ROWS), :]
        return pltpu.make_async_copy(rows, blocks.at[sequence], sems.at[BLOCKS])

    def latent_of(sequence: int, token: Scalar) -> jax.Array:
        rows = blocks[sequence].astype(jnp.float32)
        row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        mine = row == (jnp.maximum(token, 0) & (BF16_ROWS - 1))
        return jnp.sum(jnp.where(mine, rows, 0.0), axis=0, keepdims=True)

    def one_row(row: jax.Array, carry: jax.Array) -> jax.Array:
        def before(sequence: Scalar) -> Scalar:
            return sequence * rows_per_sequence + row - 1

        each_sequence(batch, lambda one: block(one, out[before(one)]).start(priority=AHEAD_OF_TAPE))
        each_sequence(batch, lambda one: block(one, 0).wait())
        latents = []
        for sequence in range(batch):
            here = before(sequence)
            latents.append(latent_of(sequence, out[here]))
            seen = jnp.sum(hidden.row(here) * of_hidden, axis=1, keepdims=True)
            seen = seen + jnp.sum(latents[-1] * of_latent, axis=1, keepdims=True)
            judged = jnp.broadcast_to(sigmoid(seen + bias), (1, confidence.width))
            confidence.store_row(here + 1, judged)
            scores[sequence : sequence + 1, :] = logits.row(here)
        rest = -batch % SUBLANES
        if rest:
            latents.append(jnp.zeros((rest, size), jnp.float32))
        left = jnp.concatenate(latents, axis=0).astype(jnp.bfloat16)
        correction = jnp.dot(left, successor[...], preferred_element_type=jnp.float32)
        scores[...] = rounded(scores[...] + rounded(correction))
        best, index = local_argmax(View(ref=scores, start=0, width=rank_columns), valid)
        parity = row & 1
        index = sharded_argmax(
            best,
            index,
            send=send,
            receive=receive.at[parity],
            send_sem=sems.at[SEND],
            receive_sem=sems.at[RECEIVE + parity],
            ranks=ranks,
            columns_per_rank=rank_columns,
        )
        for sequence in range(batch):
            out[before(sequence) + 1] = index[sequence, 0]
        return carry

    scores[...] = jnp.zeros(scores.shape, jnp.float32)  # rows behind the batch
    for sequence in range(batch):
        first = sequence * rows_per_sequence
        out[first] = tokens[first]
        confidence.store_row(first, jnp.ones((1, confidence.width), jnp.float32))
    lax.fori_loop(1, rows_per_sequence, one_row, jnp.int32(0))


def cut_drafts(
    positions: Ref,
    confidence: View,
    out: Ref,
    *,
    threshold: float,
    batch: int,
    rows_per_sequence: int,
) -> None:
    """Rows become padding from the first one on, behind row 0, whose confidence is too small.

    Args:
      positions: `[batch * T]` i32 in SMEM, as is `out`.
      confidence: `[R, n]` f32, that of a row in lane 0.
    """
    values = confidence.load()
    for sequence in range(batch):
        going = jnp.bool_(True)
        for row in range(rows_per_sequence):
            here = sequence * rows_per_sequence + row
            if row:
                going = going & ~(values[here, 0] < threshold)
            out[here] = jnp.where(going, positions[here], RESTING)
