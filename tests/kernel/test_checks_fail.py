"""The checks of this folder, seen to fail.

Most kernels here have one deliberate fault. One that only matters when copies are late shows as NaN
or stale numbers; one that leaves the order of two accesses open is found by the race detector even
when the numbers happen to be right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from re import sub
from typing import Literal

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.codegen_pallas.support_run import CLOCK_ENTRIES
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import KernelRun
from tests.kernel.harness import Reference
from tests.kernel.harness import build
from tests.kernel.harness import check
from tests.kernel.harness import check_logits
from tests.kernel.harness import check_ranks
from tests.kernel.harness import check_states
from tests.kernel.harness import check_tokens
from tests.kernel.harness import copied_states
from tests.kernel.harness import golden_subject
from tests.kernel.harness import lower
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of

NAME = "qwen38_lane"
STARTS, STEPS = (16,), 1


def faulty_run(
    ranks: int, edit: Callable[[str], str], copies: Literal["on_wait", "eager"] = "on_wait"
) -> KernelRun:
    """Runs an edited kernel; races are noted, not raised, so that the run ends.

    Args:
      copies: when they happen: as late or as early as possible.
    """
    subject = golden_subject(NAME)
    interpret = pltpu.InterpretParams(
        detect_races=True,
        vector_clock_size=CLOCK_ENTRIES,
        on_race="warn",
        dma_execution_mode=copies,
        uninitialized_memory="nan",
    )

    def changed(source: str) -> str:
        result = edit(source)
        assert result != source, "the fault was not put in"
        return result

    session = build(subject, lower(subject, ranks=ranks, batch=1), interpret, changed)
    return run_kernel(session, reference_of(subject), STARTS, STEPS)


def reference() -> Reference:
    return reference_of(golden_subject(NAME))


def without_line(source: str, text: str) -> str:
    """`source` without the first line that contains `text`."""
    lines = source.split("\n")
    at = next(i for i, line in enumerate(lines) if text in line)
    return "\n".join(lines[:at] + lines[at + 1 :])


def without_tape_wait(source: str) -> str:
    """The first matmul reads its slot before the load has landed."""
    return without_line(source, "support.tape_wait(")


def without_state_wait(source: str) -> str:
    """The convolution reads its history before it has arrived."""
    return without_line(source, "support.stream_wait(m.state")


def without_cache_drain(source: str) -> str:
    """The kernel ends before the last layer's new rows are in the cache."""
    return without_line(source, "support.kv_drain(")


def with_one_receive_buffer(source: str) -> str:
    """Both exchanges of a layer share a receive buffer and its semaphores."""
    return sub(r"(m\.exchange_one_shot_\d+_)1(_receive|_sems)", r"\g<1>0\2", source)


def with_different_sums(source: str) -> str:
    """Every rank gets another sum, as it would if ranks summed in different orders."""
    old = "total = support.all_reduce_one_shot("
    return source.replace(old, f"total = (1 + 0.01 * lax.axis_index('tp')) * {old[8:]}")


MISSING_WAITS = [without_tape_wait, without_state_wait]


@pytest.mark.parametrize("fault", MISSING_WAITS)
def test_a_missing_wait_shows_when_copies_are_late(fault: Callable[[str], str]) -> None:
    """The reader finds memory that was never written."""
    run = faulty_run(1, fault)
    assert np.isnan(run.logits).any()
    with pytest.raises(AssertionError):
        check_logits(run, reference())


@pytest.mark.parametrize("fault", MISSING_WAITS)
def test_a_missing_wait_is_a_race_when_copies_are_early(fault: Callable[[str], str]) -> None:
    """The numbers are right, by luck."""
    run = faulty_run(1, fault, "eager")
    check_logits(run, reference())
    with pytest.raises(AssertionError, match="race"):
        check(run, reference())


def test_a_missing_drain() -> None:
    """Nothing but the states shows it."""
    run = faulty_run(1, without_cache_drain)
    check_logits(run, reference())
    with pytest.raises(AssertionError, match=r"kv\.\w+"):
        check_states(run, reference())


def test_a_receive_buffer_without_alternation() -> None:
    """A peer may be one exchange ahead: its next message overwrites one that is still read."""
    assert faulty_run(2, with_one_receive_buffer).races


def test_ranks_that_differ() -> None:
    run = faulty_run(4, with_different_sums)
    assert copied_states(run.session)
    with pytest.raises(AssertionError, match="ranks 0 and 1 differ"):
        check_ranks(run)


def test_every_check_refuses_a_changed_result() -> None:
    """A sound run passes; with one result changed it does not."""
    subject = golden_subject(NAME)
    session = session_of(subject, ranks=1, batch=1, mode=Mode.LATE)
    run = run_kernel(session, reference(), STARTS, STEPS)
    check(run, reference())
    shifted = run.logits + reference().logits_abs
    with pytest.raises(AssertionError):
        check_logits(replace(run, logits=shifted), reference())
    with pytest.raises(AssertionError):
        check_tokens(replace(run, tokens=run.tokens + 1), reference())
    with pytest.raises(AssertionError, match="different tokens"):
        check_ranks(replace(run, rank_tokens=run.rank_tokens + 1))
    for key, state in run.after.items():
        after = {**run.after, key: (state.astype(np.float32) * 1.05).astype(state.dtype)}
        with pytest.raises(AssertionError, match=key.replace("{", r"\{").replace("}", r"\}")):
            check_states(replace(run, after=after), reference())
