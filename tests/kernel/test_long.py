"""The whole matrix: both goldens, every batch, every number of devices, 64 greedy tokens.

Hours of interpretation, so it is left out unless asked for: `./dev test-long`.
"""

from __future__ import annotations

import pytest

from tests.codegen_pallas.support_run import Mode
from tests.goldens import CASES
from tests.kernel.harness import PROMPT
from tests.kernel.harness import STEPS
from tests.kernel.harness import check
from tests.kernel.harness import golden_subject
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_greedy_tokens(name: str, batch: int, ranks: int) -> None:
    """From the last given token on, through the borders at 48, 64, 80 and 96."""
    subject = golden_subject(name)
    reference = reference_of(subject)
    session = session_of(
        subject, ranks=ranks, batch=batch, mode=Mode.LATE, passes="residency{cache_tile=16}"
    )
    start = PROMPT - 1
    run = run_kernel(session, reference, [start] * batch, STEPS - start)
    check(run, reference)
    expected, limit = subject.golden.expected, reference.logits_abs
    clear = expected["decode.margin"] > limit
    assert (run.tokens[:, 0] == expected["decode.tokens"])[clear].all()
