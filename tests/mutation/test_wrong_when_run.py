"""Mistakes that interpret mode shows to be wrong, in the text of a kernel: none survives the proof.

Each edit is run under the race detector, then traced: what the trace does is not what was proven,
and its events fail by themselves with the code that the same mistake has in `mutations`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from mkc.codegen_pallas.source import kernel_source
from mkc.schedule.verify.case import cases_of
from mkc.schedule.verify.compare import check_traced
from mkc.schedule.verify.compare import difference
from mkc.schedule.verify.compare import expected_events
from mkc.schedule.verify.trace import reference_names
from mkc.schedule.verify.trace import tracer_of
from mkc.targets import load_target
from tests.kernel.harness import TARGET
from tests.kernel.harness import golden_subject
from tests.kernel.harness import lower
from tests.kernel.test_checks_fail import NAME
from tests.kernel.test_checks_fail import faulty_run
from tests.kernel.test_checks_fail import with_one_receive_buffer
from tests.kernel.test_checks_fail import without_cache_drain
from tests.kernel.test_checks_fail import without_line
from tests.kernel.test_checks_fail import without_state_wait
from tests.kernel.test_checks_fail import without_tape_wait
from tests.schedule.verify.traced import trace


def without_state_drain(source: str) -> str:
    """The kernel ends before the last states are back in HBM."""
    return without_line(source, "support.stream_drain(m.state_recurrent)")


EDITS = [
    (without_tape_wait, 1, "V201"),
    (without_state_wait, 1, "V201"),
    (without_cache_drain, 1, "V101"),
    (without_state_drain, 1, "V101"),
    (with_one_receive_buffer, 2, "V602"),
]


@pytest.mark.parametrize(("edit", "ranks", "code"), EDITS)
def test_the_trace_of_a_wrong_kernel_fails(
    edit: Callable[[str], str], ranks: int, code: str
) -> None:
    lowered = lower(golden_subject(NAME), ranks=ranks, batch=1)
    source = kernel_source(lowered.program, lowered.steps, target=load_target(TARGET))
    module = ModuleType("edited_kernel")
    sys.modules[module.__name__] = module
    exec(compile(edit(source), "kernel.py", "exec"), module.__dict__)
    kernel, names = trace(module), reference_names(module.SPEC)
    case = cases_of(lowered.program)[0]
    events = [tracer_of(lowered.program, rank, case).run(kernel, names) for rank in range(ranks)]
    assert difference(expected_events(lowered.program, 0, case), events[0]) is not None
    assert code in {one.code for one in check_traced(lowered.program, events)}


@pytest.mark.long
@pytest.mark.parametrize(("edit", "ranks", "code"), EDITS)
def test_the_kernel_is_wrong_when_run(edit: Callable[[str], str], ranks: int, code: str) -> None:
    """NaN, a race, a copy that is left over, or a state that was not written."""
    run = faulty_run(ranks, edit)
    stale = any(np.isnan(state.astype(np.float32)[:, :, :1]).any() for state in run.after.values())
    assert np.isnan(run.logits).any() or run.races or run.printed or stale
