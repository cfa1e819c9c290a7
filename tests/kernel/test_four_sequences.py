"""Four sequences in a kernel of rounds: each accepts for itself, at borders of tiles, and ends for
itself.

States are those of the reference rounds, which `tests.spec.test_verify_commit` compares with
decoding one by one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from mkc.runtime.kernel import KernelSession
from tests.codegen_pallas.support_run import Mode
from tests.kernel.rounds_harness import ROWS
from tests.kernel.rounds_harness import Launch
from tests.kernel.rounds_harness import Outcome
from tests.kernel.rounds_harness import Start
from tests.kernel.rounds_harness import check
from tests.kernel.rounds_harness import continuations
from tests.kernel.rounds_harness import prompted
from tests.kernel.rounds_harness import run_kernel
from tests.kernel.rounds_harness import run_reference
from tests.kernel.rounds_harness import session_of
from tests.kernel.rounds_harness import with_drafts

BATCH, ROUNDS = 4, 2
TILE = 16  # of the caches
LENGTHS = (24, 30, 31, 32)  # of the prompts: the rows end with a tile, cross its border, begin one


@cache
def kernel() -> KernelSession:
    passes = f"residency{{cache_tile={TILE}}}"
    return session_of(ranks=1, batch=BATCH, rounds=ROUNDS, mode=Mode.GENERIC, passes=passes)


def accepting(counts: tuple[int, ...]) -> Start:
    """Behind the prompts, with drafts of which so many are right."""
    start = prompted(LENGTHS)
    for sequence, count in enumerate(counts):
        drafts = continuations(LENGTHS)[sequence][: ROWS - 1]
        if count < len(drafts):
            drafts[count] ^= 1
        start = with_drafts(start, sequence, drafts)
    return start


def play(start: Start, launch: Launch) -> Outcome:
    found = run_kernel(kernel(), start, launch)
    check(found, run_reference(start, launch), start, launch)
    return found


@pytest.mark.parametrize("counts", [(7, 0, 1, 2), (3, 4, 5, 6), (0, 7, 3, 1), (2, 1, 7, 0)])
def test_each_accepts_for_itself(counts: tuple[int, ...]) -> None:
    """All counts, at places before, at and behind the border of a tile; and a round behind that,
    which commits them."""
    found = play(accepting(counts), Launch.of(BATCH, ROUNDS))
    assert found.result.counts[0].tolist() == [one + 1 for one in counts]
    assert (found.result.counts[1] > 0).all()


def test_one_that_stopped_costs_nothing_wrong() -> None:
    """Its stop id is in the middle of the first round; the others go on as they would alone."""
    start = accepting((5, 7, 2, 4))
    stop = continuations(LENGTHS)[1][3]
    launch = replace(Launch.of(BATCH, ROUNDS), stops=((), (stop,), (), ()))
    outcome = play(start, launch)
    found = outcome.result
    assert found.counts[0].tolist() == [6, 8, 3, 5]
    assert found.counts[1].tolist()[1] == 0
    without = play(start, Launch.of(BATCH, ROUNDS)).result
    others = [0, 2, 3]
    np.testing.assert_array_equal(found.tokens[:, others], without.tokens[:, others])
    again = play(outcome.start, Launch.of(BATCH, 1))
    assert again.result.counts[0].tolist()[1] == 0, "it rests in the next launch, too"
