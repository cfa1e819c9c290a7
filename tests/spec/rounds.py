"""Rounds of the golden models, one at a time, with drafts of the test's own where wanted."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from mkc.ir.graph import StateKind
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.ir.reference import Rounding
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from mkc.ir.rows import with_rows_per_sequence
from mkc.ir.token_masks import TOKEN_MASKS
from mkc.ir.token_masks import reads_token_masks
from mkc.runtime.rounds import Anchors
from mkc.runtime.rounds import committed
from mkc.runtime.rounds import first_inputs
from mkc.runtime.rounds import keep_idle
from mkc.runtime.token_masks import Masks
from mkc.runtime.token_masks import mask_rows
from mkc.spec import Round
from tests.draft_goldens import golden_round
from tests.draft_goldens import round_weights

type States = Mapping[str, Any]

PROMPT_ROWS = 64  # of the one prefill program
# Compiling takes most of the time here, and is twice as fast without.
OPTIONS = COMPILER_OPTIONS | {"xla_backend_optimization_level": 0}


class Player:
    """Sequences of the golden target and drafter; changes in place.

    Attributes:
      states: by key of the round's graph, [instances, batch, ...].
      carried: inputs of the next round.
      masks: which tokens may follow each row of the next rounds, for a scheme that reads masks.
    """

    def __init__(self, scheme: Round, rounding: Rounding) -> None:
        self.scheme = scheme
        self.rounding = rounding
        self.batch = scheme.graph.batch
        self.rows = scheme.graph.rows_per_sequence
        self._round = _compiled(scheme, rounding)
        self.states: States = initial_states(scheme.graph, rounding)
        self.carried: dict[str, Any] = {}
        self.masks: Masks = ()
        wanted = {value.name for value in scheme.graph.inputs}
        self.sampling = {k: v for k, v in greedy(self.batch).items() if k in wanted}

    def prefill(self, prompts: Sequence[Sequence[int]]) -> NDArray[Any]:
        """Feeds a prompt to each sequence; f32 logits [batch, rows, vocab]."""
        tokens = np.zeros((self.batch, PROMPT_ROWS), np.int32)
        positions = np.full((self.batch, PROMPT_ROWS), -1, np.int32)
        for number, prompt in enumerate(prompts):
            tokens[number, : len(prompt)] = prompt
            positions[number, : len(prompt)] = np.arange(len(prompt))
        inputs = {"tokens": tokens.reshape(-1), "positions": positions.reshape(-1)}
        own = {key: self.states[key] for key in _lasting(self.scheme)}
        function = _prefill(self.scheme, self.rounding)
        outputs, new = function(_weights(self.scheme, self.rounding), inputs, own)
        self.states = {**self.states, **new}
        return np.asarray(outputs["logits"], np.float32).reshape(self.batch, PROMPT_ROWS, -1)

    def start(self, tokens: Sequence[int], positions: Sequence[int]) -> None:
        """Newest tokens, not fed yet; a negative position for an idle sequence."""
        anchors = Anchors(tokens=np.array(tokens), positions=np.array(positions))
        self.carried = first_inputs(self.scheme, anchors)

    def draft(self, sequence: int, drafts: Sequence[int]) -> None:
        """Replaces the drafts of a sequence in the next round."""
        tokens = np.array(self.carried["tokens"]).reshape(self.batch, self.rows)
        positions = np.array(self.carried["positions"]).reshape(self.batch, self.rows)
        tokens[sequence, 1 : 1 + len(drafts)] = drafts
        ahead = np.arange(self.rows)
        place = np.where(ahead <= len(drafts), positions[sequence, 0] + ahead, -1)
        positions[sequence] = np.where(place < self.scheme.graph.context, place, -1)
        self.carried |= {"tokens": tokens.reshape(-1), "positions": positions.reshape(-1)}

    def round(self) -> tuple[list[list[int]], NDArray[Any]]:
        """Runs one; what each sequence emitted, and f32 logits [batch, rows, vocab]."""
        before = {name: jnp.asarray(one) for name, one in self.carried.items()}
        inputs = before | self.sampling | mask_inputs(self.scheme, self.masks)
        outputs, self.states = self._round(
            _weights(self.scheme, self.rounding), inputs, dict(self.states)
        )
        self.carried = keep_idle(self.scheme, before, outputs)
        emitted = np.asarray(outputs["emitted"]).reshape(self.batch, self.rows)
        counts = np.asarray(outputs["count"])
        logits = np.asarray(outputs["logits"], np.float32).reshape(self.batch, self.rows, -1)
        tokens = [row[:count].tolist() for row, count in zip(emitted, counts, strict=True)]
        return tokens, logits

    def committed(self) -> dict[str, NDArray[Any]]:
        """Lasting states as they are once the accepted rows are committed."""
        kept = self.carried.get("kept", np.zeros(self.batch, np.int32))
        found = committed(self.scheme.graph, self.states, jnp.asarray(kept))
        return {key: np.asarray(one, np.float32) for key, one in found.items()}


def mask_inputs(scheme: Round, masks: Masks) -> dict[str, Any]:
    """The masks of all rows as an input, if the scheme reads masks; without any all is allowed."""
    if not reads_token_masks(scheme.graph):
        assert not masks, "a scheme without masks"
        return {}
    logits = scheme.prefill.outputs["logits"]
    vocab = next(
        value.type.shape[1]
        for node in scheme.prefill.body.nodes()
        for value in node.results
        if value.name == logits
    )
    return {TOKEN_MASKS: mask_rows(masks or [None] * scheme.graph.rows, vocab)}


def greedy(batch: int) -> dict[str, Any]:
    """Sampling inputs that ask for the most probable token."""
    f32, i32 = np.zeros(batch, np.float32), np.zeros(batch, np.int32)
    return {
        "temperature": f32,
        "top_k": i32,
        "top_p": f32 + 1,
        "min_p": f32,
        "seed": np.zeros((batch, 2), np.int32),
    }


@cache
def spec_scheme(batch: int = 1) -> Round:
    return golden_round(batch=batch)


def _lasting(scheme: Round) -> list[str]:
    states = scheme.prefill.states.items()
    return [key for key, one in states if one.kind is not StateKind.TAP]


_WEIGHTS: dict[tuple[str, Rounding], Any] = {}
_COMPILED: dict[Any, Any] = {}


def _weights(scheme: Round, rounding: Rounding) -> Any:
    key = (scheme.name, rounding)
    if key not in _WEIGHTS:
        _WEIGHTS[key] = stack_params(scheme.graph, round_weights(), rounding)
    return _WEIGHTS[key]


def _compiled(scheme: Round, rounding: Rounding) -> Any:
    masked = reads_token_masks(scheme.graph)
    key = (scheme.name, scheme.carried, scheme.graph.batch, rounding, masked)
    return _once(key, scheme.graph, rounding)


def _prefill(scheme: Round, rounding: Rounding) -> Any:
    graph = with_rows_per_sequence(scheme.prefill, PROMPT_ROWS)
    return _once((scheme.name, scheme.graph.batch, rounding, PROMPT_ROWS), graph, rounding)


def _once(key: Any, graph: Any, rounding: Rounding) -> Any:
    if key not in _COMPILED:
        _COMPILED[key] = jax.jit(
            lambda weights, inputs, states: step_outputs(
                graph, weights, inputs, states, rounding=rounding
            ),
            compiler_options=OPTIONS,
        )
    return _COMPILED[key]
