"""Runs kernels of speculative rounds beside the loop that XLA evaluates.

Both begin with the states of the same prompts and with the same drafts: those of the drafter, or
those that a test puts in. Then tokens, counts, what is carried on and the committed states are
compared.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from dataclasses import replace
from functools import cache
from io import StringIO
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from numpy.typing import NDArray

from mkc.codegen_pallas.source import kernel_source
from mkc.ir.graph import Node
from mkc.ir.graph import StateKind
from mkc.ir.ops_spec import SelectorWalk
from mkc.ir.ops_spec import TopK
from mkc.ir.reference import step_outputs
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.runtime.finish_round import SequenceSampling
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.runtime.kernel_rounds import launch_rounds
from mkc.runtime.rounds import committed
from mkc.runtime.rounds import rounds_function
from mkc.spec import Round
from mkc.targets import load_target
from tests.codegen_pallas.support_run import Mode
from tests.draft_goldens import golden_round
from tests.draft_goldens import round_weights
from tests.kernel.harness import STATE_RELATIVE_RMS
from tests.kernel.harness import TARGET
from tests.kernel.harness import rms
from tests.spec.rounds import OPTIONS
from tests.spec.rounds import Player
from tests.spec.rounds import _weights
from tests.spec.rounds import mask_inputs

type Array = NDArray[Any]

NO_STOPS = -1
ROWS = 8  # of a sequence in a round
DRAFT_OUTPUTS = ("draft_logits", "draft_hidden")
# Logits and scores are of the order of 1; they come from states that are rounded to bf16 in every
# layer, and differ by a few hundredths between two orders of summation.
UNSURE = 0.1
CLEAR = 0.2
MANY = 1 << 20  # a budget that no test uses up
MOST = 4  # rounds of a launch, for which the reference is compiled once


@cache
def greedy_scheme(batch: int) -> Round:
    """The round of the golden models that the kernel runs."""
    return golden_round(batch=batch, sampling=False).masked


@cache
def reference_rounds(batch: int) -> Callable[..., Any]:
    return rounds_function(greedy_scheme(batch), most=MOST)


def session_of(
    *,
    ranks: int,
    batch: int,
    rounds: int,
    mode: Mode,
    passes: str = "",
    edit: Callable[[str], str] = lambda source: source,
) -> KernelSession:
    """The kernel of the golden models, with weights."""
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True, rounds=rounds))
    target = load_target(TARGET)
    lowered = pipeline.override(passes).run(greedy_scheme(batch).graph, target)
    session = KernelSession(
        lowered=lowered,
        source=edit(kernel_source(lowered.program, lowered.steps, target=target)),
        mesh=mesh_of(jax.devices()[:ranks]),
        interpret=mode.parameters(),
    )
    weights = round_weights()
    session.load_weights(lambda name: weights[name])
    return session


def compiled_quickly(session: KernelSession) -> KernelSession:
    """The same: compiling takes most of the time of a kernel that is interpreted."""
    session.step_function = jax.jit(session.step_function, compiler_options=OPTIONS)
    return session


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a launch begins.

    Attributes:
      states: by key, [instances, batch, ...]; without taps.
      carried: `tokens`, `positions`, `kept`.
    """

    states: Mapping[str, Array]
    carried: Mapping[str, Array]

    @classmethod
    def of(cls, player: Player) -> Start:
        """What a reference player would do next."""
        kinds = {key: one.kind for key, one in player.scheme.graph.states.items()}
        return cls(
            states={
                key: np.asarray(one)
                for key, one in player.states.items()
                if kinds[key] is not StateKind.TAP
            },
            carried={key: np.asarray(one) for key, one in player.carried.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch's limits.

    Attributes:
      stops: stop ids of each sequence.
      masks: which tokens may follow each row; empty for all.
      sampling: options of each sequence, for a kernel that samples; empty for greedy ones.
    """

    rounds: int
    budgets: tuple[int, ...]
    stops: tuple[tuple[int, ...], ...]
    masks: tuple[Array | None, ...] = ()
    sampling: tuple[SequenceSampling, ...] = ()

    @classmethod
    def of(cls, batch: int, rounds: int) -> Launch:
        """Without other limits than the rounds."""
        return cls(rounds=rounds, budgets=(MANY,) * batch, stops=((),) * batch)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Of the rounds that ran, as in `mkc.runtime.kernel_rounds.RoundsResult`.

    Attributes:
      logits: of a kernel.
    """

    tokens: Array
    counts: Array
    drafts: Array
    carried: Mapping[str, Array]
    logits: Array | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a launch leaves behind; states as in `Start`."""

    result: Rounds
    states: Mapping[str, Array]
    races: bool = False
    printed: str = ""

    @property
    def start(self) -> Start:
        """Where the next launch begins."""
        return Start(states=self.states, carried=self.result.carried)


def run_kernel(session: KernelSession, start: Start, launch: Launch) -> Outcome:
    """One launch of the kernel. Cache rows that no token has reached are NaN."""
    first = start.carried["positions"].reshape(session.program.batch, -1)[:, 0]
    for key, state in start.states.items():
        session.set_state(key, _with_nan(session, key, state, first))
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            launched = launch_rounds(
                session,
                start.carried,
                rounds=(launch.rounds,) * session.program.batch,
                budgets=launch.budgets,
                stop_ids=launch.stops,
                masks=launch.masks,
                sampling=launch.sampling,
            )
            detector = interpret_pallas_call.races
            races = detector is not None and detector.races_found
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    result = Rounds(
        tokens=launched.tokens,
        counts=launched.counts,
        drafts=launched.drafts,
        carried=launched.carried,
        logits=launched.logits,
    )
    states = {key: session.state(key) for key in start.states}
    return Outcome(result=result, states=states, races=races, printed=printed.getvalue())


def _with_nan(session: KernelSession, key: str, state: Array, first: Array) -> Array:
    full = session.lowered.steps.sharded.full.states[key]
    found = state.astype(np.float32)
    if full.kind is StateKind.KV_CACHE:
        for sequence, position in enumerate(first):
            if position >= 0:
                found[:, sequence, position:] = np.nan
    return found


def run_reference(start: Start, launch: Launch) -> Outcome:
    """The same launch, evaluated by XLA."""
    assert launch.rounds <= MOST
    batch = len(launch.budgets)
    scheme = greedy_scheme(batch)
    states = {key: jnp.asarray(one) for key, one in start.states.items()}
    width = max(1, *(len(one) for one in launch.stops))
    stops = np.full((batch, width), NO_STOPS, np.int32)
    for sequence, ids in enumerate(launch.stops):
        stops[sequence, : len(ids)] = ids
    tokens, counts, drafts, ran, states, carried = reference_rounds(batch)(
        _weights(scheme, "reference"),
        states,
        {key: jnp.asarray(one) for key, one in start.carried.items()},
        mask_inputs(scheme, launch.masks),
        launch.rounds,
        np.asarray(launch.budgets, np.int32),
        stops,
    )
    number = int(ran)
    result = Rounds(
        tokens=np.asarray(tokens)[:number],
        counts=np.asarray(counts)[:number],
        drafts=np.asarray(drafts)[:number],
        carried={key: np.asarray(one) for key, one in carried.items()},
    )
    return Outcome(result=result, states={key: np.asarray(states[key]) for key in start.states})


def check(kernel: Outcome, reference: Outcome, start: Start, launch: Launch) -> None:
    """Tokens, counts, what is carried on, and every state."""
    assert not kernel.races, "the race detector found a race"
    assert kernel.printed == "", "a copy is still under way or a semaphore is left over"
    assert np.array_equal(kernel.result.counts, reference.result.counts)
    assert np.array_equal(kernel.result.tokens, reference.result.tokens)
    assert np.array_equal(kernel.result.drafts, reference.result.drafts)
    found, expected = kernel.result.carried, reference.result.carried
    for key in ("positions", "kept"):
        assert np.array_equal(found[key], expected[key]), key
    batch = len(launch.budgets)
    clear = clear_drafts(start, launch, reference)
    tokens, wanted = (one["tokens"].reshape(batch, -1) for one in (found, expected))
    assert np.array_equal(tokens[clear], wanted[clear]), "drafts with a clear margin differ"
    check_states(kernel, reference, start, batch)


def clear_drafts(start: Start, launch: Launch, reference: Outcome) -> Array:
    """Which tokens of the next round rounding cannot change, bool [batch, rows].

    A draft is clear when it is surely a candidate, its score leads by `CLEAR` among all that may be
    candidates, and the drafts before it are clear.
    """
    batch, ran = len(launch.budgets), len(reference.result.tokens)
    scheme = greedy_scheme(batch)
    clear = np.ones((batch, scheme.graph.rows_per_sequence), np.bool_)
    if not ran:
        return clear
    before = start if ran == 1 else run_reference(start, replace(launch, rounds=ran - 1)).start
    inputs = {**before.carried, **mask_inputs(scheme, launch.masks)}
    outputs = _draft_step(batch)(before.states, inputs)
    logits, hidden = (np.asarray(outputs[name], np.float32) for name in DRAFT_OUTPUTS)
    tokens = np.asarray(outputs["tokens"])
    active = before.carried["positions"].reshape(batch, -1)[:, 0] >= 0
    for sequence, row in np.ndindex(clear.shape):
        if row and active[sequence]:
            place = sequence * clear.shape[1] + row
            is_clear = _is_clear(scheme, logits[place], hidden[place], tokens[place - 1])
            clear[sequence, row] = clear[sequence, row - 1] and is_clear
    return clear


def _is_clear(scheme: Round, logits: Array, hidden: Array, previous: int) -> bool:
    """Whether the choice of one row is."""
    predecessor, successor = (
        np.asarray(round_weights()[name], np.float32) for name in _walk_node(scheme).operands[3:5]
    )
    count = next(one.op.k for one in scheme.graph.body.nodes() if isinstance(one.op, TopK))
    descending = np.sort(logits)[::-1]
    possible = np.flatnonzero(logits >= descending[count - 1] - UNSURE)
    scores = logits[possible] + successor[possible] @ (predecessor[previous] * hidden)
    order = np.argsort(scores)
    surely = logits[possible[order[-1]]] >= descending[count] + UNSURE
    return bool(surely and scores[order[-1]] - scores[order[-2]] > CLEAR)


@cache
def _draft_step(batch: int) -> Callable[..., Any]:
    """One round that also shows what drafts are chosen from."""
    scheme = greedy_scheme(batch)
    top_k = next(one for one in scheme.graph.body.nodes() if isinstance(one.op, TopK))
    values = (top_k.operands[0], _walk_node(scheme).operands[2])
    shown = dict(zip(DRAFT_OUTPUTS, values, strict=True))
    graph = replace(scheme.graph, outputs={**scheme.graph.outputs, **shown})
    weights = _weights(scheme, "reference")

    def step(states: Any, inputs: Any) -> Any:
        return step_outputs(graph, weights, inputs, states, rounding="reference")[0]

    compiled: Callable[..., Any] = jax.jit(step, compiler_options=OPTIONS)
    return compiled


def _walk_node(scheme: Round) -> Node:
    nodes = scheme.graph.body.nodes()
    return next(node for node in nodes if isinstance(node.op, SelectorWalk))


def check_states(kernel: Outcome, reference: Outcome, start: Start, batch: int) -> None:
    """Committed states and cache rows that count; an idle sequence keeps every bit."""
    graph = greedy_scheme(batch).graph
    found = lasting(kernel, batch)
    expected = lasting(reference, batch)
    first = start.carried["positions"].reshape(batch, -1)[:, 0]
    ends = first + kernel.result.counts.sum(axis=0)
    for key, one in expected.items():
        for sequence in np.flatnonzero(first >= 0):
            mine, theirs = found[key][:, sequence], one[:, sequence]
            if graph.states[key].kind is StateKind.KV_CACHE:
                mine, theirs = mine[:, : ends[sequence]], theirs[:, : ends[sequence]]
            assert rms(mine, theirs) < STATE_RELATIVE_RMS * float(theirs.std()), key
    for key, one in kernel.states.items():
        for sequence in range(batch):
            if first[sequence] < 0:
                old = start.states[key][:, sequence].astype(np.float32)
                mine = one[:, sequence].astype(np.float32)
                assert np.array_equal(mine, old, equal_nan=True), key


def lasting(outcome: Outcome, batch: int) -> dict[str, Array]:
    """States as they are once the accepted rows are committed, f32 [instances, batch, ...]."""
    states = {key: jnp.asarray(np.asarray(one, np.float32)) for key, one in outcome.states.items()}
    kept = jnp.asarray(outcome.result.carried["kept"])
    found = committed(greedy_scheme(batch).graph, states, kept)
    return {key: np.asarray(one, np.float32) for key, one in found.items()}


@cache
def prompted(lengths: tuple[int, ...]) -> Start:
    """Behind random prompts of these lengths, one for each sequence, without drafts."""
    player = Player(greedy_scheme(len(lengths)), "reference")
    player.sampling = {}
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 1000, length).tolist() for length in lengths]
    logits = player.prefill(prompts)
    newest = [int(logits[n, length - 1].argmax()) for n, length in enumerate(lengths)]
    player.start(newest, lengths)
    return Start.of(player)


@cache
def continuations(lengths: tuple[int, ...]) -> list[list[int]]:
    """What greedy decoding emits behind the prompts: for each sequence two rounds full or more."""
    state = prompted(lengths)
    found: list[list[int]] = [[] for _ in lengths]
    while min(len(one) for one in found) < 2 * ROWS:
        outcome = run_reference(state, Launch.of(len(lengths), 4))
        for sequence, mine in enumerate(found):
            tokens = outcome.result.tokens[:, sequence]
            mine += tokens[tokens >= 0].tolist()
        state = outcome.start
    return found


def with_drafts(start: Start, sequence: int, drafts: Sequence[int]) -> Start:
    """The same with drafts for a sequence."""
    batch = len(start.carried["kept"])
    tokens, positions = (
        start.carried[name].reshape(batch, -1).copy() for name in ("tokens", "positions")
    )
    ahead = np.arange(tokens.shape[1])
    tokens[sequence, 1 : 1 + len(drafts)] = drafts
    positions[sequence] = np.where(ahead <= len(drafts), positions[sequence, 0] + ahead, -1)
    carried = {"tokens": tokens.reshape(-1), "positions": positions.reshape(-1)}
    return Start(states=start.states, carried={**start.carried, **carried})
