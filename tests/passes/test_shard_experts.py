"""Pass 10 on mixtures of experts, latent attention and residual blocks, at full size first."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from mkc.errors import ShardingError
from mkc.ir.graph import Block
from mkc.ir.graph import Node
from mkc.ir.graph import Repeat
from mkc.ir.types import DType
from mkc.passes.p10_shard import Shard
from mkc.passes.sharding import REPLICATED
from mkc.passes.sharding import ShardedGraph
from mkc.passes.sharding import Sharding
from mkc.schedule.decisions import DecisionLog
from mkc.targets import load_target
from tests.passes.kimi import MANY_DEVICES
from tests.passes.kimi import divided
from tests.passes.kimi import full_kimi
from tests.passes.kimi import small_kimi

EXCHANGES = ("all_reduce", "scattered_sum", "all_gather", "sharded_argmax")


@cache
def full() -> tuple[ShardedGraph, DecisionLog]:
    return divided(full_kimi(), 32)


def sharding_of(sharded: ShardedGraph, words: str) -> Sharding:
    """Of all parameters or states whose key holds `words`."""
    (found,) = {one for key, one in (sharded.params | sharded.states).items() if words in key}
    return found


def test_heads_and_experts_are_divided_the_residual_stream_is_whole() -> None:
    sharded, _ = full()
    for name in ("q_proj", "v_proj", "g_proj", "b_proj", "f_b_proj", "q_b_proj", "kv_b_proj"):
        assert sharding_of(sharded, f".{name}.") == Sharding(axis=0, shards=32), name
    assert sharding_of(sharded, ".o_proj.") == Sharding(axis=1, shards=32)
    assert sharding_of(sharded, "shared_experts.down_proj") == Sharding(axis=1, shards=32)
    assert sharding_of(sharded, ".recurrent") == Sharding(axis=0, shards=32)
    for name in ("f_a_proj", "A_log", "res_norm", "res_proj", "kv.latent", "e_score_correction"):
        assert sharding_of(sharded, name) == REPLICATED, name


def test_projections_that_every_rank_needs_are_gathered_in_one_exchange() -> None:
    """Router logits travel with the experts' latents, both low-rank vectors with each other."""
    sharded, _ = full()
    words = {key.rpartition(".weight")[0].rpartition(".")[2] for key in sharded.gathered}
    assert words == {
        "gate",
        "routed_expert_down_proj",
        "routed_expert_up_proj",
        "q_a_proj",
        "kv_a_proj_with_mqa",
    }
    nodes = list(sharded.graph.body.nodes())
    gathers = [node for node in nodes if node.op.mnemonic == "all_gather"]
    shapes = {tuple(value.type.shape[1] for value in one.results) for one in gathers}
    assert shapes == {(896, 3584), (7168,), (1536, 576)}
    first = next(one for one in gathers if len(one.results) == 2)
    dtypes = [value.type.dtype for value in first.results]
    assert dtypes == [DType.F32, DType.BF16], "logits stay f32"


def exchanges_of_layers(block: Block) -> list[int]:
    """Exchanges of every loop body that is one layer."""
    found = []
    for item in block.items:
        if isinstance(item, Repeat):
            found += exchanges_of_layers(item.body)
            own = [one for one in item.body.items if isinstance(one, Node)]
            if own and not any(isinstance(one, Repeat) for one in item.body.items):
                found.append(sum(node.op.mnemonic in EXCHANGES for node in own))
    return found


def test_a_layer_has_four_exchanges_and_one_more_with_latent_attention() -> None:
    """Attention, router with latents, all experts with the shared ones, back from the latents."""
    sharded, _ = full()
    assert set(exchanges_of_layers(sharded.graph.body)) == {4, 5}


def test_what_is_gathered_is_divided_within_hosts() -> None:
    sharded, _ = full()
    assert set(sharded.gathered.values()) == {8}
    assert all(sharded.params[key].cyclic for key in sharded.gathered)


def test_the_layout_table_is_a_decision() -> None:
    _, log = full()
    (found,) = [one for one in log.decisions if one.id.startswith("shard.experts.")]
    assert found.id == "shard.experts.896x3072x3584_e2m1x2"
    layouts = [found.chosen.split(":")[0], *found.rejected]
    assert sorted(layouts, key=lambda one: int(one.split()[0])) == [
        f"{groups} groups x {32 // groups} slices" for groups in (1, 2, 4, 8, 16, 32)
    ]
    for text in (found.chosen, *found.rejected.values()):
        assert "uniform" in text
        assert "alike" in text
        assert "predicted" in text


def test_bytes_of_a_rank_at_full_size() -> None:
    """Less than 4 GB above an even share of 1,556 GB: the embedding table is on every rank, and
    what an exchange gathers within a host is on every host."""
    sharded, _ = full()
    total = sum(one.type.bytes * one.instances for one in full_kimi().params.values())
    own = sum(one.type.bytes * one.instances for one in sharded.graph.params.values())
    table = sharded.graph.params["language_model.model.embed_tokens.weight"].type.bytes
    assert 0.5e9 < own - table - (total - table) / 32 < 1.3e9
    assert own < load_target(MANY_DEVICES).hbm.usable_bytes


@pytest.mark.parametrize(
    ("ranks", "mxfp4", "groups", "slices"), [(2, True, 1, 2), (4, False, 1, 4), (8, True, 4, 2)]
)
def test_experts_are_cut_in_whole_tiles(ranks: int, mxfp4: bool, groups: int, slices: int) -> None:
    """64 columns are two groups of 32 4-bit floats, or four tiles of 16 bf16 rows."""
    graph = small_kimi(layers=2, latent=[2], dense=1, mxfp4=mxfp4)
    sharded = Shard(ranks=ranks).apply(graph, DecisionLog())  # no target: the fewest groups
    (node,) = (one for one in sharded.graph.body.nodes() if one.op.mnemonic == "sharded_expert_mlp")
    key = node.operands[3]
    width = Sharding(axis=1, shards=slices)
    outer = Sharding(axis=0, shards=groups, copies=slices, inner=width)
    assert sharded.params[key] == (width if groups == 1 else outer)
    shape = sharded.graph.params[key].type.shape
    assert shape[:2] == (32 // groups, 64 // slices)
    down = sharded.params[node.operands[-1]]
    assert (down.inner or down).axis == 2


def test_another_graph_takes_the_layout_over() -> None:
    """Prompts run over the weights that were packed for steps."""
    graph = small_kimi(layers=2, latent=[2], dense=1)
    sharded, _ = divided(graph, 4)
    forced = replace(sharded, expert_groups=dict.fromkeys(sharded.expert_groups, 4))
    again = Shard(ranks=4).apply(graph, DecisionLog(), like=forced)
    assert set(again.expert_groups.values()) == {4}
    (key,) = again.expert_groups
    assert again.params[key] == Sharding(axis=0, shards=4, copies=1)


def test_a_mesh_that_divides_no_experts_is_refused() -> None:
    with pytest.raises(ShardingError) as caught:
        divided(small_kimi(layers=1, latent=[], dense=0), 3)
    assert "tp 3 does not divide" in str(caught.value)
