"""Kernels of speculative rounds on several devices, in the TPU interpreter at its most hostile:
copies land when they are waited for, memory is NaN until it is written, races raise.

The interpreter takes seconds per round here, so a launch has two: the first verifies drafts of the
test's own and accepts some, the second commits them and verifies those of the drafter.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mkc.runtime.kernel import KernelSession
from mkc.runtime.token_masks import pack_mask
from mkc.schedule.round_phases import AllGatherPhase
from tests.codegen_pallas.support_run import Mode
from tests.kernel.rounds_harness import ROWS
from tests.kernel.rounds_harness import Launch
from tests.kernel.rounds_harness import Outcome
from tests.kernel.rounds_harness import check
from tests.kernel.rounds_harness import continuations
from tests.kernel.rounds_harness import prompted
from tests.kernel.rounds_harness import run_kernel
from tests.kernel.rounds_harness import run_reference
from tests.kernel.rounds_harness import session_of
from tests.kernel.rounds_harness import with_drafts
from tests.passes.gathered import gather_everything

LENGTHS = (28, 12)  # the first round crosses a border of 16 rows, the second one a tile's
ACCEPTED = (3, 6)
ROUNDS, VOCAB = 2, 1024
TILE = "residency{cache_tile=16}"


def check_late(
    ranks: int, batch: int, passes: str = TILE, masked: int | None = None
) -> tuple[KernelSession, Outcome]:
    """Builds a kernel, runs two rounds and checks everything.

    Args:
      masked: a sequence whose drafts are all right, and one of them is not allowed.
    """
    lengths = LENGTHS[:batch]
    begin = prompted(lengths)
    masks: list[np.ndarray | None] = [None] * (batch * ROWS)
    for sequence in range(batch):
        drafts = continuations(lengths)[sequence][: ROWS - 1]
        wrong = ACCEPTED[sequence]
        if sequence == masked:
            masks[sequence * ROWS + wrong] = pack_mask(np.arange(VOCAB) != drafts[wrong])
        else:
            drafts[wrong] ^= 1
        begin = with_drafts(begin, sequence, drafts)
    session = session_of(ranks=ranks, batch=batch, rounds=ROUNDS, mode=Mode.LATE, passes=passes)
    launch = replace(Launch.of(batch, ROUNDS), masks=tuple(masks))
    found = run_kernel(session, begin, launch)
    check(found, run_reference(begin, launch), begin, launch)
    assert found.result.counts[0].tolist() == [one + 1 for one in ACCEPTED[:batch]]
    check_ranks(session)
    return session, found


def check_ranks(session: KernelSession) -> None:
    """Ranks that hold copies of a state hold the same bits."""
    for key, sharding in session.lowered.steps.sharded.states.items():
        if key not in session.layout.streams.state_of | session.layout.streams.cache_of:
            continue
        copies = session.program.ranks if sharding.axis is None else sharding.copies
        parts = session.rank_parts(session.layout.operand_of(key))
        for first in range(0, session.program.ranks, copies):
            for other in range(first + 1, first + copies):
                same = parts[first].tobytes() == parts[other].tobytes()
                assert same, f"{key}: ranks {first} and {other} differ"


@pytest.mark.parametrize("batch", [1, 2])
def test_one_device(batch: int) -> None:
    check_late(1, batch)


def test_two_devices() -> None:
    """Two sequences, one with masks; a single one is run by `test_gathered_projections`."""
    check_late(2, 2, masked=1)


def test_eight_devices() -> None:
    """More ranks than heads of the drafter's cache: several ranks hold the same one."""
    session, _ = check_late(8, 1)
    shardings = session.lowered.steps.sharded.states
    assert any("draft" in key and one.copies > 1 for key, one in shardings.items())


def test_gathered_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided and gathered the same bits come out as from the whole weights."""
    _, whole = check_late(2, 1)
    gather_everything(monkeypatch)
    session, gathered = check_late(2, 1)
    assert any(isinstance(one, AllGatherPhase) for one in session.program.phases())
    for key, state in whole.states.items():
        assert np.array_equal(state, gathered.states[key], equal_nan=True), key
    assert np.array_equal(whole.result.carried["tokens"], gathered.result.carried["tokens"])
