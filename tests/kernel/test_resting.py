"""Rows that rest: a negative position changes no state of its row, and nothing of other rows.

All is compared bit for bit. Several rounds in one launch, in which rows come to rest, are in
`test_rounds`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from numpy.testing import assert_array_equal

from mkc.schedule.program import RESTING
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import Array
from tests.kernel.harness import RecordingSession
from tests.kernel.harness import Subject
from tests.kernel.harness import build
from tests.kernel.harness import golden_subject
from tests.kernel.harness import initial
from tests.kernel.harness import lower
from tests.kernel.harness import reference_of

STARTS = (47, 16, 31)


def one_step(
    session: RecordingSession, subject: Subject, positions: Sequence[int]
) -> tuple[Array, dict[str, Array], dict[str, Array]]:
    """Logits, and states before and after a step; sequence s is where STARTS says."""
    reference = reference_of(subject)
    before = initial(session, reference, STARTS)
    for key, state in before.items():
        session.set_state(key, state)
    before = {key: session.state(key) for key in before}
    fed = reference.tokens[np.array(STARTS), np.arange(len(STARTS))]
    logits = session.step(fed, np.array(positions)).logits
    detector = interpret_pallas_call.races
    assert detector is None or not detector.races_found
    assert logits is not None
    return logits, before, {key: session.state(key) for key in before}


def bits(state: Array) -> Array:
    """Numbers that compare equal when every bit does, NaN included."""
    return state.view(np.uint16 if state.dtype.itemsize == 2 else np.uint32)


def check_rest(session: RecordingSession, subject: Subject, resting: Sequence[int]) -> None:
    everybody, _, moved = one_step(session, subject, STARTS)
    places = [RESTING if one in resting else start for one, start in enumerate(STARTS)]
    logits, before, after = one_step(session, subject, places)
    for sequence in range(len(STARTS)):
        expected = before if sequence in resting else moved
        for key, state in after.items():
            assert_array_equal(bits(state)[:, sequence], bits(expected[key])[:, sequence], key)
        if sequence not in resting:
            assert_array_equal(logits[sequence], everybody[sequence])


@pytest.mark.parametrize(
    ("name", "ranks", "mode", "resting"),
    [
        pytest.param("qwen38_mini", 1, Mode.GENERIC, (0, 2), id="mini-1-rank"),
        pytest.param("qwen38_lane", 2, Mode.LATE, (0, 1), id="lane-2-ranks-races"),
    ],
)
def test_rows_that_rest_change_nothing(
    name: str, ranks: int, mode: Mode, resting: Sequence[int]
) -> None:
    subject = golden_subject(name)
    lowered = lower(subject, ranks=ranks, batch=3, passes="residency{cache_tile=16}")
    check_rest(build(subject, lowered, mode.parameters()), subject, resting)


def test_all_rows_may_rest() -> None:
    """Nothing is left under way either: the interpreter would wait for a copy that never began."""
    subject = golden_subject("qwen38_lane")
    lowered = lower(subject, ranks=1, batch=3)
    check_rest(build(subject, lowered, Mode.LATE.parameters()), subject, (0, 1, 2))


@pytest.mark.parametrize("blind", ["delta_rule", "causal_conv"])
def test_without_its_guard_a_state_changes(blind: str) -> None:
    """The check can fail: it does when one support function is told that nobody rests."""
    subject = golden_subject("qwen38_lane")
    edits = {
        "delta_rule": (
            "c.state_recurrent,\n        m.positions,",
            "c.state_recurrent, jnp.zeros(BATCH, jnp.int32),",
        ),
        "causal_conv": (
            "positions=support.positions_column(m.positions, BATCH, ROWS)",
            "positions=jnp.zeros((ROWS, 1))",
        ),
    }

    def edit(source: str) -> str:
        assert source.count(edits[blind][0]) == 1, "the source of the kernel has changed"
        return source.replace(*edits[blind])

    lowered = lower(subject, ranks=1, batch=3)
    with pytest.raises(AssertionError, match="state|recurrent|conv"):
        check_rest(build(subject, lowered, Mode.GENERIC.parameters(), edit), subject, (1,))
