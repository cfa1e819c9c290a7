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
from mkc.codegen_pallas.support.sampled_accept import Exchange
from mkc.codegen_pallas.support.streams import AHEAD_OF_TAPE
from mkc.codegen_pallas.support.vector import round_bf16
from mkc.codegen_pallas.support.vector import sigmoid
from mkc.schedule.program import RESTING


def markov_walk(
    logits: View,
    hidden: View,
    *,
    judge: tuple[View, jax.Array, jax.Array] | None,
    predecessor: Ref,
    successor: Ref,
    previous: Ref,
    scores: Ref,
    sems: Ref,
    exchanges: tuple[Exchange, ...],
    tokens: Ref,
    out: Ref,
    batch: int,
    rows_per_sequence: int,
    ranks: int,
    rounds: bool,
) -> None:
    """Row t takes the best of `logits[t - 1]` and a correction; see `mkc.ir.ops_markov.MarkovWalk`.

    The correction is `successor @ predecessor[token of row t - 1]`, in f32; the lowest column wins
    ties. Row 0 of a sequence keeps its token.

    Args:
      logits: `[R, n]` f32 of this rank's columns; the T rows of a sequence are consecutive.
      hidden: `[R, m]` f32.
      judge: where confidences go, `[R, any]` f32, the same in every lane, 1 in row 0 of a sequence;
        what they are made of, `[1, m + r]` f32, and their bias, `[1, 1]`. None for no confidences.
      predecessor: `[V, r]` bf16 in HBM, V a multiple of 16.
      successor: `[n, r]` bf16 in VMEM, of this rank's columns.
      previous: `[batch, 16, r]` bf16 in VMEM.
      scores: `[S, n]` f32 in VMEM, S the batch rounded up to 8.
      sems: DMA semaphores `[1]`.
      exchanges: used in turn, of `2 * S` rows; empty on one rank.
      tokens: `[batch * T]` i32 in SMEM; a negative one stands for row 0 of the table.
      out: `[batch * T]` i32 in SMEM.
      rounds: round the correction, and the sum, to bf16.
    """
    rounded = round_bf16 if rounds else lambda value: value
    columns, size = logits.width, successor.shape[1]

    def block(sequence: jax.Array, token: Scalar) -> Any:
        first = pl.multiple_of(jnp.maximum(token, 0) & -BF16_ROWS, BF16_ROWS)
        rows = predecessor.at[pl.ds(first, BF16_ROWS), :]
        return pltpu.make_async_copy(rows, previous.at[sequence], sems.at[0])

    def latent_of(sequence: int, token: Scalar) -> jax.Array:
        rows = previous[sequence].astype(jnp.float32)
        row = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        mine = row == (jnp.maximum(token, 0) & (BF16_ROWS - 1))
        return jnp.sum(jnp.where(mine, rows, 0.0), axis=0, keepdims=True)

    def one_row(row: int) -> None:
        def before(sequence: Scalar) -> Scalar:
            return sequence * rows_per_sequence + row - 1

        each_sequence(batch, lambda one: block(one, out[before(one)]).start(priority=AHEAD_OF_TAPE))
        each_sequence(batch, lambda one: block(one, 0).wait())
        latents = []
        for sequence in range(batch):
            here = before(sequence)
            latents.append(latent_of(sequence, out[here]))
            if judge is not None:
                confidence, head, bias = judge
                store_confidence(confidence, here + 1, hidden.row(here), latents[-1], head, bias)
            scores[sequence : sequence + 1, :] = logits.row(here)
        rest = -batch % SUBLANES
        if rest:
            latents.append(jnp.zeros((rest, size), jnp.float32))
        left = jnp.concatenate(latents, axis=0).astype(jnp.bfloat16)
        correction = lax.dot_general(
            left, successor[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        scores[...] = rounded(scores[...] + rounded(correction))
        best, index = local_argmax(View(ref=scores, start=0, width=columns), columns)
        if exchanges:
            turn = exchanges[(row - 1) % len(exchanges)]
            index = sharded_argmax(
                best,
                index,
                send=turn.send,
                receive=turn.receive,
                send_sem=turn.send_sem,
                receive_sem=turn.receive_sem,
                ranks=ranks,
                columns_per_rank=columns,
            )
        for sequence in range(batch):
            out[before(sequence) + 1] = index[sequence, 0]

    scores[...] = jnp.zeros(scores.shape, jnp.float32)  # rows behind the batch
    for sequence in range(batch):
        first = sequence * rows_per_sequence
        out[first] = tokens[first]
        if judge is not None:
            judge[0].store_row(first, jnp.ones((1, judge[0].width), jnp.float32))
    for row in range(1, rows_per_sequence):
        one_row(row)


def store_confidence(
    confidence: View, row: Scalar, seen: jax.Array, latent: jax.Array, head: Any, bias: Any
) -> None:
    """sigmoid(head . [seen; latent] + bias) in every lane of a row."""
    width = seen.shape[1]
    judged = jnp.sum(seen * head[:, :width], axis=1, keepdims=True)
    judged = judged + jnp.sum(latent * head[:, width:], axis=1, keepdims=True) + bias
    confidence.store_row(row, jnp.broadcast_to(sigmoid(judged), (1, confidence.width)))


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
