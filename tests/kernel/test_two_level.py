"""All-reduces within groups of ranks, then between them: of two levels, and in two steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mkc
from mkc.schedule.program import AllReducePhase
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import check
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of
from tests.kernel.test_other_graphs import subject_of

VOCAB, WIDE = 512, 512


def decoder(hidden: int) -> Callable[[mkc.Step], mkc.Outputs]:
    """Two layers with two sums each, so that one sum never follows itself."""

    def build(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, hidden]))
        for layer in mkc.layers(2):
            for part in ("first", "second"):
                x = mkc.rms_norm(h, layer.param(f"{part}.norm.weight", [hidden]), eps=1e-6)
                up = mkc.linear(x, layer.param(f"{part}.up.weight", [WIDE, hidden]))
                down = layer.param(f"{part}.down.weight", [hidden, WIDE])
                h = h + mkc.linear(mkc.silu(up), down)
        x = mkc.rms_norm(h, mkc.param("norm.weight", [hidden]), eps=1e-6)
        return mkc.next_token(x, mkc.param("head.weight", [VOCAB, hidden]))

    return build


@pytest.mark.parametrize(
    ("ranks", "group", "batch"),
    [
        (4, 2, 3),
        (4, 2, 1),
        pytest.param(8, 4, 3, marks=pytest.mark.long),
        pytest.param(8, 2, 1, marks=pytest.mark.long),
    ],
)
def test_every_rank_gets_the_sum(ranks: int, group: int, batch: int) -> None:
    """Races would raise. With one row, messages are one row of f32."""
    subject = subject_of(decoder(512), "two_level", VOCAB)
    passes = f"collectives{{algorithm=two_level,group={group}}}"
    session = session_of(subject, ranks=ranks, batch=batch, mode=Mode.LATE, passes=passes)
    program = session.lowered.program
    exchanges = [one for one in program.phases() if isinstance(one, AllReducePhase)]
    assert {one.algorithm for one in exchanges} == {"two_level"}
    plans = [one for one in program.exchanges if one.kind == "two_level"]
    assert {(one.rows, one.group) for one in plans} == {(1 if batch == 1 else 8, group)}
    check(run_kernel(session, reference_of(subject), [0] * batch, 2), reference_of(subject))


def test_shares_that_end_behind_the_last_column() -> None:
    """448 columns are two shares of 256 in a group of two, 64 of them padding."""
    subject = subject_of(decoder(448), "padded_two_level", VOCAB)
    passes = "collectives{algorithm=two_level,group=2}"
    session = session_of(subject, ranks=4, batch=3, mode=Mode.LATE, passes=passes)
    columns = {one.columns for one in session.lowered.program.exchanges if one.group}
    assert columns == {512}
    check(run_kernel(session, reference_of(subject), [0] * 3, 2), reference_of(subject))


@pytest.mark.parametrize(
    ("hidden", "wire", "ranks", "group"),
    [
        (512, "f32", 4, 2),
        (640, "bf16", 4, 2),
        pytest.param(640, "f32", 8, 4, marks=pytest.mark.long),
        pytest.param(512, "bf16", 8, 2, marks=pytest.mark.long),
    ],
)
def test_one_row_travels_whole(hidden: int, wire: str, ranks: int, group: int) -> None:
    """In tiles of 8 rows of f32 or 16 of bf16, which 640 columns do not fill."""
    subject = subject_of(decoder(hidden), f"two_step_{hidden}", VOCAB)
    passes = f"collectives{{algorithm=two_step,group={group},wire={wire}}}"
    session = session_of(subject, ranks=ranks, batch=1, mode=Mode.LATE, passes=passes)
    program = session.lowered.program
    sums = [one for one in program.phases() if isinstance(one, AllReducePhase)]
    assert {one.algorithm for one in sums} == {"two_step"}
    assert {str(one.wire) for one in program.exchanges if one.kind == "two_step"} == {wire}
    check(run_kernel(session, reference_of(subject), [0], 2), reference_of(subject))


def test_partial_sums_of_bf16() -> None:
    """Of several rows they travel within two levels; a group's sum is rounded once more."""
    subject = subject_of(decoder(512), "two_level_bf16", VOCAB)
    passes = "collectives{algorithm=two_level,group=2,wire=bf16}"
    session = session_of(subject, ranks=4, batch=3, mode=Mode.LATE, passes=passes)
    plans = [one for one in session.lowered.program.exchanges if one.kind == "two_level"]
    assert {str(one.wire) for one in plans} == {"bf16"}
    check(run_kernel(session, reference_of(subject), [0] * 3, 2), reference_of(subject))
