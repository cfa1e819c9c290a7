"""Kernels of whole speculative rounds, on one device, beside the loop that XLA evaluates.

One kernel of two sequences runs everything in the interpreter of Pallas itself. The short runs of
`test_speculative_ranks.py` use the TPU interpreter at its most hostile.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from mkc.runtime.kernel import KernelSession
from tests.codegen_pallas.support_run import Mode
from tests.goldens import CONTEXT
from tests.kernel.rounds_harness import Array
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

ROUNDS = 4
BATCH = 2
DRAFTS = 7
LENGTHS = (21, 40)  # of the prompts: rows cross a border of 16 rows in both


@cache
def kernel() -> KernelSession:
    return session_of(ranks=1, batch=BATCH, rounds=ROUNDS, mode=Mode.GENERIC)


def start() -> Start:
    return prompted(LENGTHS)


def truth(sequence: int) -> list[int]:
    """What plain greedy decoding emits."""
    return continuations(LENGTHS)[sequence].copy()


def play(begin: Start, launch: Launch) -> Outcome:
    """Runs both, compares everything."""
    found, expected = run_kernel(kernel(), begin, launch), run_reference(begin, launch)
    check(found, expected, begin, launch)
    return found


def test_the_drafter_s_own_drafts() -> None:
    found = play(start(), Launch.of(BATCH, ROUNDS))
    assert found.result.drafts.tolist() == [[0, 0], *[[DRAFTS, DRAFTS]] * (ROUNDS - 1)]


def test_a_launch_may_be_shorter() -> None:
    found = play(start(), Launch.of(BATCH, 1))
    assert found.result.counts.tolist() == [[1, 1]]


def test_drafts_of_an_oracle() -> None:
    """All drafts are accepted; a state is committed by all rows of a round."""
    begin = start()
    for sequence in range(BATCH):
        begin = with_drafts(begin, sequence, truth(sequence)[:DRAFTS])
    found = play(begin, Launch.of(BATCH, ROUNDS))
    assert found.result.counts[0].tolist() == [DRAFTS + 1] * BATCH


@pytest.mark.parametrize("wrong", range(DRAFTS))
def test_drafts_that_go_wrong(wrong: int) -> None:
    """Every number of accepted drafts, another one in the other sequence."""
    begin = start()
    places = (wrong, DRAFTS - 1 - wrong)
    for sequence, place in enumerate(places):
        drafts = truth(sequence)[:DRAFTS]
        drafts[place] ^= 1
        begin = with_drafts(begin, sequence, drafts)
    found = play(begin, Launch.of(BATCH, 3))
    assert found.result.counts[0].tolist() == [place + 1 for place in places]


def test_the_text_does_not_depend_on_drafts() -> None:
    """Emitted are the tokens that plain decoding emits."""
    begin = with_drafts(start(), 0, [5] * DRAFTS)
    begin = with_drafts(begin, 1, truth(1)[:3])
    found = play(begin, Launch.of(BATCH, ROUNDS)).result
    for sequence in range(BATCH):
        tokens = found.tokens[:, sequence]
        emitted = tokens[tokens >= 0].tolist()
        assert emitted == truth(sequence)[: len(emitted)]


def test_a_stop_id_in_the_middle_of_a_round() -> None:
    """The round is reported as it is, the sequence ends; the other one goes on."""
    begin = start()
    for sequence in range(BATCH):
        begin = with_drafts(begin, sequence, truth(sequence)[:DRAFTS])
    stop = truth(0)[3]
    launch = replace(Launch.of(BATCH, ROUNDS), stops=((stop,), ()))
    found = play(begin, launch).result
    assert found.counts[:, 0].tolist() == [DRAFTS + 1, 0, 0, 0]
    assert (found.carried["positions"][:8] == -1).all()
    assert found.carried["kept"][0] == DRAFTS + 1, "committed by a later launch, if any"


def test_a_budget_that_is_used_up() -> None:
    launch = replace(Launch.of(BATCH, ROUNDS), budgets=(2, 1))
    found = play(start(), launch).result
    assert (found.counts[0] == 1).all()
    assert (found.counts[1:, 1] == 0).all()
    assert len(found.tokens) < ROUNDS, "no round without a sequence"


def test_an_idle_sequence_keeps_every_bit() -> None:
    begin = start()
    positions = begin.carried["positions"].copy()
    positions[8:] = -1
    kept = np.array([0, 5], np.int32)
    idle = replace(begin, carried={**begin.carried, "positions": positions, "kept": kept})
    found = play(idle, Launch.of(BATCH, ROUNDS)).result
    assert (found.counts[:, 1] == 0).all()
    assert found.carried["kept"][1] == 5


def test_nobody_is_awake() -> None:
    begin = start()
    positions = np.full_like(begin.carried["positions"], -1)
    idle = replace(begin, carried={**begin.carried, "positions": positions})
    found = run_kernel(kernel(), idle, Launch.of(BATCH, ROUNDS))
    assert len(found.result.tokens) == 0
    assert found.printed == ""


def test_launches_follow_one_another() -> None:
    """The second one begins with the kernel's own states and drafts."""
    first = play(start(), Launch.of(BATCH, 2))
    found = play(first.start, Launch.of(BATCH, 2))
    assert (found.result.drafts > 0).all()


def test_the_end_of_the_context() -> None:
    """Blocks become shorter, then the sequence ends; nothing is written behind the context."""
    state = prompted((64, 59))
    while first_positions(state).max() < CONTEXT - 2 * DRAFTS:
        state = run_reference(state, Launch.of(BATCH, ROUNDS)).start
    shortened = 0
    while (first_positions(state) >= 0).any():
        found = play(state, Launch.of(BATCH, ROUNDS))
        there = first_positions(state) >= 0
        shortened += int((found.result.drafts[:, there] < DRAFTS).sum())
        state = found.start
    assert shortened > 1


def first_positions(begin: Start) -> Array:
    found: Array = begin.carried["positions"].reshape(BATCH, -1)[:, 0]
    return found
