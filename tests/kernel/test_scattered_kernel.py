"""Sums of which a rank wants its own columns alone, in kernels that are run."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mkc
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Lowered
from mkc.passes.pipeline import Pipeline
from mkc.schedule.program import AllReducePhase
from mkc.schedule.verify import prove
from mkc.schedule.verify.case import launches_of
from mkc.targets import load_target
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import TARGET
from tests.kernel.harness import build
from tests.kernel.harness import check
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.test_other_graphs import subject_of
from tests.schedule.verify.test_protocol import compare

VOCAB, HIDDEN, WIDE, INNER = 512, 256, 512, 384
RANKS, GROUP = 4, 2


def decoder(step: mkc.Step) -> mkc.Outputs:
    """Two branches: one ends in a projection of a normed sum, the other in the sum itself."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
    for layer in mkc.layers(2):
        x = mkc.rms_norm(h, layer.param("norm.weight", [HIDDEN]), eps=1e-6)
        first = mkc.linear(x, layer.param("first.weight", [WIDE, HIDDEN]))
        inner = mkc.linear(mkc.silu(first), layer.param("inner.weight", [INNER, WIDE]))
        inner = mkc.rms_norm(inner, layer.param("inner_norm.weight", [INNER]), eps=1e-6)
        outer = mkc.linear(inner, layer.param("outer.weight", [HIDDEN, INNER]))
        second = mkc.linear(x, layer.param("second.weight", [WIDE, HIDDEN]))
        shared = mkc.linear(mkc.silu(second), layer.param("shared.weight", [HIDDEN, WIDE]))
        h = h + (outer + shared)
    x = mkc.rms_norm(h, mkc.param("norm.weight", [HIDDEN]), eps=1e-6)
    return mkc.next_token(x, mkc.param("head.weight", [VOCAB, HIDDEN]))


def lower(batch: int, passes: str = "") -> Lowered:
    """On two hosts of two devices, whose messages to many are so dear that hosts gather."""
    target = load_target(TARGET)
    target = replace(
        target,
        hbm=replace(target.hbm, sustained_bytes_per_us=1000),
        exchange=replace(target.exchange, messages=0, latency_us=0.0),
        links=replace(target.links, devices_per_host=GROUP, issue_us=100.0),
    )
    graph = mkc.trace(decoder, name="scattered", batch=batch, context=64)
    pipeline = Pipeline(shard=Shard(ranks=RANKS), lower=Lower(logits=True))
    return pipeline.override(passes).run(graph, target)


@pytest.mark.parametrize(
    ("batch", "algorithm", "wire"),
    [
        (1, "two_step", "f32"),
        (1, "two_step", "bf16"),
        (3, "one_shot", "f32"),
        (3, "two_level", "bf16"),
    ],
)
def test_the_kernel_agrees_with_the_reference(batch: int, algorithm: str, wire: str) -> None:
    """It does what is proved, without races, and has the states and logits of the reference."""
    subject = subject_of(decoder, "scattered", VOCAB)
    asked = f"shard{{gather_all=True}},collectives{{algorithm={algorithm},wire={wire}}}"
    lowered = lower(batch, asked)
    program = lowered.program
    (total,) = [one for one in program.phases() if isinstance(one, AllReducePhase)]
    assert (total.algorithm, total.scattered, total.group) == (algorithm, HIDDEN, GROUP)
    assert (total.partial.width, total.output.width) == (INNER + HIDDEN, INNER + HIDDEN // GROUP)
    assert prove([program] * RANKS, load_target(TARGET)).issues == ()
    compare(lowered, [0, RANKS - 1], launches_of(program))
    session = build(subject, lowered, Mode.LATE.parameters())
    check(run_kernel(session, reference_of(subject), [0] * batch, 2), reference_of(subject))
