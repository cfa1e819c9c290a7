"""Kernels of rounds with a drafter that walks: the golden Kimi K3 model and its DSpark drafter.

Rounds begin without a text, with drafts of the test's own, beside the same rounds evaluated by XLA.
Copies land late, memory is NaN until it is written, races raise.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mkc.codegen_pallas.source import kernel_source
from mkc.ir.graph import StateKind
from mkc.ir.ops_markov import MarkovWalk
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.runtime.rounds import Anchors
from mkc.runtime.rounds import committed
from mkc.runtime.rounds import first_inputs
from mkc.runtime.rounds import keep_idle
from mkc.spec import Round
from mkc.spec import block_round
from mkc.targets import load_target
from models.dspark import DRAFTER
from models.kimi_k3 import MODEL
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import STATE_RELATIVE_RMS
from tests.kernel.harness import TARGET
from tests.kernel.harness import rms
from tests.kernel.rounds_harness import CLEAR
from tests.kernel.rounds_harness import Launch
from tests.kernel.rounds_harness import Outcome
from tests.kernel.rounds_harness import Start
from tests.kernel.rounds_harness import run_kernel
from tests.kernel.rounds_harness import with_drafts
from tests.kimi_goldens import kimi_case
from tests.spark_goldens import SPARK_TARGET
from tests.spark_goldens import spark_case
from tests.spark_goldens import spark_round_weights
from tests.spec.rounds import OPTIONS
from tests.spec.rounds import mask_inputs

ANCHORS = (17, 230)
RIGHT = (3, 1)  # drafts of each sequence in the first round
ROUNDS = 2


@cache
def scheme_of(batch: int, drafts: int, cut: float | None) -> Round:
    target, draft = kimi_case(SPARK_TARGET).config, spark_case().meta["config"]
    draft = draft | {"drafts": drafts, "confidence_threshold": cut}
    return block_round(
        MODEL, target, DRAFTER, draft, batch=batch, context=128, sampling=False
    ).masked


@cache
def reference_of(batch: int, drafts: int, cut: float | None) -> Any:
    """One round: (inputs, states) -> outputs, states."""
    scheme = scheme_of(batch, drafts, cut)
    weights = stack_params(scheme.graph, spark_round_weights(), "reference")
    return jax.jit(
        lambda inputs, states: step_outputs(
            scheme.graph, weights, inputs, states, rounding="reference"
        ),
        compiler_options=OPTIONS,
    )


def session_of(scheme: Round, ranks: int, rounds: int, mode: Mode) -> KernelSession:
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True, rounds=rounds))
    target = load_target(TARGET)
    lowered = pipeline.override("residency{cache_tile=16}").run(scheme.graph, target)
    session = KernelSession(
        lowered=lowered,
        source=kernel_source(lowered.program, lowered.steps, target=target),
        mesh=mesh_of(jax.devices()[:ranks]),
        interpret=mode.parameters(),
    )
    weights = spark_round_weights()
    session.load_weights(lambda name: weights[name])
    return session


def reference_rounds(
    start: Start, rounds: int, batch: int, drafts: int, cut: float | None
) -> tuple[list[list[list[int]]], Start]:
    """What every round emits for each sequence, and where the next one begins."""
    scheme, run = scheme_of(batch, drafts, cut), reference_of(batch, drafts, cut)
    states: dict[str, Any] = {**initial_states(scheme.graph, "reference"), **start.states}
    carried: dict[str, Any] = dict(start.carried)
    emitted = []
    for _ in range(rounds):
        outputs, states = run(carried | mask_inputs(scheme, ()), states)
        carried = keep_idle(scheme, carried, outputs)
        tokens = np.asarray(outputs["emitted"]).reshape(batch, -1)
        counts = np.asarray(outputs["count"])
        emitted.append([row[:count].tolist() for row, count in zip(tokens, counts, strict=True)])
    return emitted, Start(
        states={key: np.asarray(states[key]) for key in start.states},
        carried={key: np.asarray(one) for key, one in carried.items()},
    )


@cache
def begun(batch: int, drafts: int, cut: float | None) -> Start:
    """Behind three rounds from the first position on."""
    scheme = scheme_of(batch, drafts, cut)
    anchors = Anchors(
        tokens=np.array(ANCHORS[:batch], np.int32), positions=np.zeros(batch, np.int32)
    )
    states = {
        key: np.asarray(one)
        for key, one in initial_states(scheme.graph, "reference").items()
        if scheme.graph.states[key].kind is not StateKind.TAP
    }
    start = Start(
        states=states,
        carried={k: np.asarray(one) for k, one in first_inputs(scheme, anchors).items()},
    )
    return reference_rounds(start, 3, batch, drafts, cut)[1]


def check(
    ranks: int, batch: int, mode: Mode, *, drafts: int = 7, cut: float | None = None
) -> Outcome:
    """Two rounds in one launch: the first has drafts of which some are right, the second those of
    the drafter."""
    scheme, start = scheme_of(batch, drafts, cut), begun(batch, drafts, cut)
    emitted, _ = reference_rounds(start, 4, batch, drafts, cut)
    for sequence in range(batch):
        right = [token for one in emitted for token in one[sequence]][:drafts]
        wrong = RIGHT[sequence] if RIGHT[sequence] < drafts else drafts - 1
        right[wrong:] = [one ^ 1 for one in right[wrong:]]
        start = with_drafts(start, sequence, right)
    expected, after = reference_rounds(start, ROUNDS, batch, drafts, cut)
    session = session_of(scheme, ranks, ROUNDS, mode)
    found = run_kernel(session, start, Launch.of(batch, ROUNDS))
    assert not found.races, "the race detector found a race"
    assert found.printed == "", "a copy is still under way or a semaphore is left over"
    counts = [[len(one) for one in of_round] for of_round in expected]
    assert found.result.counts.tolist() == counts
    for number, sequence in np.ndindex(ROUNDS, batch):
        tokens = found.result.tokens[number, sequence]
        assert tokens[tokens >= 0].tolist() == expected[number][sequence]
    for name in ("positions", "kept"):
        assert found.result.carried[name].tolist() == after.carried[name].tolist(), name
    before = reference_rounds(start, ROUNDS - 1, batch, drafts, cut)[1]
    clear = clear_drafts(before, batch, drafts, cut)
    assert clear[:, 1:].any(), "no draft is clear"
    tokens, wanted = (one.carried["tokens"].reshape(batch, -1) for one in (found.result, after))
    assert tokens[clear].tolist() == wanted[clear].tolist()
    check_states(scheme, found, after, batch)
    return found


def clear_drafts(start: Start, batch: int, drafts: int, cut: float | None) -> Any:
    """Which tokens of the round behind `start` rounding cannot change, bool [batch, rows].

    A draft is clear when its score leads by more than two evaluations differ, and the drafts before
    it are clear.
    """
    scheme = scheme_of(batch, drafts, cut)
    walk = next(node for node in scheme.graph.body.nodes() if isinstance(node.op, MarkovWalk))
    shown = replace(
        scheme.graph, outputs={"scores": walk.operands[0], "walked": walk.results[0].name}
    )
    weights = stack_params(scheme.graph, spark_round_weights(), "reference")
    states: dict[str, Any] = {**initial_states(scheme.graph, "reference"), **start.states}
    inputs = dict(start.carried) | mask_inputs(scheme, ())
    found, _ = step_outputs(
        shown,
        weights,
        {key: jnp.asarray(one) for key, one in inputs.items()},
        {key: jnp.asarray(one) for key, one in states.items()},
        rounding="reference",
    )
    assert isinstance(walk.op, MarkovWalk)
    rows = walk.op.rows
    scores = np.asarray(found["scores"], np.float32).reshape(batch, rows, -1)
    walked = np.asarray(found["walked"]).reshape(batch, rows)
    predecessor, successor = (np.asarray(weights[one], np.float32) for one in walk.operands[1:3])
    clear = np.ones((batch, rows), np.bool_)
    for sequence in range(batch):
        for row in range(1, rows):
            all_scores = (
                scores[sequence, row - 1] + successor @ predecessor[walked[sequence, row - 1]]
            )
            best, second = np.sort(all_scores)[::-1][:2]
            clear[sequence, row] = clear[sequence, row - 1] and best - second > CLEAR
    return clear


def check_states(scheme: Round, found: Outcome, after: Start, batch: int) -> None:
    """Committed states, and the rows of caches that count."""
    ends = after.carried["positions"].reshape(batch, -1)[:, 0]
    kept = jnp.asarray(after.carried["kept"])
    mine, theirs = (
        committed(
            scheme.graph,
            {key: jnp.asarray(np.asarray(one, np.float32)) for key, one in states.items()},
            kept,
        )
        for states in (found.states, after.states)
    )
    for key in theirs:
        for sequence in range(batch):
            one, other = (np.asarray(it[key], np.float32)[:, sequence] for it in (mine, theirs))
            if scheme.graph.states[key].kind is StateKind.KV_CACHE:
                one, other = one[:, : ends[sequence]], other[:, : ends[sequence]]
            assert rms(one, other) < STATE_RELATIVE_RMS * float(other.std()), key


def test_one_device() -> None:
    found = check(1, 1, Mode.GENERIC)
    assert found.result.counts[0].tolist() == [RIGHT[0] + 1]


@pytest.mark.long
def test_two_devices_two_sequences() -> None:
    check(2, 2, Mode.LATE, drafts=3)
