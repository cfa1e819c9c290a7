"""Graphs that are legal and unusual: what the kernel looks up, widths that are no whole registers,
heads that meet in the LM head, launches whose ring holds the whole tape."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import mkc
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.schedule.program import ArgmaxPhase
from mkc.targets import load_target
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import TARGET
from tests.kernel.harness import Subject
from tests.kernel.harness import build
from tests.kernel.harness import check
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.harness import session_of
from tests.kernel.test_other_graphs import CONTEXT
from tests.kernel.test_other_graphs import subject_of

VOCAB, HIDDEN, NARROW = 512, 256, 320


def learned_positions(step: mkc.Step) -> mkc.Outputs:
    """Position vectors are looked up like tokens."""
    tokens = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
    positions = mkc.embed(step.positions, mkc.param("positions.weight", [CONTEXT, HIDDEN]))
    x = mkc.rms_norm(tokens + positions, mkc.param("norm.weight", [HIDDEN]), eps=1e-6)
    return mkc.next_token(x, mkc.param("head.weight", [VOCAB, HIDDEN]))


def odd_width(step: mkc.Step) -> mkc.Outputs:
    """A hidden size of two and a half registers."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, NARROW]))
    x = mkc.rms_norm(h, mkc.param("norm.weight", [NARROW]), eps=1e-6)
    return mkc.next_token(x, mkc.param("head.weight", [VOCAB, NARROW]))


def divided_hidden(step: mkc.Step) -> mkc.Outputs:
    """The LM head reads a divided value: its result is a sum that every rank has as a whole."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
    up = mkc.linear(h, mkc.param("up.weight", [HIDDEN, HIDDEN]))
    return mkc.next_token(mkc.silu(up), mkc.param("head.weight", [VOCAB, HIDDEN]))


DECODERS = {
    "positions": learned_positions,
    "odd_width": odd_width,
    "divided_hidden": divided_hidden,
}


def subject(name: str) -> Subject:
    return subject_of(DECODERS[name], name, VOCAB)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", sorted(DECODERS))
def test_agrees_with_the_reference(name: str, ranks: int) -> None:
    model = subject(name)
    session = session_of(model, ranks=ranks, batch=3, mode=Mode.LATE)
    check(run_kernel(session, reference_of(model), [0, 16, 33], 3), reference_of(model))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["odd_width", "divided_hidden"])
def test_rounds_of_a_model_that_fits_in_the_ring(name: str, ranks: int) -> None:
    """Every round reads the tape from its first row, and the only exchange follows itself."""
    model = subject(name)
    lowered = [
        Pipeline(shard=Shard(ranks=ranks), lower=Lower(rounds=rounds)).run(
            model.trace(2), load_target(TARGET)
        )
        for rounds in (1, 4)
    ]
    single, several = (build(model, one, Mode.LATE.parameters()) for one in lowered)
    tokens, positions = model.prompt[:2], np.asarray([0, 3], np.int32)
    expected = []
    fed = tokens
    for round in range(3):
        fed = single.step(fed, positions + round).next_token
        expected.append(fed)
    assert_array_equal(
        several.launch(tokens, positions, rounds=[3] * len(tokens)).tokens, np.stack(expected)
    )


def test_the_only_exchange_of_a_round_ends_with_a_meeting() -> None:
    model = subject("odd_width")
    for rounds, meets in ((1, False), (2, True)):
        pipeline = Pipeline(shard=Shard(ranks=2), lower=Lower(rounds=rounds))
        program = pipeline.run(model.trace(1), load_target(TARGET)).program
        (argmax,) = (one for one in program.phases() if isinstance(one, ArgmaxPhase))
        assert argmax.meets is meets
