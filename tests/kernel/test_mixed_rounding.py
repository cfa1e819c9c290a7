"""One matmul whose left columns are rounded to bf16 while the others keep their f32 sums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mkc
from mkc.schedule.program import MatmulPhase
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import expected_of
from tests.kernel.harness import reference_of
from tests.kernel.harness import rms
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of
from tests.kernel.test_other_graphs import subject_of

VOCAB, HIDDEN = 512, 256
ROUNDINGS = 2**-7  # four of bf16, 2^-9 each, lie between the f32 sums and the logits
MAGNIFIED = 256.0  # what rounding to bf16 takes away becomes as large as what it leaves


def decoder(wide: int, exact: int) -> Callable[[mkc.Step], mkc.Outputs]:
    """A layer that lives on what rounding its exact projection would take away."""

    def build(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
        kept = mkc.linear(h, mkc.param("kept.weight", [exact, HIDDEN]), dtype="f32")
        up = mkc.linear(h, mkc.param("up.weight", [wide, HIDDEN]))
        lost = mkc.subtract(kept, mkc.cast(mkc.cast(kept, "bf16"), "f32"))
        lost = mkc.cast(mkc.scale(lost, MAGNIFIED), "bf16")
        h = h + mkc.linear(mkc.silu(up), mkc.param("down.weight", [HIDDEN, wide]))
        h = h + mkc.linear(lost, mkc.param("lost.weight", [HIDDEN, exact]))
        x = mkc.rms_norm(h, mkc.param("norm.weight", [HIDDEN]), eps=1e-6)
        return mkc.next_token(x, mkc.param("head.weight", [VOCAB, HIDDEN]))

    return build


@pytest.mark.parametrize(("wide", "exact"), [(192, 64), (448, 320), (256, 256)])
@pytest.mark.parametrize("load_bytes", ["32KiB", "512KiB"])
def test_exact_columns_keep_their_sums(wide: int, exact: int, load_bytes: str) -> None:
    """The border lies within a block of columns or between two; loads bring a part or several."""
    subject = subject_of(decoder(wide, exact), f"mixed_{wide}_{exact}", VOCAB)
    passes = f"tile{{load_bytes={load_bytes}}}"
    session = session_of(subject, ranks=1, batch=2, mode=Mode.GENERIC, passes=passes)
    mixed = [
        one
        for one in session.lowered.program.phases()
        if isinstance(one, MatmulPhase) and 0 < one.rounded_columns < one.columns
    ]
    assert [(one.rounded_columns, one.columns) for one in mixed] == [(wide, wide + exact)]
    run = run_kernel(session, reference_of(subject), [0, 0], 2)
    expected = expected_of(run, reference_of(subject).logits)
    assert rms(run.logits, expected) < ROUNDINGS * rms(expected, np.zeros_like(expected))
