"""The loop around rounds of a scheme, evaluated by XLA: what it means that a kernel runs them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mkc.ir.graph import Graph
from mkc.ir.ops import Op
from mkc.ir.ops_spec import KeptConv
from mkc.ir.ops_spec import KeptDeltaRule
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.ir.reference import Rounding
from mkc.ir.reference import step_outputs
from mkc.ir.reference_ops import DTYPES
from mkc.ir.reference_spec import committed_history
from mkc.ir.reference_spec import committed_state
from mkc.runtime.shards import Array
from mkc.spec import LASTING
from mkc.spec import Round

type States = dict[str, jax.Array]
type Inputs = dict[str, jax.Array]  # of a round, by name

PADDING = -1  # position of a row that changes nothing
# (state, kept rows, count) -> state, of one instance
COMMITS: Mapping[type[Op], Callable[..., jax.Array]] = {
    KeptConv: committed_history,
    KeptDeltaRule: committed_state,
}


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """Where sequences stand: the newest token of each, which has not been fed.

    Attributes:
      tokens, positions: i32 [batch]; a negative position for a sequence that takes no part.
    """

    tokens: Array
    positions: Array


def first_inputs(scheme: Round, anchors: Anchors) -> dict[str, Array]:
    """What is carried into a round that has no drafts and nothing to commit."""
    graph = scheme.graph
    found = {
        value.name: np.zeros(value.type.shape, DTYPES[value.type.dtype])
        for value in graph.inputs
        if value.name in scheme.carried
    }
    rows = (graph.batch, graph.rows_per_sequence)
    tokens, positions = np.zeros(rows, np.int32), np.full(rows, PADDING, np.int32)
    tokens[:, 0], positions[:, 0] = anchors.tokens, anchors.positions
    return found | {"tokens": tokens.reshape(-1), "positions": positions.reshape(-1)}


def keep_idle(scheme: Round, old: Mapping[str, jax.Array], new: Mapping[str, jax.Array]) -> Inputs:
    """What is carried on: `new`, but `old` for a sequence that took no part."""
    graph = scheme.graph
    active = old["positions"].reshape(graph.batch, -1)[:, 0] >= 0
    kept = {}
    for name in scheme.carried:
        repeats = old[name].shape[0] // graph.batch
        mask = jnp.repeat(active, repeats).reshape(-1, *[1] * (old[name].ndim - 1))
        kept[name] = jnp.where(mask, new[name], old[name])
    return kept


def rounds_function(
    scheme: Round, *, most: int, rounding: Rounding = "reference"
) -> jax.stages.Wrapped:
    """A compiled function that runs rounds until none is left or all sequences have ended.

    (weights, states, carried inputs, sampling inputs, rounds, budget, stop ids) -> (tokens, counts,
    drafts, how many rounds ran, states, carried inputs). `budget` i32 [batch] is how many tokens a
    sequence may still emit; it ends with the round that reaches it or emits one of its `stop ids`
    i32 [batch, n]. The last round may emit more.

    Args:
      most: rounds of one call; tokens and counts are for so many.
    """
    graph = scheme.graph
    batch, rows = graph.batch, graph.rows_per_sequence

    def launch(
        weights: States,
        states: States,
        carried: Inputs,
        sampling: Inputs,
        rounds: jax.Array,
        budget: jax.Array,
        stop_ids: jax.Array,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, States, Inputs]:
        def goes_on(carry: Any) -> jax.Array:
            number, carried = carry[0], carry[1]
            going: jax.Array = (number < rounds) & jnp.any(carried["positions"] >= 0)
            return going

        def one_round(carry: Any) -> Any:
            number, carried, left, tokens, counts, drafts, states = carry
            proposed = jnp.sum(carried["positions"].reshape(batch, rows)[:, 1:] >= 0, axis=1)
            outputs, states = step_outputs(
                graph, weights, carried | sampling, states, rounding=rounding
            )
            emitted, count = outputs["emitted"].reshape(batch, rows), outputs["count"]
            following = keep_idle(scheme, carried, outputs)
            left = left - count
            is_stop = jnp.any(emitted[:, :, None] == stop_ids[:, None], axis=2)
            there = jnp.arange(rows) < count[:, None]
            ended = jnp.any(is_stop & there, axis=1) | (left <= 0)
            following["positions"] = jnp.where(
                jnp.repeat(ended, rows), PADDING, following["positions"]
            )
            tokens, counts = tokens.at[number].set(emitted), counts.at[number].set(count)
            drafts = drafts.at[number].set(proposed)
            return number + 1, following, left, tokens, counts, drafts, states

        none = jnp.zeros((most, batch), jnp.int32)
        empty = jnp.zeros((most, batch, rows), jnp.int32), none, none
        carry = (jnp.int32(0), carried, budget, *empty, states)
        found: Any = lax.while_loop(goes_on, one_round, carry)
        number, carried, _, tokens, counts, drafts, states = found
        return tokens, counts, drafts, number, states, carried

    return jax.jit(launch, donate_argnums=1, compiler_options=COMPILER_OPTIONS)


def committed(graph: Graph, states: Mapping[str, jax.Array], kept: jax.Array) -> States:
    """The states that outlive a round, after the rows of it that count: [instances, batch, ...].

    Args:
      graph: of a round.
      kept: rows of each sequence that count, i32 [batch].
    """
    found = {key: one for key, one in states.items() if graph.states[key].kind in LASTING}
    for node in graph.body.nodes():
        function = COMMITS.get(type(node.op))
        if function is not None:
            parts = [states[key] for key in node.states]
            each = jax.vmap(function, in_axes=(*[0] * len(parts), None))
            found[node.states[0]] = each(*parts, kept)
    return found


def seed_words(seed: int) -> tuple[int, int]:
    """A seed of 64 bits as the two i32 of an input."""
    low, high = np.array([seed], np.uint64).view(np.int32).tolist()
    return low, high
