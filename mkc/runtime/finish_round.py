"""Rounds that sample and that the kernel left to the host.

The kernel looks at the largest logits only. Where a filter may keep more of them than these, it
does not guess: the sequence emits nothing, the launch ends, and its results are what that round
began with and its logits. The tokens are then chosen here, exactly as the reference chooses them,
and the next launch is told to emit these (`forced`).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from mkc.ir.acceptance import NO_TOKEN
from mkc.ir.acceptance import accept
from mkc.runtime.shards import Array

ACCEPT = jax.jit(accept, static_argnames="rows")


@dataclass(frozen=True, kw_only=True)
class SequenceSampling:
    """Options of one sequence.

    Attributes:
      seed: low and high word, i32.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: tuple[int, int]


GREEDY = SequenceSampling(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=(0, 0))


def sampling_scalars(options: Sequence[SequenceSampling]) -> dict[str, Array]:
    """The inputs of a launch that say how its sequences sample, by name."""
    return {
        "temperature": np.array([one.temperature for one in options], np.float32),
        "top_k": np.array([one.top_k for one in options], np.int32),
        "top_p": np.array([one.top_p for one in options], np.float32),
        "min_p": np.array([one.min_p for one in options], np.float32),
        "seed": np.array([one.seed for one in options], np.int32).reshape(-1),
    }


def undecided(counts: Array, positions: Array, rounds: Sequence[int]) -> list[int]:
    """Sequences that the last round of a launch left to the host.

    Args:
      counts: i32 [rounds that ran, batch], tokens of each sequence.
      positions: i32 [batch * T], what is carried on; those of a sequence that ended are negative.
      rounds: of each sequence in this launch; one that has had them rests, and decides nothing.
    """
    ran, batch = counts.shape
    if not ran:
        return []
    first = positions.reshape(batch, -1)[:, 0]
    return [
        sequence
        for sequence in range(batch)
        if first[sequence] >= 0 and rounds[sequence] >= ran and counts[-1, sequence] == 0
    ]


def decided_tokens(
    logits: Array,
    tokens: Array,
    positions: Array,
    sampling: SequenceSampling,
    proposed: tuple[Array, Array] | None,
) -> Array:
    """What one sequence emits in the round, i32 [count].

    Args:
      logits: f32 [T, vocab].
      tokens, positions: i32 [T].
      proposed: candidates i32 [T, K] and their probabilities f32 [T, K]; None for certain drafts.
    """
    options = sampling_scalars([sampling])
    options["seed"] = options["seed"].reshape(1, 2)
    emitted, count, _ = ACCEPT(
        logits, tokens, positions, *options.values(), *(proposed or ()), rows=len(tokens)
    )
    found: Array = np.asarray(emitted)[: int(count[0])]
    return found


def forced_tokens(batch: int, rows: int, chosen: Mapping[int, Array]) -> Array:
    """The input `forced` of a launch, i32 [batch * rows]: tokens by sequence, -1 behind them."""
    found = np.full((batch, rows), NO_TOKEN, np.int32)
    for sequence, tokens in chosen.items():
        found[sequence, : len(tokens)] = tokens
    return found.reshape(-1)
