"""Kernels whose rounds sample, in the interpreter.

Logits differ from those of the reference by rounding, which changes some draws. So what a round
emits is compared with what the reference makes of the kernel's own logits and drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas.source import kernel_source
from mkc.ir.acceptance import accept
from mkc.ir.counter_random import DRAFT
from mkc.ir.counter_random import race
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.runtime.finish_round import GREEDY
from mkc.runtime.finish_round import SequenceSampling
from mkc.runtime.finish_round import decided_tokens
from mkc.runtime.finish_round import forced_tokens
from mkc.runtime.finish_round import sampling_scalars
from mkc.runtime.finish_round import undecided
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.runtime.kernel_rounds import RoundsResult
from mkc.runtime.kernel_rounds import launch_rounds
from mkc.runtime.token_masks import Masks
from mkc.runtime.token_masks import pack_mask
from mkc.targets import load_target
from tests.codegen_pallas.support_run import Mode
from tests.draft_goldens import golden_round
from tests.draft_goldens import round_weights
from tests.kernel.harness import TARGET
from tests.kernel.rounds_harness import MANY
from tests.kernel.rounds_harness import Array
from tests.kernel.rounds_harness import Launch
from tests.kernel.rounds_harness import Start
from tests.kernel.rounds_harness import continuations
from tests.kernel.rounds_harness import prompted
from tests.kernel.rounds_harness import run_reference
from tests.kernel.rounds_harness import with_drafts

BATCH, ROWS, ROUNDS = 2, 8, 2
VOCAB = 1024
LENGTHS = (37, 20)
WARM = SequenceSampling(temperature=0.7, top_k=40, top_p=0.95, min_p=0.02, seed=(5, -9))
FLAT = SequenceSampling(temperature=8.0, top_k=0, top_p=0.95, min_p=0.0, seed=(1, 2))


def session_of(ranks: int, mode: Mode) -> KernelSession:
    """The kernel of the golden models."""
    pipeline = Pipeline(
        shard=Shard(ranks=ranks),
        lower=Lower(logits=True, rounds=ROUNDS),
    )
    target = load_target(TARGET)
    lowered = pipeline.run(golden_round(batch=BATCH).masked.graph, target)
    session = KernelSession(
        lowered=lowered,
        source=kernel_source(lowered.program, lowered.steps, target=target),
        mesh=mesh_of(jax.devices()[:ranks]),
        interpret=mode.parameters(),
    )
    weights = round_weights()
    session.load_weights(lambda name: weights[name])
    return session


@cache
def kernel() -> KernelSession:
    return session_of(1, Mode.GENERIC)


def begin(session: KernelSession) -> dict[str, Array]:
    """Behind prompts, without drafts."""
    start = prompted(LENGTHS)
    session.clear_states()
    for key, state in start.states.items():
        session.set_state(key, state.astype(np.float32))
    return dict(start.carried)


def with_likely_drafts(session: KernelSession) -> tuple[dict[str, Array], tuple[Array, Array]]:
    """What is carried in with greedy decoding's tokens as drafts, and what they were drawn from."""
    begin(session)
    start = prompted(LENGTHS)
    candidates = np.zeros((BATCH * ROWS, 128), np.int32)
    proposal = np.zeros((BATCH * ROWS, 128), np.float32)
    candidates[:, :16] = 900 + np.arange(16)
    proposal[:, :16] = 0.5 / 15
    for sequence in range(BATCH):
        drafts = continuations(LENGTHS)[sequence][: ROWS - 1]
        start = with_drafts(start, sequence, drafts)
        candidates[sequence * ROWS + 1 : (sequence + 1) * ROWS, 3] = drafts
    proposal[:, 3] = 0.5
    for name, one in (("candidates", candidates), ("proposal", proposal)):
        session.place(name, [one] * session.program.ranks)
    return dict(start.carried), (candidates[:, :16], proposal[:, :16])


def launch(
    session: KernelSession,
    carried: dict[str, Array],
    sampling: Sequence[SequenceSampling],
    *,
    rounds: int = 1,
    forced: Array | None = None,
    masks: Masks = (),
) -> RoundsResult:
    try:
        return launch_rounds(
            session,
            carried,
            rounds=(rounds,) * BATCH,
            budgets=(MANY,) * BATCH,
            sampling=sampling,
            forced=forced,
            masks=masks,
        )
    finally:
        pltpu.reset_tpu_interpret_mode_state()


def proposed(session: KernelSession) -> tuple[Array, Array]:
    """Candidates and probabilities [rows, K] of the drafts that the last launch made."""
    found = []
    for name in ("candidates", "proposal"):
        parts = session.rank_parts(name)
        for part in parts[1:]:
            np.testing.assert_array_equal(part, parts[0])
        found.append(parts[0][: BATCH * ROWS, :16])
    return found[0], found[1]


def check_round(
    session: KernelSession,
    carried: dict[str, Array],
    sampling: Sequence[SequenceSampling],
    before: tuple[Array, Array],
    found: RoundsResult,
) -> None:
    """One round: emitted tokens, and the drafts for the next one."""
    assert found.logits is not None
    options = sampling_scalars(sampling)
    options["seed"] = options["seed"].reshape(BATCH, 2)
    emitted, count, _ = accept(
        jnp.asarray(found.logits).reshape(BATCH * ROWS, -1),
        jnp.asarray(carried["tokens"]),
        jnp.asarray(carried["positions"]),
        *(jnp.asarray(one) for one in (*options.values(), *before)),
        rows=ROWS,
    )
    np.testing.assert_array_equal(found.counts[0], count)
    np.testing.assert_array_equal(found.tokens[0].reshape(-1), emitted)
    first = carried["positions"].reshape(BATCH, ROWS)[:, :1]
    positions = first + found.counts[0][:, None] + np.arange(ROWS)
    np.testing.assert_array_equal(found.carried["positions"], positions.reshape(-1))
    np.testing.assert_array_equal(found.carried["kept"], found.counts[0])

    tokens = found.carried["tokens"].reshape(BATCH, ROWS)
    candidates, proposal = (one.reshape(BATCH, ROWS, -1) for one in proposed(session))
    np.testing.assert_allclose(proposal[:, 1:].sum(2), 1, rtol=1e-5)
    assert not proposal[:, 0].any()
    place = race(
        jnp.asarray(proposal),
        jnp.asarray(options["seed"])[:, None],
        jnp.asarray(positions),
        DRAFT,
        jnp.asarray(candidates),
    )
    drawn = np.take_along_axis(candidates, np.asarray(place)[:, :, None], axis=2)[:, :, 0]
    np.testing.assert_array_equal(tokens[:, 1:], drawn[:, 1:])
    for sequence, one in enumerate(sampling):
        assert (proposal[sequence, 1:].max(1) == 1).all() == (one.temperature == 0)


def play(session: KernelSession, rounds: int) -> list[int]:
    """A sequence that samples beside a greedy one; how many tokens the rounds emitted."""
    carried, before = with_likely_drafts(session)
    counts: list[int] = []
    for _ in range(rounds):
        found = launch(session, carried, (WARM, GREEDY))
        check_round(session, carried, (WARM, GREEDY), before, found)
        before = proposed(session)
        carried = dict(found.carried)
        counts += found.counts[0].tolist()
    return counts


def test_rounds_emit_what_the_reference_draws() -> None:
    """All drafts are accepted where the sequence is greedy, some where it is not.

    The drafter's own drafts, behind these, are bad: it has random weights.
    """
    counts = play(kernel(), 4)
    assert counts[1] == ROWS
    assert counts[0] > 1
    assert 1 in counts[2::2]


def masked_rows(carried: dict[str, Array]) -> tuple[list[Array | None], Array]:
    """Masks of both sequences, and as bool [rows, vocab]: behind the anchor few tokens, the draft
    one of them; behind the third draft all but the next one; behind the others half of all."""
    tokens = carried["tokens"]
    allowed = np.random.default_rng(4).random((BATCH * ROWS, VOCAB)) < 0.5
    for row in range(BATCH * ROWS):
        following = tokens[row + 1 : row + 2]
        if row % ROWS == 0:
            allowed[row] = np.arange(VOCAB) < 5
        allowed[row, following] = row % ROWS != 3
    return [pack_mask(one) for one in allowed], allowed


def test_masked_rounds_emit_what_the_reference_draws() -> None:
    """A draft that is not allowed is not accepted, whatever the target thinks of it."""
    carried, before = with_likely_drafts(kernel())
    free = launch(kernel(), carried, (WARM, GREEDY))
    assert free.counts[0, 1] == ROWS
    carried, before = with_likely_drafts(kernel())
    masks, allowed = masked_rows(carried)
    found = launch(kernel(), carried, (WARM, GREEDY), masks=masks)
    logits = found.logits.reshape(BATCH * ROWS, VOCAB)
    whole = free.logits.reshape(BATCH * ROWS, VOCAB)
    np.testing.assert_array_equal(logits, np.where(allowed, whole, -np.inf))
    check_round(kernel(), carried, (WARM, GREEDY), before, found)
    assert found.counts[0, 0] <= 4
    assert found.counts[0, 1] == 4, "the drafts in front of the mask that refuses one"
    again = launch(kernel(), with_likely_drafts(kernel())[0], (WARM, GREEDY))
    np.testing.assert_array_equal(again.logits, free.logits)


def test_two_ranks_draw_as_the_reference() -> None:
    """Each has half of the vocabulary, and both have the same candidates behind the round."""
    session = session_of(2, Mode.EAGER)
    counts = play(session, 1)
    assert counts[1] == ROWS
    found = launch(session, begin(session), (FLAT, GREEDY))
    assert found.counts.tolist() == [[0, 1]]


@pytest.mark.long
def test_ranks_draw_alike() -> None:
    """With late copies, where a race raises; also in a round that is not decided."""
    session = session_of(2, Mode.LATE)
    play(session, 2)
    found = launch(session, begin(session), (FLAT, GREEDY))
    assert found.counts.tolist() == [[0, 1]]


def test_greedy_sequences_are_those_of_a_greedy_kernel() -> None:
    carried = begin(kernel())
    found = launch(kernel(), carried, (GREEDY, GREEDY), rounds=ROUNDS)
    start = Start(states=prompted(LENGTHS).states, carried=carried)
    wanted = run_reference(start, Launch.of(BATCH, ROUNDS)).result
    np.testing.assert_array_equal(found.counts[0], wanted.counts[0])
    np.testing.assert_array_equal(found.tokens[0], wanted.tokens[0])


def test_launches_of_two_rounds_are_two_launches() -> None:
    """What goes from round to round inside a launch also goes from launch to launch."""
    carried = begin(kernel())
    both = launch(kernel(), carried, (WARM, WARM), rounds=2)
    at_once = proposed(kernel())
    first = launch(kernel(), begin(kernel()), (WARM, WARM))
    second = launch(kernel(), dict(first.carried), (WARM, WARM))
    np.testing.assert_array_equal(both.tokens, [first.tokens[0], second.tokens[0]])
    for one, other in zip(at_once, proposed(kernel()), strict=True):
        np.testing.assert_array_equal(one, other)
    for name, one in both.carried.items():
        np.testing.assert_array_equal(one, second.carried[name])


def test_the_host_decides_what_the_kernel_does_not() -> None:
    """The launch ends with the round; the next one emits what it is told, and drafts on."""
    carried = dict(launch(kernel(), begin(kernel()), (WARM, GREEDY)).carried)
    drafts = proposed(kernel())
    found = launch(kernel(), carried, (FLAT, GREEDY), rounds=2)
    assert found.counts.shape == (1, BATCH)
    assert undecided(found.counts, found.carried["positions"], (2, 2)) == [0]
    assert found.counts[0, 1] > 0
    assert found.logits is not None
    mine = slice(0, ROWS)
    for name in ("tokens", "positions"):
        np.testing.assert_array_equal(found.carried[name][mine], carried[name][mine])
    assert found.carried["kept"][0] == 0
    for old, new in zip(drafts, proposed(kernel()), strict=True):
        np.testing.assert_array_equal(old[mine], new[mine])

    tokens = decided_tokens(
        found.logits[0],
        carried["tokens"][mine],
        carried["positions"][mine],
        FLAT,
        (drafts[0][mine], drafts[1][mine]),
    )
    forced = forced_tokens(BATCH, ROWS, {0: tokens})
    again = launch(kernel(), dict(found.carried), (FLAT, GREEDY), forced=forced)
    assert again.counts[0, 0] == len(tokens)
    np.testing.assert_array_equal(again.tokens[0, 0, : len(tokens)], tokens)
    assert again.logits is not None
    np.testing.assert_allclose(again.logits[0], found.logits[0], atol=0.05)
    assert again.carried["positions"][0] == carried["positions"][0] + len(tokens)
    assert again.carried["tokens"][0] == tokens[-1]
    assert again.carried["kept"][0] == len(tokens)
