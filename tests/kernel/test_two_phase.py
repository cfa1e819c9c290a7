"""The two-phase all-reduce as the full-size kernel has it: eight ranks, eight rows, lane tiles."""

from __future__ import annotations

import pytest

import mkc
from mkc.schedule.program import AllReducePhase
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import check
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of
from tests.kernel.test_other_graphs import subject_of

VOCAB, HIDDEN, WIDE, RANKS = 1024, 1024, 1024, 8


def decoder(step: mkc.Step) -> mkc.Outputs:
    """Two layers of MLP; hidden / ranks is one lane tile."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
    for layer in mkc.layers(2):
        x = mkc.rms_norm(h, layer.param("norm.weight", [HIDDEN]), eps=1e-6)
        up = mkc.linear(x, layer.param("up.weight", [WIDE, HIDDEN]))
        h = h + mkc.linear(mkc.silu(up), layer.param("down.weight", [HIDDEN, WIDE]))
    x = mkc.rms_norm(h, mkc.param("norm.weight", [HIDDEN]), eps=1e-6)
    return mkc.next_token(x, mkc.param("head.weight", [VOCAB, HIDDEN]))


def test_eight_ranks_eight_rows() -> None:
    """Races would raise; all ranks hold the same bits."""
    subject = subject_of(decoder, "two_phase", VOCAB)
    session = session_of(subject, ranks=RANKS, batch=8, mode=Mode.LATE)
    exchanges = [one for one in session.lowered.program.phases() if isinstance(one, AllReducePhase)]
    assert {one.algorithm for one in exchanges} == {"two_phase"}
    check(run_kernel(session, reference_of(subject), [0] * 8, 2), reference_of(subject))


PADDED, FOUR = 448, 4  # 512 columns in four shares of whole registers, 64 of them padding


def padded_decoder(step: mkc.Step) -> mkc.Outputs:
    """Hidden / ranks is less than a lane tile, and the last rank sums half a tile of padding."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, PADDED]))
    for layer in mkc.layers(2):
        x = mkc.rms_norm(h, layer.param("norm.weight", [PADDED]), eps=1e-6)
        up = mkc.linear(x, layer.param("up.weight", [WIDE, PADDED]))
        h = h + mkc.linear(mkc.silu(up), layer.param("down.weight", [PADDED, WIDE]))
    x = mkc.rms_norm(h, mkc.param("norm.weight", [PADDED]), eps=1e-6)
    return mkc.next_token(x, mkc.param("head.weight", [VOCAB, PADDED]))


@pytest.mark.parametrize("wire", ["f32", "bf16"])
def test_shares_that_end_behind_the_last_column(wire: str) -> None:
    subject = subject_of(padded_decoder, "padded_two_phase", VOCAB)
    passes = f"collectives{{wire={wire}}}"
    session = session_of(subject, ranks=FOUR, batch=3, mode=Mode.LATE, passes=passes)
    program = session.lowered.program
    exchanges = [one for one in program.phases() if isinstance(one, AllReducePhase)]
    assert {one.algorithm for one in exchanges} == {"two_phase"}
    plans = [one for one in program.exchanges if one.kind == "two_phase"]
    assert {(one.columns, str(one.wire)) for one in plans} == {(512, wire)}
    check(run_kernel(session, reference_of(subject), [0] * 3, 2), reference_of(subject))
