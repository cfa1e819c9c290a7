"""Several steps in one launch are the same steps: tokens, states, the end, and the next launch."""

from __future__ import annotations

from contextlib import redirect_stdout
from functools import cache
from io import StringIO

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.schedule.program import RESTING
from mkc.schedule.program import ROUNDS
from mkc.schedule.program import MatmulPhase
from mkc.targets import load_target
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import TARGET
from tests.kernel.harness import Array
from tests.kernel.harness import RecordingSession
from tests.kernel.harness import build
from tests.kernel.harness import golden_subject

LONGEST = 4


@cache
def session(name: str, ranks: int, batch: int, mode: Mode, rounds: int) -> RecordingSession:
    subject = golden_subject(name)
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(rounds=rounds))
    lowered = pipeline.run(subject.trace(batch), load_target(TARGET))
    return build(subject, lowered, mode.parameters())


def starts(name: str, batch: int) -> tuple[Array, Array]:
    """Different first tokens at different positions."""
    prompt = golden_subject(name).prompt
    return prompt[:batch].astype(np.int32), (7 * np.arange(batch)).astype(np.int32)


def one_by_one(name: str, ranks: int, batch: int, mode: Mode, count: int) -> Array:
    """Tokens [count, batch] of a kernel of one step that is launched `count` times."""
    kernel = session(name, ranks, batch, mode, 1)
    kernel.clear_states()
    tokens, positions = starts(name, batch)
    emitted = []
    for step in range(count):
        tokens = kernel.step(tokens, positions + step).next_token
        emitted.append(tokens)
    return np.stack(emitted)


CASES = [
    pytest.param("qwen38_lane", 1, 1, Mode.GENERIC, id="lane-1-rank-b1"),
    pytest.param("qwen38_mini", 1, 8, Mode.GENERIC, id="mini-1-rank-b8", marks=pytest.mark.long),
    pytest.param("qwen38_lane", 2, 3, Mode.LATE, id="lane-2-ranks-b3-races"),
]


@pytest.mark.parametrize(("name", "ranks", "batch", "mode"), CASES)
def test_rounds_are_steps(name: str, ranks: int, batch: int, mode: Mode) -> None:
    """Same tokens, and the same states bit for bit: the tape wrapped, the streams began anew.

    With late copies a race raises.
    """
    expected = one_by_one(name, ranks, batch, mode, 3)
    kernel = session(name, ranks, batch, mode, LONGEST)
    kernel.clear_states()
    launched = kernel.launch(*starts(name, batch), rounds=[3] * batch)
    assert launched.rounds == 3
    assert_array_equal(launched.tokens, expected)
    single = session(name, ranks, batch, mode, 1)
    for key in kernel.lowered.steps.sharded.full.states:
        assert_array_equal(
            np.asarray(kernel.state(key), np.float32), np.asarray(single.state(key), np.float32)
        )


@pytest.mark.parametrize(("name", "ranks", "batch", "mode"), CASES)
def test_stop_tokens_end_the_launch(name: str, ranks: int, batch: int, mode: Mode) -> None:
    """It ends when the last sequence has stopped; the loads begun for the next round are waited
    for, so the next launch starts clean."""
    expected = one_by_one(name, ranks, batch, mode, LONGEST)
    stops = [[int(token)] for token in expected[1]]
    assert not (expected[0] == expected[1]).any(), "a sequence would stop in its first round"
    kernel = session(name, ranks, batch, mode, LONGEST)
    kernel.clear_states()
    rounds = [LONGEST] * batch
    launched = kernel.launch(*starts(name, batch), rounds=rounds, stop_ids=stops)
    assert_array_equal(launched.tokens, expected[:2])
    kernel.clear_states()
    assert_array_equal(kernel.launch(*starts(name, batch), rounds=rounds).tokens, expected)


@pytest.mark.parametrize(
    ("name", "ranks", "mode"),
    [
        pytest.param("qwen38_lane", 1, Mode.GENERIC, id="lane-1-rank"),
        pytest.param("qwen38_mini", 1, Mode.GENERIC, id="mini-1-rank"),
        pytest.param("qwen38_lane", 2, Mode.LATE, id="lane-2-ranks-races", marks=pytest.mark.long),
    ],
)
def test_each_sequence_ends_by_itself(name: str, ranks: int, mode: Mode) -> None:
    """By its own stop id, by its own rounds, or it never ran: its states are then those after the
    last token that it was fed, bit for bit, and the others go on undisturbed."""
    batch = 3
    expected = one_by_one(name, ranks, batch, mode, LONGEST)
    stop = int(expected[1, 0])
    assert expected[0, 0] != stop, "the sequence would stop in its first round"
    kernel = session(name, ranks, batch, mode, LONGEST)
    for ends, rounds, stop_ids in (
        ((2, 3, 1), (LONGEST, 3, 1), [[7, stop], [], []]),
        ((1, 0, 2), (1, LONGEST, 2), []),
    ):
        kernel.clear_states()
        before = {key: kernel.state(key) for key in kernel.lowered.steps.sharded.full.states}
        tokens, positions = starts(name, batch)
        places = np.where(np.array(ends) == 0, RESTING, positions)
        launched = kernel.launch(tokens, places, rounds=rounds, stop_ids=stop_ids)
        assert launched.rounds == max(ends)
        for sequence, end in enumerate(ends):
            assert_array_equal(launched.tokens[:end, sequence], expected[:end, sequence])
            assert (launched.tokens[end:, sequence] == RESTING).all()
            after = states_after(name, ranks, batch, mode, end) if end else before
            for key, state in after.items():
                assert_array_equal(bits(kernel.state(key))[:, sequence], bits(state)[:, sequence])


def test_a_launch_for_nobody_ends_at_once() -> None:
    """No round runs; what the prologue started is waited for."""
    kernel = session("qwen38_lane", 1, 3, Mode.GENERIC, LONGEST)
    kernel.clear_states()
    tokens, _ = starts("qwen38_lane", 3)
    assert kernel.launch(tokens, np.full(3, RESTING), rounds=[2] * 3).rounds == 0


def bits(state: Array) -> Array:
    """Numbers that compare equal when every bit does, NaN included."""
    return state.view(np.uint16 if state.dtype.itemsize == 2 else np.uint32)


@cache
def states_after(name: str, ranks: int, batch: int, mode: Mode, count: int) -> dict[str, Array]:
    """States by key after `count` launches of one step."""
    one_by_one(name, ranks, batch, mode, count)
    kernel = session(name, ranks, batch, mode, 1)
    return {key: kernel.state(key) for key in kernel.lowered.steps.sharded.full.states}


def test_a_launch_continues_where_the_last_one_ended() -> None:
    expected = one_by_one("qwen38_lane", 1, 1, Mode.GENERIC, LONGEST)
    kernel = session("qwen38_lane", 1, 1, Mode.GENERIC, LONGEST)
    kernel.clear_states()
    tokens, positions = starts("qwen38_lane", 1)
    first = kernel.launch(tokens, positions, rounds=[1]).tokens
    rest = kernel.launch(first[-1], positions + 1, rounds=[LONGEST - 1]).tokens
    assert_array_equal(np.concatenate([first, rest]), expected)


def test_the_last_loads_of_a_round_start_the_first_of_the_next() -> None:
    """Only the last round ends the tape."""
    program = session("qwen38_lane", 1, 1, Mode.GENERIC, LONGEST).lowered.program
    head = [one for one in program.phases() if isinstance(one, MatmulPhase)][-1]
    guards = head.runs[-1].refill[-1]
    assert [guard.loop for guard in guards] == [ROUNDS, None]
    assert guards[0].rows == program.tape.prologue[-1]
    assert guards[1].rows is None


@pytest.mark.parametrize("drained", [True, False])
def test_no_copy_outlives_a_launch_that_ends_early(drained: bool) -> None:
    """The interpreter reports semaphores that are not zero; without the drain it does."""
    name, mode = "qwen38_lane", Mode.EAGER
    lowered = session(name, 1, 1, Mode.GENERIC, LONGEST).lowered
    kernel = build(
        golden_subject(name),
        lowered,
        mode.parameters(),
        edit=lambda source: source if drained else without_drain(source),
    )
    stops = [int(token) for token in one_by_one(name, 1, 1, Mode.GENERIC, 2)[1]]
    kernel.clear_states()
    printed = StringIO()
    with redirect_stdout(printed):
        launched = kernel.launch(*starts(name, 1), rounds=[LONGEST], stop_ids=[stops])
    assert launched.rounds == 2
    assert ("non-zero" in printed.getvalue()) is not drained


def without_drain(source: str) -> str:
    changed = source.replace("    support.tape_drain(", "    (lambda *_: None)(")
    assert changed != source
    return changed
