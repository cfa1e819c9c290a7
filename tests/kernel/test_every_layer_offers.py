"""Kernels whose layers store a block now and then, all with one body, beside the reference."""

from __future__ import annotations

import pytest

from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import check
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of
from tests.kernel.test_other_graphs import subject_of
from tests.schedule.verify.test_stored_blocks import VOCAB
from tests.schedule.verify.test_stored_blocks import decoder


@pytest.mark.parametrize(("ranks", "batch", "mode"), [(1, 2, Mode.EAGER), (4, 1, Mode.LATE)])
def test_the_kernel_agrees_with_the_reference(ranks: int, batch: int, mode: Mode) -> None:
    """Two steps: the count of stores begins anew with each."""
    subject = subject_of(decoder, "stored", VOCAB)
    session = session_of(subject, ranks=ranks, batch=batch, mode=mode)
    check(run_kernel(session, reference_of(subject), [0] * batch, 2), reference_of(subject))
