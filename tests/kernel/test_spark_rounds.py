"""Kernels of rounds with a drafter that walks: Kimi K3 models and their DSpark drafters.

Rounds begin without a text, with drafts of the test's own, beside the same rounds evaluated by XLA.
On several devices copies land late, memory is NaN until it is written, races raise.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from mkc.runtime.finish_round import GREEDY
from mkc.runtime.finish_round import SequenceSampling
from mkc.runtime.kernel import KernelSession
from tests.codegen_pallas.support_run import Mode
from tests.kernel.spark_harness import RIGHT
from tests.kernel.spark_harness import Case
from tests.kernel.spark_harness import play
from tests.kernel.spark_harness import session_of
from tests.kernel.test_speculative_ranks import check_ranks

# Logits of the small model are far apart; so hot some drafts are accepted and some are not.
HOT = SequenceSampling(temperature=4.0, top_k=40, top_p=0.95, min_p=0.02, seed=(0, 1))
CUT = Case(batch=2, drafts=2, cut=0.5, sampling=True)
SEEDS = 6


@cache
def cutting() -> KernelSession:
    """A kernel that draws tokens and cuts blocks of drafts."""
    return session_of(CUT, 1, 2, Mode.GENERIC)


def test_greedy_rounds_with_a_cut() -> None:
    """Two rounds in a launch; blocks end in front of the first draft and behind it."""
    played = play(CUT, cutting(), (2, 2, 1), (GREEDY, GREEDY))
    assert played.counts[0][0] == [2, 2], "the first round accepts one draft of each sequence"
    assert {0, 1} <= {one for of_launch in played.drafts for one in of_launch}


def test_sampled_rounds_with_a_cut() -> None:
    """A sequence that samples beside a greedy one: blocks of every length, each partly accepted."""
    counts: set[int] = set()
    drafts: set[int] = set()
    for seed in range(SEEDS):
        played = play(CUT, cutting(), (1,) * 4, (replace(HOT, seed=(seed, 1)), GREEDY))
        counts |= {of_round[0] for of_launch in played.counts for of_round in of_launch}
        drafts |= {one[0] for one in played.drafts}
    assert counts == {1, 2, 3}
    assert drafts == {0, 1, 2}


@pytest.mark.long
def test_the_golden_models_sample() -> None:
    """Seven drafts, nine layers. Hotter rounds have single rows: see `test_hot_rows`."""
    case = Case(models="golden", drafts=7, cut=0.45, sampling=True)
    session = session_of(case, 1, 2, Mode.GENERIC)
    drafts: set[int] = set()
    for seed in range(4):
        warm = replace(HOT, temperature=1.0, seed=(seed, 1))
        played = play(case, session, (1,) * 3, (warm,))
        drafts |= {one[0] for one in played.drafts}
    assert {0, 4, 7} <= drafts


@pytest.mark.long
def test_the_golden_models_are_greedy() -> None:
    case = Case(models="golden", drafts=7)
    played = play(case, session_of(case, 1, 2, Mode.GENERIC), (2,))
    assert played.counts[0][0] == [RIGHT[0] + 1]


@pytest.mark.long
def test_two_devices_two_sequences() -> None:
    case = Case(models="golden", batch=2)
    play(case, session_of(case, 2, 2, Mode.LATE), (2,))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [4, 8])
def test_several_devices(ranks: int) -> None:
    """MXFP4 experts, greedy and sampled, with a cut: ranks agree, bit for bit."""
    case = Case(mxfp4=True, drafts=2, cut=0.5, sampling=True)
    session = session_of(case, ranks, 2, Mode.LATE)
    play(case, session, (2,), (GREEDY,))
    play(case, session, (1, 1), (replace(HOT, top_k=16),))
    check_ranks(session)
