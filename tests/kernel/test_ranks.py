"""The kernel on several devices, in the TPU interpreter at its most hostile: copies land when they
are waited for, memory is NaN until it is written, unordered accesses and reads out of bounds raise.

The interpreter takes seconds per step here, so runs are short and start in the middle of a text.
"""

from __future__ import annotations

import numpy as np
import pytest

from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import MatmulPhase
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import RecordingSession
from tests.kernel.harness import Subject
from tests.kernel.harness import build
from tests.kernel.harness import check
from tests.kernel.harness import copied_states
from tests.kernel.harness import golden_subject
from tests.kernel.harness import lower
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of

# Step 1 stands before or at a border of a tile of 16 rows, step 2 at or behind it.
STARTS = (47, 0, 15, 16, 63, 17, 31, 48)


TILE = "residency{cache_tile=16}"


def check_steps(session: RecordingSession, subject: Subject, steps: int = 2) -> None:
    starts = STARTS[: session.program.batch]
    reference = reference_of(subject)
    check(run_kernel(session, reference, starts, steps), reference)


def check_late(name: str, ranks: int, batch: int, passes: str = TILE) -> RecordingSession:
    """Builds a kernel, runs two steps and checks everything."""
    subject = golden_subject(name)
    session = session_of(subject, ranks=ranks, batch=batch, mode=Mode.LATE, passes=passes)
    check_steps(session, subject)
    return session


def algorithms(session: RecordingSession) -> set[str]:
    phases = session.program.phases()
    return {phase.algorithm for phase in phases if isinstance(phase, AllReducePhase)}


@pytest.mark.parametrize(
    ("name", "batch"),
    [("qwen38_lane", 1), ("qwen38_lane", 8), ("qwen38_mini", 1)],
)
def test_one_device(name: str, batch: int) -> None:
    check_late(name, 1, batch)


@pytest.mark.parametrize(
    ("name", "batch"),
    [("qwen38_lane", 3), ("qwen38_lane", 8), ("qwen38_mini", 1)],
)
def test_two_devices(name: str, batch: int) -> None:
    check_late(name, 2, batch)


@pytest.mark.parametrize(("name", "batch"), [("qwen38_lane", 3), ("qwen38_mini", 1)])
def test_eight_devices(name: str, batch: int) -> None:
    """More ranks than key heads: several ranks hold the same head, with the same bits."""
    session = check_late(name, 8, batch)
    assert copied_states(session)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("algorithm", ["one_shot", "two_phase"])
def test_exchanges(ranks: int, algorithm: str) -> None:
    session = check_late("qwen38_lane", ranks, 1, f"collectives{{algorithm={algorithm}}}")
    assert algorithms(session) == {algorithm}


def test_every_rank_holds_the_same_hidden_state() -> None:
    """The kernel is edited to return, instead of logits, the hidden state before the LM head."""
    subject = golden_subject("qwen38_lane")
    lowered = lower(subject, ranks=2, batch=2)
    hidden = [one for one in lowered.program.phases() if isinstance(one, MatmulPhase)][-1].left
    logits = lowered.program.logits
    assert logits is not None

    def edit(source: str) -> str:
        copy = "    support.copy_out("
        assert source.count(copy) == 1
        show = f"m.{logits.buffer}[:, 0:{hidden.width}] = m.{hidden.buffer}[...]"
        return source.replace(copy, f"    {show}.astype(jnp.float32)\n{copy}")

    session = build(subject, lowered, Mode.LATE.parameters(), edit)
    run = run_kernel(session, reference_of(subject), (16, 31), 2)
    first, second = np.split(run.logits, 2, axis=-1)
    shown = first[..., : hidden.width]
    assert not run.races
    assert 0.5 < shown.std() < 2.0, "a normalised state has a root mean square near one"
    assert np.array_equal(shown, second[..., : hidden.width])
