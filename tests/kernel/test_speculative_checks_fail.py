"""The comparison of rounds, seen to fail: kernels with one deliberate fault each."""

from __future__ import annotations

import pytest

from tests.codegen_pallas.support_run import Mode
from tests.kernel.rounds_harness import Launch
from tests.kernel.rounds_harness import check
from tests.kernel.rounds_harness import continuations
from tests.kernel.rounds_harness import prompted
from tests.kernel.rounds_harness import run_kernel
from tests.kernel.rounds_harness import run_reference
from tests.kernel.rounds_harness import session_of
from tests.kernel.rounds_harness import with_drafts

LENGTHS = (28,)
ACCEPTED = 3
ROUNDS = 2

# `m.rounds` holds 2, another number of rows than the 4 that the first round accepts.
FAULTS = {
    "the convolution commits another number of rows": ("kept=m.s_kept,", "kept=m.rounds,"),
    "the drafter looks at another layer": ("(3, 0, 3, 1, 3, 2)", "(3, 0, 3, 1, 2, 3)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    """The first round accepts some drafts; what is wrong about it shows behind the second."""
    right, wrong = FAULTS[fault]

    def edit(source: str) -> str:
        assert source.count(right) == 1, f"{fault}: {source.count(right)} places"
        return source.replace(right, wrong)

    drafts = continuations(LENGTHS)[0][:7]
    drafts[ACCEPTED] ^= 1
    begin = with_drafts(prompted(LENGTHS), 0, drafts)
    session = session_of(ranks=1, batch=1, rounds=ROUNDS, mode=Mode.GENERIC, edit=edit)
    launch = Launch.of(1, ROUNDS)
    found, expected = run_kernel(session, begin, launch), run_reference(begin, launch)
    assert found.result.counts[0].tolist() == [ACCEPTED + 1], "verified before the fault shows"
    with pytest.raises(AssertionError):
        check(found, expected, begin, launch)
