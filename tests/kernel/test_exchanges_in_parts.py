"""Kernels whose exchanges have two parts, with matmuls between, against the same with whole ones.

Copies land late, memory is NaN until it is written, races raise.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import MatmulPhase
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import KernelRun
from tests.kernel.harness import Subject
from tests.kernel.harness import check
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of
from tests.kernel.test_other_graphs import subject_of
from tests.passes.overlapped import GATHERS
from tests.passes.overlapped import VOCAB
from tests.passes.overlapped import WHOLE
from tests.passes.overlapped import between
from tests.passes.overlapped import decoder
from tests.passes.overlapped import starts

STEPS = 2


@cache
def subject() -> Subject:
    return subject_of(decoder, "exchange_parts", VOCAB)


def run(passes: str, *, ranks: int, batch: int) -> KernelRun:
    """Two steps from the beginning of a text."""
    session = session_of(
        subject(), ranks=ranks, batch=batch, mode=Mode.LATE, passes=f"{GATHERS},{passes}"
    )
    return run_kernel(session, reference_of(subject()), [0] * batch, STEPS)


@pytest.mark.parametrize(
    ("ranks", "batch", "sums"),
    [
        (2, 1, "one_shot"),
        (4, 1, "two_step,group=2"),
        (4, 3, "two_phase"),
        (4, 3, "two_level,group=2,wire=bf16"),
        pytest.param(4, 3, "two_phase,wire=bf16", marks=pytest.mark.long),
        pytest.param(4, 3, "one_shot", marks=pytest.mark.long),
        pytest.param(8, 1, "two_level,group=4", marks=pytest.mark.long),
    ],
)
def test_logits_are_the_same_bit_for_bit(ranks: int, batch: int, sums: str) -> None:
    """A gather and a sum of every layer are in two parts."""
    passes = f"collectives{{algorithm={sums}}}"
    split = run(passes, ranks=ranks, batch=batch)
    program = split.session.program
    gather, total = starts(program)
    assert isinstance(total, AllReducePhase)
    assert total.algorithm == sums.split(",")[0]
    for start in (gather, total):
        assert any(isinstance(one, MatmulPhase) for one in between(program, start))
    check(split, reference_of(subject()))
    whole = run(f"{WHOLE},{passes}", ranks=ranks, batch=batch)
    assert starts(whole.session.program) == []
    np.testing.assert_array_equal(split.logits, whole.logits)
