"""A tied embedding becomes two parameters of one tensor, and everything else stays."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mkc
import mkc.passes.shard_rules  # registers how the built-in ops divide
from mkc.ir.graph import Graph
from mkc.ir.ops import Embed
from mkc.ir.verify import findings
from mkc.passes.p05_untie import Untie
from mkc.passes.p10_shard import Shard
from mkc.schedule.decisions import DecisionLog

VOCAB, HIDDEN = 64, 32


def traced(*, tied: bool) -> Graph:
    def decoder(step: mkc.Step) -> mkc.Outputs:
        table = mkc.param("embed.weight", [VOCAB, HIDDEN])
        head = table if tied else mkc.param("head.weight", [VOCAB, HIDDEN])
        return mkc.next_token(mkc.embed(step.tokens, table), head)

    return mkc.trace(decoder, name="tried", batch=1, context=16)


def test_a_table_with_one_reader_stays() -> None:
    log = DecisionLog()
    graph = traced(tied=False)
    assert Untie().apply(graph, log) is graph
    assert log.decisions == []


def test_a_tied_table_gets_a_copy_of_the_same_tensor() -> None:
    log = DecisionLog()
    graph = traced(tied=True)
    untied = Untie().apply(graph, log)
    (key,) = graph.params
    copy = f"{key}#lookup"
    assert list(untied.params) == [key, copy]
    assert untied.params[copy].tensor_names() == graph.params[key].tensor_names()
    readers = {name: node.op for node in untied.body.nodes() for name in node.operands}
    assert isinstance(readers[copy], Embed)
    assert not isinstance(readers[key], Embed)
    assert findings(untied) == []
    assert [one.id for one in log.decisions] == [f"untie.{key}"]
    # Nothing but the operand changed.
    back = [
        replace(node, operands=tuple(name.removesuffix("#lookup") for name in node.operands))
        for node in untied.body.nodes()
    ]
    assert back == list(graph.body.nodes())


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_a_tied_model_shards(ranks: int) -> None:
    sharded = Shard(ranks=ranks).apply(traced(tied=True), DecisionLog())
    key = "embed.weight"
    assert sharded.graph.params[key].type.shape == (VOCAB // ranks, HIDDEN)
    assert sharded.graph.params[f"{key}#lookup"].type.shape == (VOCAB, HIDDEN)
    assert sharded.full.params.keys() == sharded.graph.params.keys()
    assert findings(sharded.graph) == []
