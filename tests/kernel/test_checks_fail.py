"""The checks of this folder, seen to fail: every kernel here has one deliberate fault.

A fault that only matters when copies are late shows as NaN or stale numbers; one that leaves the order
of two accesses open is found by the race detector even when the numbers happen to be right.
"""

from __future__ import annotations

from collections.abc import Callable
from re import sub

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.kernel.harness import KernelRun
from tests.kernel.harness import build
from tests.kernel.harness import check
from tests.kernel.harness import golden_subject
from tests.kernel.harness import lower
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel

STARTS, STEPS = (16,), 1
NAME = "qwen38_lane"


def faulty_run(ranks: int, edit: Callable[[str], str]) -> KernelRun:
    """Runs an edited kernel; races are counted, not raised, so that the run ends."""
    subject = golden_subject(NAME)
    interpret = pltpu.InterpretParams(
        detect_races=True,
        on_race="warn",
        dma_execution_mode="on_wait",
        uninitialized_memory="nan",
    )

    def changed(source: str) -> str:
        result = edit(source)
        assert result != source, "the fault was not put in"
        return result

    session = build(subject, lower(subject, ranks=ranks, batch=1), interpret, changed)
    return run_kernel(session, reference_of(subject), STARTS, STEPS)


def in_phase(source: str, phase: str, old: str, new: str) -> str:
    """`source` with the first `old` behind the definition of the phase replaced."""
    head, mark, rest = source.partition(f"def {phase}")
    assert mark and old in rest
    return head + mark + rest.replace(old, new, 1)


def without_tape_wait(source: str) -> str:
    """The first matmul reads its slot before the load has landed."""
    lines = source.split("\n")
    at = next(i for i, line in enumerate(lines) if "support.tape_wait(" in line)
    return "\n".join(lines[:at] + lines[at + 1 :])


def without_state_wait(source: str) -> str:
    """The convolution reads its history before it has arrived."""
    lines = source.split("\n")
    at = next(i for i, line in enumerate(lines) if "support.stream_wait(m.state" in line)
    return "\n".join(lines[:at] + lines[at + 1 :])


def one_receive_buffer(source: str) -> str:
    """Both exchanges of a layer share a receive buffer and its semaphores."""
    return sub(r"(m\.exchange_one_shot_\d+_)1(_receive|_sems)", r"\g<1>0\2", source)


def without_entry_barrier(source: str) -> str:
    return source.replace("    support.entry_barrier(RANKS)\n", "")


def rank_dependent_sum(source: str) -> str:
    """A rank's own sum gets an error of one part in a million, as another order of sums would."""
    old = "total = support.all_reduce_one_shot("
    new = "total = (1 + 1e-2 * lax.axis_index('tp')) * support.all_reduce_one_shot("
    return source.replace(old, new, 1)


@pytest.mark.parametrize("fault", [without_tape_wait, without_state_wait])
def test_a_missing_wait_fails_on_one_device(fault: Callable[[str], str]) -> None:
    run = faulty_run(1, fault)
    assert run.races or np.isnan(run.logits).any()
    with pytest.raises(AssertionError):
        check(run, reference_of(golden_subject(NAME)))


def test_a_receive_buffer_without_alternation_is_a_race() -> None:
    assert faulty_run(2, one_receive_buffer).races
