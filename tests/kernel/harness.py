"""Runs generated kernels beside the reference evaluator.

A `Subject` is a model with weights. `reference_of` feeds eight token streams to the reference
evaluator; `session_of` builds a kernel; `run_kernel` puts the kernel's sequences at any positions
of those streams and runs a few steps; the `check_` functions compare.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from dataclasses import field
from functools import cache
from io import StringIO
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from numpy.typing import NDArray

from mkc import Graph
from mkc.codegen_pallas.source import kernel_source
from mkc.ir.graph import StateKind
from mkc.ir.reference import Rounding
from mkc.ir.reference import StepFunction
from mkc.ir.reference import compile_step
from mkc.ir.reference import initial_states
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Lowered
from mkc.passes.pipeline import Pipeline
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.schedule.verify.arrays import BLOCK_ROWS
from mkc.targets import load_target
from tests.codegen_pallas.support_run import Mode
from tests.goldens import Golden
from tests.goldens import golden_case

type Array = NDArray[Any]

STREAMS = 8  # token streams of a subject: the largest batch
PROMPT = 48  # given tokens of a stream; the model chooses those that follow
DECODED = 64
STEPS = PROMPT + DECODED - 1  # the last chosen token is not fed
# Positions at which runs of the tests begin and end; keeping the states of all takes a gigabyte.
KEPT = frozenset((0, 2, 15, 16, 17, 18, 19, 31, 33, 47, 48, 49, 50, 63, 64, 65, STEPS))
TARGET = "tpu7x"
# bf16 keeps 8 significant bits (0.4 %), and a state is up to eight layers of roundings away from
# the embedding; the reference evaluator itself is this near to the f32 states of the goldens.
STATE_RELATIVE_RMS = 0.03


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A model with weights.

    Attributes:
      trace: batch -> graph.
      prompt: i32 [PROMPT], the given tokens of stream 0.
      golden: the recorded case, None for a model without one.
    """

    name: str
    trace: Callable[[int], Graph]
    weights: Mapping[str, Array]
    prompt: Array
    golden: Golden | None = None


@cache
def golden_subject(name: str) -> Subject:
    """A golden case; stream 0 is the recorded one."""
    case = golden_case(name)
    return Subject(
        name=name,
        trace=lambda batch: case.graph(batch=batch),
        weights=case.weights(),
        prompt=case.expected["prompt"],
        golden=case,
    )


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the reference evaluator says about the streams.

    Attributes:
      tokens: i32 [STEPS, STREAMS], fed.
      chosen: i32 [STEPS, STREAMS].
      logits: f32 [STEPS, STREAMS, vocab].
      states: position, of those KEPT -> states of all streams before its token is fed.
      logits_abs, logits_rms: tolerances for an evaluation with the same roundings in another order.
    """

    tokens: Array
    chosen: Array
    logits: Array
    states: Mapping[int, Mapping[str, Array]]
    logits_abs: float
    logits_rms: float

    def margins(self) -> Array:
        """Largest minus second largest logit, f32 [STEPS, STREAMS]."""
        top = np.sort(self.logits, axis=-1)[..., -2:]
        return top[..., 1] - top[..., 0]


@cache
def _step_function(subject: Subject, rounding: Rounding) -> StepFunction:
    return compile_step(subject.trace(STREAMS), subject.weights, rounding=rounding)


@cache
def reference_of(subject: Subject) -> Reference:
    """Runs the streams.

    Stream s starts with the subject's prompt, backwards when s is odd, rotated by 5 s. After the
    prompt the model feeds itself.
    """
    prompts = [
        np.roll(subject.prompt[:: -1 if stream % 2 else 1], 5 * stream) for stream in range(STREAMS)
    ]
    fed, chosen, logits, states = _run(subject, np.stack(prompts, axis=1), "reference")
    bounds = _tolerances(subject, fed, logits)
    return Reference(
        tokens=fed,
        chosen=chosen,
        logits=logits,
        states=states,
        logits_abs=bounds[0],
        logits_rms=bounds[1],
    )


def _run(
    subject: Subject, tokens: Array, rounding: Rounding
) -> tuple[Array, Array, Array, dict[int, Mapping[str, Array]]]:
    """(fed, chosen, logits, kept states) of STEPS steps that begin with `tokens`."""
    step = _step_function(subject, rounding)
    states: Mapping[str, Any] = initial_states(subject.trace(STREAMS), rounding)
    fed, chosen, logits = list(tokens), [], []
    kept: dict[int, Mapping[str, Array]] = {}
    for position in range(STEPS + 1):
        if position in KEPT:
            kept[position] = {key: np.asarray(one) for key, one in states.items()}
        if position == STEPS:
            break
        if position == len(fed):
            fed.append(chosen[-1])
        result = step(fed[position], np.full(STREAMS, position), states)
        states = result.states
        chosen.append(np.asarray(result.outputs["next_token"]))
        logits.append(np.asarray(result.outputs["logits"], np.float32))
    return np.stack(fed), np.stack(chosen), np.stack(logits), kept


def _tolerances(subject: Subject, fed: Array, logits: Array) -> tuple[float, float]:
    """Largest and root mean square difference of logits.

    Recorded with a golden. Otherwise, as there, twice what the roundings of the graph change.
    """
    if subject.golden is not None:
        recorded = subject.golden.tolerances
        return recorded["bf16_logits_abs"], recorded["bf16_logits_rms"]
    exact = _run(subject, fed, "float32")[2]
    return 2 * worst(logits, exact), 2 * rms(logits, exact)


def lower(subject: Subject, *, ranks: int, batch: int, passes: str = "") -> Lowered:
    """The program of a subject; the kernel returns logits."""
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True)).override(passes)
    return pipeline.run(subject.trace(batch), load_target(TARGET))


@dataclass(kw_only=True)
class RecordingSession(KernelSession):
    """Also keeps what every rank returned as next tokens, `[ranks][batch]`, in the last step."""

    rank_tokens: list[Array] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        step = self.step_function

        def recorded(*operands: jax.Array) -> Any:
            results = step(*operands)
            self.rank_tokens = [np.asarray(one.data) for one in results[0].addressable_shards]
            return results

        self.step_function = recorded


def build(
    subject: Subject,
    lowered: Lowered,
    interpret: Any,
    edit: Callable[[str], str] = lambda source: source,
) -> RecordingSession:
    """The kernel of a program, with its weights; `edit` changes its source."""
    source = edit(kernel_source(lowered.program, lowered.steps, target=load_target(TARGET)))
    session = RecordingSession(
        lowered=lowered,
        source=source,
        mesh=mesh_of(jax.devices()[: lowered.program.ranks]),
        interpret=interpret,
    )
    session.load_weights(lambda name: subject.weights[name])
    return session


def session_of(
    subject: Subject, *, ranks: int, batch: int, mode: Mode, passes: str = ""
) -> RecordingSession:
    """The kernel of a subject."""
    lowered = lower(subject, ranks=ranks, batch=batch, passes=passes)
    return build(subject, lowered, mode.parameters())


@dataclass(frozen=True, kw_only=True)
class KernelRun:
    """Steps of a kernel.

    Attributes:
      starts: position of every sequence before the first step; sequence s is stream s.
      tokens: i32 [steps, batch].
      rank_tokens: i32 [steps, ranks, batch].
      logits: f32 [steps, batch, vocab].
      before, after: states by key, [instances, batch, ...].
      races: the race detector has found something.
      printed: what the interpreter printed: semaphores that are not zero at the end.
    """

    session: KernelSession
    starts: tuple[int, ...]
    tokens: Array
    rank_tokens: Array
    logits: Array
    before: Mapping[str, Array]
    after: Mapping[str, Array]
    races: bool
    printed: str

    @property
    def steps(self) -> int:
        return len(self.tokens)


def run_kernel(
    session: RecordingSession, reference: Reference, starts: Sequence[int], steps: int
) -> KernelRun:
    """Runs sequence s from position `starts[s]` of stream s, fed with the tokens of the streams.

    States come from the reference; cache rows that no token has reached are NaN.
    """
    before = initial(session, reference, starts)
    for key, state in before.items():
        session.set_state(key, state)
    tokens, rank_tokens, logits = [], [], []
    races = False
    printed = StringIO()
    try:
        with redirect_stdout(printed):
            for number in range(steps):
                positions = np.asarray(starts, np.int32) + number
                fed = reference.tokens[positions, np.arange(len(starts))]
                result = session.step(fed, positions)
                tokens.append(result.next_token)
                rank_tokens.append(np.stack(session.rank_tokens))
                logits.append(result.logits)
                # Every launch has a race detector of its own.
                detector = interpret_pallas_call.races
                races = races or (detector is not None and detector.races_found)
    finally:
        # An exception inside the interpreter leaves its memory behind.
        pltpu.reset_tpu_interpret_mode_state()
    return KernelRun(
        session=session,
        starts=tuple(starts),
        tokens=np.stack(tokens),
        rank_tokens=np.stack(rank_tokens),
        logits=np.stack(logits).astype(np.float32),
        before=before,
        after={key: session.state(key) for key in before},
        races=races,
        printed=printed.getvalue(),
    )


def initial(
    session: KernelSession, reference: Reference, starts: Sequence[int]
) -> dict[str, Array]:
    """States with stream s at position `starts[s]`, and NaN in the cache rows beyond."""
    found = {}
    for key, state in session.lowered.steps.sharded.full.states.items():
        columns = []
        for stream, position in enumerate(starts):
            column = reference.states[position][key][:, stream].astype(np.float32)
            if state.kind is StateKind.KV_CACHE:
                column[:, position:] = np.nan
            columns.append(column)
        found[key] = np.stack(columns, axis=1)
    return found


def worst(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max())


def rms(found: Array, expected: Array) -> float:
    assert found.shape == expected.shape
    return float(np.sqrt(np.mean((found - expected) ** 2)))


def check(run: KernelRun, reference: Reference) -> None:
    """Everything that must hold of a run on any number of ranks."""
    assert not run.races, "the race detector found a race"
    assert run.printed == "", "a copy is still under way or a semaphore is left over"
    check_logits(run, reference)
    check_tokens(run, reference)
    check_states(run, reference)
    check_ranks(run)


def check_logits(run: KernelRun, reference: Reference) -> None:
    """Within the bf16 tolerance of the reference evaluator; a NaN fails too."""
    expected = expected_of(run, reference.logits)
    assert worst(run.logits, expected) < reference.logits_abs
    assert rms(run.logits, expected) < reference.logits_rms


def check_tokens(run: KernelRun, reference: Reference) -> None:
    """The kernel's own largest logit; the reference's token where the margin is clear."""
    assert (run.tokens == run.logits.argmax(axis=-1)).all()
    clear = expected_of(run, reference.margins()) > reference.logits_abs
    assert clear.any(), "no step has a clear margin"
    expected = expected_of(run, reference.chosen)
    assert (run.tokens == expected)[clear].all()


def expected_of(run: KernelRun, streams: Array) -> Array:
    """[steps, batch, ...] of what is recorded by [position, stream, ...]."""
    positions = np.arange(run.steps)[:, None] + np.array(run.starts)
    return streams[positions, np.arange(len(run.starts))]


def check_states(run: KernelRun, reference: Reference) -> None:
    """Every state of every sequence; cache rows that no token has reached are as they were."""
    by_rows = any(one.by_rows for one in run.session.program.caches)
    for key, state in run.session.lowered.steps.sharded.full.states.items():
        for sequence, start in enumerate(run.starts):
            end = start + run.steps
            found = run.after[key][:, sequence].astype(np.float32)
            expected = reference.states[end][key][:, sequence].astype(np.float32)
            if state.kind is StateKind.KV_CACHE:
                old = run.before[key][:, sequence]
                assert np.array_equal(found[:, :start], old[:, :start]), f"{key}: old rows changed"
                touched = end + (-end % BLOCK_ROWS if by_rows else 0)  # the rest of a block is dead
                assert np.isnan(found[:, touched:]).all(), f"{key}: rows were written ahead"
                found, expected = found[:, start:end], expected[:, start:end]
            limit = STATE_RELATIVE_RMS * float(expected.std())
            assert rms(found, expected) < limit, f"{key}, sequence {sequence}"


def check_ranks(run: KernelRun) -> None:
    """All ranks return the same tokens; ranks that hold copies of a state hold the same bits.

    Copies are computed by each rank from its own residual stream, so a residual that differs in one
    bit between ranks shows in them.
    """
    session = run.session
    assert run.rank_tokens.shape[1] == session.program.ranks
    assert (run.rank_tokens == run.tokens[:, None]).all(), "ranks chose different tokens"
    for key, sharding in session.lowered.steps.sharded.states.items():
        copies = session.program.ranks if sharding.axis is None else sharding.copies
        parts = session.rank_parts(session.layout.operand_of(key))
        for first in range(0, session.program.ranks, copies):
            for other in range(first + 1, first + copies):
                same = parts[first].tobytes() == parts[other].tobytes()
                assert same, f"{key}: ranks {first} and {other} differ"


def copied_states(session: KernelSession) -> list[str]:
    """Keys of the states that several ranks hold."""
    states = session.lowered.steps.sharded.states
    return [key for key, one in states.items() if one.axis is None or one.copies > 1]
