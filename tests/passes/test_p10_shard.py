"""Pass 10: what is divided, what is copied, and where the exchanges are."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mkc
from mkc.errors import ShardingError
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.passes.p10_shard import Shard
from mkc.passes.p10_shard import infer_local
from mkc.passes.p10_shard import possible_ranks
from mkc.passes.sharding import REPLICATED
from mkc.passes.sharding import ShardedGraph
from mkc.passes.sharding import Sharding
from mkc.schedule.decisions import DecisionLog
from tests.passes.lowering import dense_graph
from tests.passes.lowering import full_size
from tests.passes.stacks import Stack


def shard(graph: Graph, ranks: int) -> ShardedGraph:
    sharded = Shard(ranks=ranks).apply(graph, DecisionLog())
    infer_local(sharded.graph)
    return sharded


def sharding_of(sharded: ShardedGraph, words: str) -> Sharding:
    """Of the one parameter or state whose key holds `words`."""
    (found,) = {one for key, one in (sharded.params | sharded.states).items() if words in key}
    return found


def exchanges(sharded: ShardedGraph) -> list[tuple[str, str]]:
    """(what is exchanged, the operation that reads the result) of every exchange."""
    nodes = list(sharded.graph.body.nodes())
    makers = {value.name: node for node in nodes for value in node.results}
    found = []
    for node in nodes:
        if node.op.mnemonic in ("all_reduce", "sharded_argmax"):
            maker = makers[node.operands[0]]
            reader = next((one for one in nodes if node.results[0].name in one.operands), None)
            weight = maker.operands[1].split(".")[-2]
            found.append((weight, reader.op.mnemonic if reader else "output"))
    return found


def test_a_layer_is_divided_by_outputs_then_by_inputs() -> None:
    """Heads and MLP columns stay on their rank; two sums per layer bring the residual together."""
    sharded = shard(dense_graph(), 4)
    for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"):
        assert sharding_of(sharded, name) == Sharding(axis=0, shards=4), name
    for name in ("o_proj", "down_proj"):
        assert sharding_of(sharded, name) == Sharding(axis=1, shards=4), name
    assert sharding_of(sharded, "kv.key") == Sharding(axis=1, shards=4)
    for name in ("embed_tokens", "layernorm"):
        assert sharding_of(sharded, name) == REPLICATED, name
    assert exchanges(sharded) == [
        ("o_proj", "binary"),
        ("down_proj", "binary"),
        ("lm_head", "output"),
    ]


def test_partial_sums_are_f32_and_rounded_by_the_exchange() -> None:
    nodes = list(shard(dense_graph(), 2).graph.body.nodes())
    partial = next(one for one in nodes if one.results[0].name.endswith(".partial"))
    total = nodes[nodes.index(partial) + 1]
    assert (partial.op.mnemonic, partial.results[0].type.dtype) == ("linear", mkc.F32)
    assert (total.op.mnemonic, total.results[0].type.dtype) == ("all_reduce", mkc.BF16)
    assert total.location is not None
    assert total.location == partial.location


def test_one_rank_leaves_the_graph_alone() -> None:
    graph = dense_graph()
    sharded = shard(graph, 1)
    assert sharded.graph == graph
    assert set(sharded.params.values()) == {REPLICATED}


def test_two_key_heads_for_eight_ranks() -> None:
    """Four ranks hold the same key head, each with one of the four query heads that read it."""
    log = DecisionLog()
    sharded = Shard(ranks=8).apply(Stack(pattern="a", heads=8, kv_heads=2).graph(), log)
    copied = Sharding(axis=0, shards=2, copies=4)
    assert sharding_of(sharded, ".k.weight") == sharding_of(sharded, ".v.weight") == copied
    assert sharding_of(sharded, "kv.key") == replace(copied, axis=1)
    assert sharding_of(sharded, ".q.weight") == Sharding(axis=0, shards=8)
    assert sharded.graph.params["model.layers.0.k.weight"].type.shape == (128, 256)
    found = {one.id: one.chosen for one in log.decisions}
    assert found["shard.copies.model.layers.0.k.weight"] == "2 shards, each on 4 ranks"


def test_the_full_model_at_eight_ranks_copies_key_heads_twice() -> None:
    sharded = shard(full_size(), 8)
    assert sharding_of(sharded, "k_proj") == Sharding(axis=0, shards=4, copies=2)
    assert sharding_of(sharded, "in_proj_qkv") == Sharding(axis=0, shards=8)


def normalised(step: mkc.Step) -> mkc.Outputs:
    """A norm over the outputs of a projection."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [512, 256]))
    x = mkc.linear(h, mkc.param("in.weight", [512, 256]))
    x = mkc.rms_norm(x, mkc.param("norm.weight", [512]), eps=1e-6)
    h = h + mkc.linear(x, mkc.param("out.weight", [256, 512]))
    return mkc.next_token(h, mkc.param("head.weight", [512, 256]))


def test_what_a_norm_reads_stays_whole() -> None:
    """So does what meets a whole value; the LM head is divided as ever."""
    log = DecisionLog()
    graph = mkc.trace(normalised, name="normalised", batch=1, context=64)
    sharded = Shard(ranks=4).apply(graph, log)
    infer_local(sharded.graph)
    assert sharding_of(sharded, "in.weight") == sharding_of(sharded, "out.weight") == REPLICATED
    assert sharding_of(sharded, "head.weight") == Sharding(axis=0, shards=4)
    assert {"shard.whole.in.weight", "shard.whole.out.weight"} <= {one.id for one in log.decisions}


def copied_heads(step: mkc.Step) -> mkc.Outputs:
    """Two heads that go straight into a row-parallel projection."""
    heads = mkc.heads(2, 128)
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [512, 256]))
    x = mkc.linear(h, mkc.param("in.weight", [heads, 256]))
    h = mkc.linear(x, mkc.param("out.weight", [256, heads]))
    return mkc.next_token(h, mkc.param("head.weight", [512, 256]))


def test_copied_units_count_once_in_a_sum() -> None:
    """Of the ranks with the same head only the first one holds weights, the others zeros."""
    sharded = shard(mkc.trace(copied_heads, name="copied", batch=1, context=64), 8)
    assert sharding_of(sharded, "in.weight") == Sharding(axis=0, shards=2, copies=4)
    assert sharding_of(sharded, "out.weight") == Sharding(axis=1, shards=2, copies=4, once=True)


def test_every_part_of_an_axis_is_divided() -> None:
    """Each rank's q, k, v channels are its heads of each, not a run of the joined axis."""
    sharded = shard(Stack(pattern="d", heads=8).graph(), 4)
    assert sharding_of(sharded, "qkv") == Sharding(axis=0, shards=4)
    (axis, _) = sharded.graph.params["model.layers.0.qkv.weight"].type.axes
    assert [(part.count, part.unit) for part in axis.parts] == [(2, 128), (2, 128), (2, 128)]
    assert sharding_of(sharded, "conv.weight") == Sharding(axis=0, shards=4)
    assert sharded.graph.states["model.layers.0.conv"].type.shape == (3, 3 * 2 * 128)
    assert sharded.graph.states["model.layers.0.recurrent"].type.shape == (2, 128, 128)


def test_a_rank_holds_its_share_of_the_weights() -> None:
    """Matrices divide evenly; only the copied key and value heads and vectors are held twice."""
    full = full_size()
    local = shard(full, 8).graph
    for key, param in full.params.items():
        if "embed_tokens" in key or len(param.type.shape) == 1:
            continue
        copies = 2 if "k_proj" in key or "v_proj" in key else 1
        assert local.params[key].type.elements * 8 == param.type.elements * copies, key


def test_loops_keep_their_form() -> None:
    """Sharding looks at one execution of a body: the same regions, carries of the same division."""
    full = full_size()
    local = shard(full, 8).graph
    (blocks,) = [one for one in full.body.items if not isinstance(one, Node)]
    (divided,) = [one for one in local.body.items if not isinstance(one, Node)]
    assert (divided.name, divided.count) == (blocks.name, blocks.count)
    assert divided.carries == blocks.carries


@pytest.mark.parametrize("tp", [3, 5, 7])
def test_a_mesh_that_does_not_divide_the_full_model(tp: int) -> None:
    """The message says which dimension, and which meshes the model does divide over."""
    with pytest.raises(ShardingError) as raised:
        shard(full_size(), tp)
    message = str(raised.value)
    assert f"tp {tp} does not divide dimension" in message
    listed = message.split("that divide the model: ")[1].split(".")[0]
    assert [int(one) for one in listed.split(",")] == possible_ranks(full_size())


def test_meshes_of_the_full_model() -> None:
    """4 key heads, 24 query heads, 16 and 48 heads of the delta net, all copied where needed."""
    found = possible_ranks(full_size())
    assert found == [1, 2, 4, 8, 16, 32, 64]
    for ranks in found:
        shard(full_size(), ranks)
    for ranks in set(range(1, 33)) - set(found):
        with pytest.raises(ShardingError):
            shard(full_size(), ranks)
