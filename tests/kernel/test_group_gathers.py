"""Weights that are divided within groups of ranks, whose columns a group gathers."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mkc
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Lowered
from mkc.passes.pipeline import Pipeline
from mkc.passes.sharding import Sharding
from mkc.schedule.program import AllReducePhase
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.verify import prove
from mkc.targets import Target
from mkc.targets import load_target
from tests.codegen_pallas.support_run import Mode
from tests.kernel.harness import TARGET
from tests.kernel.harness import build
from tests.kernel.harness import check
from tests.kernel.harness import reference_of
from tests.kernel.harness import run_kernel
from tests.kernel.test_other_graphs import subject_of

VOCAB, HIDDEN, WIDE, INNER = 512, 256, 512, 512
RANKS, GROUP = 4, 2


def decoder(step: mkc.Step) -> mkc.Outputs:
    """A layer's MLP is summed; what is normed in between is needed by every rank as a whole."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
    for layer in mkc.layers(2):
        x = mkc.rms_norm(h, layer.param("norm.weight", [HIDDEN]), eps=1e-6)
        inner = mkc.linear(x, layer.param("inner.weight", [INNER, HIDDEN]))
        inner = mkc.rms_norm(inner, layer.param("inner_norm.weight", [INNER]), eps=1e-6)
        h = h + mkc.linear(inner, layer.param("outer.weight", [HIDDEN, INNER]))
        up = mkc.linear(h, layer.param("up.weight", [WIDE, HIDDEN]))
        h = h + mkc.linear(mkc.silu(up), layer.param("down.weight", [HIDDEN, WIDE]))
    x = mkc.rms_norm(h, mkc.param("norm.weight", [HIDDEN]), eps=1e-6)
    return mkc.next_token(x, mkc.param("head.weight", [VOCAB, HIDDEN]))


def slow_messages() -> Target:
    """Two devices to a host; memory so slow, and messages so dear, that groups pay."""
    target = load_target(TARGET)
    return replace(
        target,
        hbm=replace(target.hbm, sustained_bytes_per_us=1000),
        exchange=replace(target.exchange, messages=0, latency_us=0.0),
        links=replace(target.links, devices_per_host=GROUP, issue_us=100.0),
    )


def lower(batch: int) -> Lowered:
    graph = mkc.trace(decoder, name="groups", batch=batch, context=64)
    return Pipeline(shard=Shard(ranks=RANKS), lower=Lower(logits=True)).run(graph, slow_messages())


def test_every_group_holds_the_whole_weight() -> None:
    sharded = lower(1).steps.sharded
    (name,) = sharded.gathered
    assert name.endswith("inner.weight") and sharded.gathered[name] == GROUP
    sharding = sharded.params[name]
    assert sharding == Sharding(axis=0, shards=GROUP, copies=2, cyclic=True)
    assert [sharding.shard_of(rank) for rank in range(RANKS)] == [0, 1, 0, 1]


def test_sums_do_not_take_a_gather_within_groups_for_a_meeting() -> None:
    """Ranks of other groups may be behind by a whole exchange; so sums use two sets of buffers."""
    program = lower(3).program
    gathers = {one.exchange for one in program.phases() if isinstance(one, AllGatherPhase)}
    plans = {one.name: one for one in program.exchanges}
    assert {plans[name].group for name in gathers} == {GROUP}
    (total,) = [one for one in program.phases() if isinstance(one, AllReducePhase)]
    assert total.meets or total.algorithm == "two_phase"
    proof = prove([program] * RANKS, load_target(TARGET))
    assert proof.issues == ()


@pytest.mark.parametrize("batch", [1, 3])
def test_the_kernel_agrees_with_the_reference(batch: int) -> None:
    """One row travels alone, as f32."""
    subject = subject_of(decoder, "group_gathers", VOCAB)
    lowered = lower(batch)
    gathers = [one for one in lowered.program.exchanges if one.kind.startswith("gather")]
    assert {(one.rows, one.kind) for one in gathers} == {
        (1, "gather_f32") if batch == 1 else (8, "gather")
    }
    session = build(subject, lowered, Mode.LATE.parameters())
    check(run_kernel(session, reference_of(subject), [0] * batch, 2), reference_of(subject))
