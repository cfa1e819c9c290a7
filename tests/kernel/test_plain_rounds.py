"""Kernels of rounds without a drafter: each is a decode step that chooses its own token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mkc
from mkc.codegen_pallas.source import kernel_source
from mkc.ir.graph import StateKind
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.ir.reference import compile_step
from mkc.ir.reference import initial_states
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.runtime.finish_round import GREEDY
from mkc.runtime.finish_round import SequenceSampling
from mkc.runtime.finish_round import decided_tokens
from mkc.runtime.finish_round import forced_tokens
from mkc.runtime.finish_round import undecided
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.runtime.kernel_rounds import RoundsResult
from mkc.runtime.kernel_rounds import launch_rounds
from mkc.runtime.rounds import Anchors
from mkc.runtime.rounds import committed
from mkc.runtime.rounds import first_inputs
from mkc.spec import Round
from mkc.spec import plain_round
from mkc.targets import load_target
from models.examples import dense
from tests.codegen_pallas.support_run import Mode
from tests.draft_goldens import golden_plain
from tests.goldens import golden_case
from tests.kernel.harness import STATE_RELATIVE_RMS
from tests.kernel.harness import TARGET
from tests.kernel.harness import rms
from tests.kernel.rounds_harness import MANY
from tests.kernel.rounds_harness import Array
from tests.kernel.test_other_graphs import random_weights

BATCH, ROUNDS = 2, 4
FLAT = SequenceSampling(temperature=8.0, top_k=0, top_p=0.95, min_p=0.0, seed=(1, 2))
DENSE = mkc.Model(
    name="dense",
    load_config=lambda config: config,
    decoder=lambda config, step: dense.decoder(step),
    default_config="",
)


@pytest.fixture(autouse=True)
def compiled_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    # Compiling takes most of the time here, and is twice as fast without.
    monkeypatch.setitem(COMPILER_OPTIONS, "xla_backend_optimization_level", 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Plain:
    """A kernel of plain rounds, and what it starts from."""

    scheme: Round
    weights: Mapping[str, Array]
    session: KernelSession

    @property
    def start(self) -> dict[str, Array]:
        """Two sequences at their first position, with tokens whose successors lead clearly."""
        anchors = Anchors(tokens=np.array([14, 23]), positions=np.array([0, 0]))
        return first_inputs(self.scheme, anchors)

    def launch(self, carried: Mapping[str, Array], rounds: int, **options: Any) -> RoundsResult:
        budgets = (MANY,) * BATCH
        return launch_rounds(
            self.session, carried, rounds=(rounds,) * BATCH, budgets=budgets, **options
        )

    def states(self, kept: Array) -> dict[str, Array]:
        """Lasting states of the kernel, with the rows that count."""
        graph = self.scheme.graph
        found = {key: jnp.asarray(self.session.state(key), jnp.float32) for key in graph.states}
        return {k: np.asarray(v) for k, v in committed(graph, found, jnp.asarray(kept)).items()}


@cache
def plain(name: str) -> Plain:
    if name == "dense":
        scheme = plain_round(DENSE, {}, batch=BATCH, context=128)
        weights: Mapping[str, Array] = random_weights(scheme.prefill)
    else:
        scheme, weights = golden_plain(batch=BATCH), golden_case("qwen38_mini").weights()
    target = load_target(TARGET)
    pipeline = Pipeline(shard=Shard(ranks=1), lower=Lower(logits=True, rounds=ROUNDS))
    lowered = pipeline.run(scheme.graph, target)
    session = KernelSession(
        lowered=lowered,
        source=kernel_source(lowered.program, lowered.steps, target=target),
        mesh=mesh_of(jax.devices()[:1]),
        interpret=Mode.GENERIC.parameters(),
    )
    session.load_weights(lambda name: weights[name])
    return Plain(scheme=scheme, weights=weights, session=session)


@pytest.mark.parametrize("name", ["qwen38_mini", "dense"])
def test_greedy_rounds_are_decode_steps(name: str) -> None:
    """Recurrent layers and attention, and attention alone: tokens and states."""
    mine = plain(name)
    mine.session.clear_states()
    found = mine.launch(mine.start, ROUNDS)
    assert (found.counts == 1).all()
    assert (found.carried["kept"] == 1).all()
    step = compile_step(mine.scheme.prefill, mine.weights)
    states: Mapping[str, Any] = initial_states(mine.scheme.prefill)
    tokens = np.asarray(mine.start["tokens"])
    for index in range(ROUNDS):
        evaluation = step(tokens, np.full(BATCH, index), states)
        states, tokens = evaluation.states, np.asarray(evaluation.outputs["next_token"])
        np.testing.assert_array_equal(found.tokens[index, :, 0], tokens)
    np.testing.assert_array_equal(found.carried["tokens"], tokens)
    assert found.carried["positions"].tolist() == [ROUNDS] * BATCH
    for key, one in mine.states(found.carried["kept"]).items():
        other = np.asarray(states[key], np.float32)
        if mine.scheme.graph.states[key].kind is StateKind.KV_CACHE:
            one, other = one[:, :, :ROUNDS], other[:, :, :ROUNDS]
        assert rms(one, other) < STATE_RELATIVE_RMS * float(other.std()), key


def test_a_round_that_is_not_decided_changes_no_state() -> None:
    """It is run again and told what to emit: states are those of the token's only round."""
    mine = plain("qwen38_mini")
    mine.session.clear_states()
    carried = dict(mine.launch(mine.start, 1).carried)
    left = mine.launch(carried, ROUNDS, sampling=(FLAT, GREEDY))
    assert undecided(left.counts, left.carried["positions"], (ROUNDS,) * BATCH) == [0]
    (token,) = decided_tokens(
        left.logits[0], carried["tokens"][:1], carried["positions"][:1], FLAT, None
    )
    forced = forced_tokens(BATCH, 1, {0: np.array([token])})
    rest = dict(left.carried) | {"positions": np.array([1, -1], np.int32)}
    again = mine.launch(rest, 1, sampling=(FLAT, GREEDY), forced=forced)
    assert again.tokens[0, 0].tolist() == [token]
    twice = mine.states(again.carried["kept"])

    mine.session.clear_states()
    carried = dict(mine.launch(mine.start, 1).carried)
    once = mine.launch(carried, 1)
    assert once.carried["kept"].tolist() == [1, 1]
    for key, one in mine.states(once.carried["kept"]).items():
        np.testing.assert_array_equal(twice[key][:, 0], one[:, 0], key)
