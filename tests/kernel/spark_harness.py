"""Runs kernels of rounds with a drafter that walks beside the same rounds evaluated by XLA.

Rounds begin without a text, with drafts of the test's own. In a round that samples acceptance is
that of the reference by the kernel's own logits, which differ from those of the reference by
rounding; everything else of the round is the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mkc.codegen_pallas.source import kernel_source
from mkc.ir.facets import REFERENCE
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import StateKind
from mkc.ir.ops_markov import MarkovWalk
from mkc.ir.ops_spec import Accept
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.runtime.finish_round import SequenceSampling
from mkc.runtime.finish_round import sampling_scalars
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
from tests.kernel.rounds_harness import Array
from tests.kernel.rounds_harness import Launch
from tests.kernel.rounds_harness import Outcome
from tests.kernel.rounds_harness import Start
from tests.kernel.rounds_harness import compiled_quickly
from tests.kernel.rounds_harness import run_kernel
from tests.kernel.rounds_harness import with_drafts
from tests.kimi_goldens import kimi_case
from tests.kimi_weights import kimi_weights
from tests.passes.kimi import small_config
from tests.spark_goldens import SPARK_TARGET
from tests.spark_goldens import draft_weights
from tests.spark_goldens import spark_case
from tests.spark_goldens import spark_round_weights
from tests.spec.rounds import OPTIONS
from tests.spec.rounds import mask_inputs

SMALL_LAYERS = 2
SMALL_VOCAB = 512
SMALL_SEED = 5
SMALL_WINDOW = 4  # positions that the drafter looks back
CONTEXT = 128
ANCHORS = (17, 230)
RIGHT = (3, 1)  # drafts of each sequence in the first round, or all but one if there are fewer
SURE = 0.02  # two evaluations of a confidence differ by less
# Logits of a round are as far from those of the reference as the last state is.
LOGITS_RELATIVE_RMS = STATE_RELATIVE_RMS
SHOWN = ("scores", "walked", "confidence")  # what drafts are made of, shown by the reference


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rounds of two models.

    Attributes:
      models: `golden`, or `small`: a layer of each kind of attention, one with experts.
      mxfp4: of experts; not of the golden models.
      cut: confidence below which a block of drafts ends.
      sampling: the kernel can draw tokens.
    """

    models: str = "small"
    mxfp4: bool = False
    batch: int = 1
    drafts: int = 3
    cut: float | None = None
    sampling: bool = False

    @property
    def certain(self) -> Case:
        """Greedy rounds without a cut; they have the same states."""
        return replace(self, cut=None, sampling=False)


def configs(case: Case) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """Of the target and of the drafter."""
    draft = deepcopy(spark_case().meta["config"])
    draft |= {"drafts": case.drafts, "confidence_threshold": case.cut}
    if case.models == "golden":
        return kimi_case(SPARK_TARGET).config, draft
    target = small_config(layers=SMALL_LAYERS, latent=[2], dense=1, mxfp4=case.mxfp4)
    target["text_config"] |= {"vocab_size": SMALL_VOCAB, "attn_res_block_size": 1}
    trunk = draft["transformer_layer_config"]
    trunk |= {"vocab_size": SMALL_VOCAB, "num_hidden_layers": 1, "sliding_window": SMALL_WINDOW}
    trunk["layer_types"] = trunk["layer_types"][:1]
    draft |= {"aux_hidden_state_layer_ids": [0, 1], "mask_token_id": SMALL_VOCAB - 3}
    draft["draft_vocab_size"] = SMALL_VOCAB
    return target, draft


@cache
def scheme_of(case: Case) -> Round:
    target, draft = configs(case)
    return block_round(
        MODEL,
        target,
        DRAFTER,
        draft,
        batch=case.batch,
        context=CONTEXT,
        sampling=case.sampling,
    ).masked


def weights_of(case: Case) -> Mapping[str, Array]:
    if case.models == "golden":
        return spark_round_weights()
    return _small_weights(mxfp4=case.mxfp4)


@cache
def _small_weights(*, mxfp4: bool) -> Mapping[str, Array]:
    case = Case(mxfp4=mxfp4)
    target, _ = configs(case)
    graph: Graph = MODEL.trace(target, batch=1, context=CONTEXT)
    heads = target["text_config"]["num_attention_heads"]
    return {
        **kimi_weights(graph, SMALL_SEED, heads=heads),
        **draft_weights(scheme_of(case).graph, SMALL_SEED),
    }


def session_of(case: Case, ranks: int, rounds: int, mode: Mode) -> KernelSession:
    """The kernel, with weights."""
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True, rounds=rounds))
    target = load_target(TARGET)
    lowered = pipeline.override("residency{cache_tile=16}").run(scheme_of(case).graph, target)
    session = KernelSession(
        lowered=lowered,
        source=kernel_source(lowered.program, lowered.steps, target=target),
        mesh=mesh_of(jax.devices()[:ranks]),
        interpret=mode.parameters(),
    )
    weights = weights_of(case)
    session.load_weights(lambda name: weights[name])
    return compiled_quickly(session)


def _walk(case: Case) -> Node:
    nodes = scheme_of(case).graph.body.nodes()
    return next(one for one in nodes if isinstance(one.op, MarkovWalk))


@cache
def _reference(case: Case) -> Callable[..., Any]:
    """One round: (weights, inputs, states, logits) -> outputs, states.

    Drafts are accepted by `logits`, or by the round's own without them.
    """
    graph, walk = scheme_of(case).graph, _walk(case)
    values = (walk.operands[0], *(one.name for one in walk.results))
    graph = replace(graph, outputs=graph.outputs | dict(zip(SHOWN, values, strict=True)))

    def run(weights: Any, inputs: Any, states: Any, logits: Any) -> Any:
        def accept(op: Any, operands: Any, *rest: Any) -> Any:
            return REFERENCE.table[Accept](op, (logits, *operands[1:]), *rest)

        meanings = {} if logits is None else {Accept: accept}
        return step_outputs(graph, weights, inputs, states, rounding="reference", meanings=meanings)

    return jax.jit(run, compiler_options=OPTIONS)


@cache
def _stacked(case: Case) -> Any:
    return stack_params(scheme_of(case).graph, weights_of(case), "reference")


type Sampling = tuple[SequenceSampling, ...]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """One round of the reference.

    Attributes:
      after: where the next round begins.
      outputs: of the graph, and those of `SHOWN`.
    """

    after: Start
    outputs: Mapping[str, Array]
    emitted: list[list[int]]


def reference_round(
    case: Case, start: Start, sampling: Sampling, logits: Array | None = None
) -> Reference:
    """The next round; drafts are accepted by `logits` [batch, T, vocab] where they are given."""
    scheme = scheme_of(case)
    states: dict[str, Any] = {**initial_states(scheme.graph, "reference"), **start.states}
    inputs: dict[str, Any] = start.carried | mask_inputs(scheme, ())
    if case.sampling:
        options = sampling_scalars(sampling)
        inputs |= options | {"seed": options["seed"].reshape(case.batch, 2)}
    given = None if logits is None else logits.reshape(scheme.graph.rows, -1)
    found, states = _reference(case)(_stacked(case), inputs, states, given)
    outputs = {name: np.asarray(one) for name, one in found.items()}
    tokens = outputs["emitted"].reshape(case.batch, -1)
    carried = keep_idle(scheme, {k: jnp.asarray(one) for k, one in start.carried.items()}, found)
    return Reference(
        after=Start(
            states={key: np.asarray(states[key]) for key in start.states},
            carried={key: np.asarray(one) for key, one in carried.items()},
        ),
        outputs=outputs,
        emitted=[row[:count].tolist() for row, count in zip(tokens, outputs["count"], strict=True)],
    )


def greedy_tokens(case: Case, start: Start, rounds: int) -> tuple[list[list[int]], Start]:
    """What greedy rounds of the reference emit for each sequence, and where they end."""
    found: list[list[int]] = [[] for _ in range(case.batch)]
    for _ in range(rounds):
        one = reference_round(case.certain, start, ())
        start = one.after
        for tokens, new in zip(found, one.emitted, strict=True):
            tokens += new
    return found, start


@cache
def begun(case: Case) -> Start:
    """Behind some rounds from the first position on, with drafts of which some are right."""
    scheme, batch = scheme_of(case.certain), case.batch
    tokens = np.array(ANCHORS[:batch], np.int32)
    anchors = Anchors(tokens=tokens, positions=np.zeros(batch, np.int32))
    states = {
        key: np.asarray(one)
        for key, one in initial_states(scheme.graph, "reference").items()
        if scheme.graph.states[key].kind is not StateKind.TAP
    }
    carried = {key: np.asarray(one) for key, one in first_inputs(scheme, anchors).items()}
    _, start = greedy_tokens(case, Start(states=states, carried=carried), 3)
    following, _ = greedy_tokens(case, start, case.drafts)
    for sequence in range(batch):
        right = following[sequence][: case.drafts]
        wrong = min(RIGHT[sequence], case.drafts - 1)
        right[wrong:] = [one ^ 1 for one in right[wrong:]]
        start = with_drafts(start, sequence, right)
    return start


@dataclass(frozen=True, kw_only=True)
class Played:
    """What launches did: of each one counts [rounds, batch], and rows of the next round that are
    drafts [batch]."""

    counts: list[list[list[int]]]
    drafts: list[list[int]]


def play(
    case: Case, session: KernelSession, launches: Sequence[int], sampling: Sampling = ()
) -> Played:
    """Runs launches of so many rounds, and checks each one.

    In the last round of a launch acceptance is that of the reference by the kernel's own logits, in
    rounds before it by the reference's.
    """
    start, counts, drafts = begun(case), [], []
    for rounds in launches:
        launch = replace(Launch.of(case.batch, rounds), sampling=sampling)
        found = run_kernel(session, start, launch)
        before, emitted = start, []
        for _ in range(rounds - 1):
            one = reference_round(case, before, sampling)
            before = one.after
            emitted.append(one.emitted)
        last = reference_round(case, before, sampling, found.result.logits)
        check(case, before, found, last, [*emitted, last.emitted])
        counts.append(found.result.counts.tolist())
        there = found.result.carried["positions"].reshape(case.batch, -1) >= 0
        drafts.append((there.sum(axis=1) - 1).tolist())
        start = found.start
    return Played(counts=counts, drafts=drafts)


def check(
    case: Case, start: Start, found: Outcome, last: Reference, emitted: list[list[list[int]]]
) -> None:
    """Tokens, counts, logits, the next round's drafts and positions, states.

    Args:
      start: of the last round.
      last: the last round.
      emitted: tokens of each round and sequence.
    """
    assert not found.races, "the race detector found a race"
    assert found.printed == "", "a copy is still under way or a semaphore is left over"
    counts = [[len(one) for one in of_round] for of_round in emitted]
    assert found.result.counts.tolist() == counts
    for place in np.ndindex(len(emitted), case.batch):
        tokens = found.result.tokens[place]
        assert tokens[tokens >= 0].tolist() == emitted[place[0]][place[1]]
    assert found.result.carried["kept"].tolist() == last.after.carried["kept"].tolist()
    check_logits(case, start, found, last)
    for name, sure in clear_rows(case, last).items():
        mine, wanted = (
            one.carried[name].reshape(case.batch, -1) for one in (found.result, last.after)
        )
        assert mine[sure].tolist() == wanted[sure].tolist(), name
    check_states(case, found, last.after)


def check_logits(case: Case, start: Start, found: Outcome, last: Reference) -> None:
    """Of rows that are no padding."""
    assert found.result.logits is not None
    real = start.carried["positions"].reshape(case.batch, -1) >= 0
    mine = found.result.logits[real]
    logits = last.outputs["logits"].astype(np.float32).reshape(found.result.logits.shape)[real]
    assert rms(mine, logits) < LOGITS_RELATIVE_RMS * float(logits.std())


def clear_rows(case: Case, round_: Reference) -> dict[str, Array]:
    """Which tokens and positions of the next round rounding cannot change, bool [batch, rows].

    A draft is clear when its score leads by more than two evaluations differ, and the drafts before
    it are clear. Whether a row is cut is clear when the draft before it is clear and its confidence
    is not that of the threshold, or when a row before it is surely cut.
    """
    weights, walk = _stacked(case), _walk(case)
    predecessor, successor = (np.asarray(weights[one], np.float32) for one in walk.operands[1:3])
    scores, walked, confidence = (
        round_.outputs[name].astype(np.float32 if name != "walked" else np.int32) for name in SHOWN
    )
    walked, confidence = (one.reshape(case.batch, -1) for one in (walked, confidence))
    scores = scores.reshape(*walked.shape, -1)
    tokens, positions = (np.ones(walked.shape, np.bool_) for _ in range(2))
    cut = np.full(walked.shape, -1.0) if case.cut is None else confidence - case.cut
    for sequence in range(case.batch):
        is_cut = False
        for row in range(1, walked.shape[1]):
            before = walked[sequence, row - 1]
            best = np.sort(scores[sequence, row - 1] + successor @ predecessor[before])[-2:]
            clear = tokens[sequence, row - 1]
            tokens[sequence, row] = clear and best[1] - best[0] > CLEAR
            sure = positions[sequence, row - 1] and clear and abs(cut[sequence, row]) > SURE
            positions[sequence, row] = is_cut or sure
            is_cut |= bool(sure and case.cut is not None and cut[sequence, row] < 0)
    return {"tokens": tokens, "positions": positions}


def check_states(case: Case, found: Outcome, after: Start) -> None:
    """Committed states, and the rows of caches that count."""
    scheme = scheme_of(case)
    ends = after.carried["positions"].reshape(case.batch, -1)[:, 0]
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
        for sequence in range(case.batch):
            one, other = (np.asarray(it[key], np.float32)[:, sequence] for it in (mine, theirs))
            if scheme.graph.states[key].kind is StateKind.KV_CACHE:
                one, other = one[:, : ends[sequence]], other[:, : ends[sequence]]
            assert rms(one, other) < STATE_RELATIVE_RMS * float(other.std()), key
