"""Sums that meet gathered columns only, and those that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mkc
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.verify import findings
from mkc.passes.p10_shard import Shard
from mkc.passes.p10_shard import infer_local
from mkc.passes.pipeline import Pipeline as Pipeline  # registers the SHARD facets
from mkc.passes.rank_ops import AllGather
from mkc.passes.rank_ops import ScatteredSum
from mkc.schedule.decisions import DecisionLog
from mkc.targets import load_target

VOCAB, WIDE = 512, 512
RANKS, GROUP = 4, 2


def layer(
    hidden: int = 256, inner: int = 384, *, joined: bool = True, read_twice: str = ""
) -> tuple[list[Node], DecisionLog]:
    """What one layer becomes on two hosts of two devices.

    Args:
      joined: the sum that meets gathered columns travels with another one.
      read_twice: who else reads what meets: `sum`, `gather`, or nobody.
    """

    def decoder(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, hidden]))
        for layer in mkc.layers(2):
            x = mkc.rms_norm(h, layer.param("norm.weight", [hidden]), eps=1e-6)
            narrow = x
            if joined:
                first = mkc.linear(x, layer.param("first.weight", [WIDE, hidden]))
                narrow = mkc.linear(mkc.silu(first), layer.param("inner.weight", [inner, WIDE]))
            narrow = mkc.rms_norm(
                narrow, layer.param("inner_norm.weight", [inner if joined else hidden]), eps=1e-6
            )
            size = inner if joined else hidden
            gathered = mkc.linear(narrow, layer.param("outer.weight", [hidden, size]))
            second = mkc.linear(x, layer.param("second.weight", [WIDE, hidden]))
            summed = mkc.linear(mkc.silu(second), layer.param("shared.weight", [hidden, WIDE]))
            both = gathered + summed
            if read_twice:
                both = both + mkc.silu(summed if read_twice == "sum" else gathered)
            h = h + both
        x = mkc.rms_norm(h, mkc.param("norm.weight", [hidden]), eps=1e-6)
        return mkc.next_token(x, mkc.param("head.weight", [VOCAB, hidden]))

    target = load_target("tpu7x")
    target = replace(
        target,
        exchange=replace(target.exchange, messages=0, latency_us=0.0),
        links=replace(target.links, devices_per_host=GROUP, issue_us=100.0),
    )
    graph = mkc.trace(decoder, name="branches", batch=1, context=64)
    log = DecisionLog()
    local = Shard(ranks=RANKS, gather_all=True).apply(graph, log, target=target).graph
    infer_local(local)
    assert not findings(local)
    (found,) = [item for item in local.body.items if isinstance(item, Repeat)]
    return list(found.body.nodes()), log


def test_the_sum_ends_on_its_owner_and_what_it_meets_is_gathered() -> None:
    nodes, log = layer()
    makers = {value.name: node for node in nodes for value in node.results}
    (total,) = [one for one in nodes if isinstance(one.op, ScatteredSum)]
    assert isinstance(total.op, ScatteredSum)
    assert (total.op.ranks, total.op.group, total.op.columns) == (RANKS, GROUP, 256)
    assert total.results[0].type.shape == (1, 384 + 128)
    (gather,) = [one for one in nodes if isinstance(one.op, AllGather)]
    added = makers[gather.operands[0]]
    assert added.op.mnemonic == "binary" and added.results[0].type.shape == (1, 128)
    assert {makers[name].op.mnemonic for name in added.operands} == {"linear", "split_parts"}
    assert gather.results[0].type.shape == (1, 256)
    (decision,) = [one for one in log.decisions if one.id.startswith("shard.scattered.")]
    assert "its own columns" in str(decision.chosen)


@pytest.mark.parametrize("read_twice", ["sum", "gather"])
def test_what_others_read_too_is_needed_whole(read_twice: str) -> None:
    nodes, _ = layer(read_twice=read_twice)
    assert not any(isinstance(one.op, ScatteredSum) for one in nodes)


def test_shares_are_whole_registers() -> None:
    """Of 384 columns two ranks would get one and a half registers each."""
    nodes, _ = layer(hidden=384)
    assert not any(isinstance(one.op, ScatteredSum) for one in nodes)


def test_a_sum_that_travels_alone_is_left() -> None:
    nodes, _ = layer(joined=False)
    assert any(isinstance(one.op, AllGather) for one in nodes)
    assert not any(isinstance(one.op, ScatteredSum) for one in nodes)
