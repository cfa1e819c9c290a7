"""Rounds of a speculative scheme through the passes: what is divided, read once, kept, scalar."""

from __future__ import annotations

import json
from functools import cache

import pytest

from mkc.ir.graph import Graph
from mkc.ir.types import DType
from mkc.passes.p10_shard import Shard
from mkc.passes.p10_shard import infer_local
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Lowered
from mkc.passes.pipeline import Pipeline
from mkc.passes.sharding import REPLICATED
from mkc.passes.sharding import ShardedGraph
from mkc.passes.sharding import Sharding
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import EmbedPhase
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Program
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import AllGatherPhase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import TapPhase
from mkc.schedule.scalars import Carried
from mkc.spec import block_round
from mkc.targets import load_target
from models.dflash2 import DRAFTER
from models.qwen38 import MODEL
from tests.draft_goldens import golden_round
from tests.passes.gathered import gather_everything
from tests.passes.lowering import CONFIG
from tests.passes.lowering import TARGET
from tests.passes.lowering import full_size as plain_full_size

CONFIGS = CONFIG.parent
CONFIG_NAMES = (CONFIG.name, "dflash2_qwen38_27b.json")
KV = (
    "draft.layers.{index}.self_attn.k_proj.weight",
    "draft.layers.{index}.self_attn.v_proj.weight",
)


@cache
def round_of(batch: int = 1, *, sampling: bool = False) -> Graph:
    return golden_round(batch=batch, sampling=sampling).graph


@cache
def lowered(ranks: int, batch: int = 1) -> Lowered:
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True, rounds=4))
    return pipeline.run(round_of(batch), load_target(TARGET))


@cache
def sampled(ranks: int) -> Lowered:
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True, rounds=4))
    return pipeline.run(round_of(sampling=True), load_target(TARGET))


def shard(ranks: int, graph: Graph | None = None) -> ShardedGraph:
    target = load_target(TARGET)
    sharded = Shard(ranks=ranks).apply(graph or round_of(), DecisionLog(), target=target)
    infer_local(sharded.graph)
    return sharded


@cache
def full_size(batch: int = 1) -> Graph:
    configs = (json.loads((CONFIGS / name).read_text()) for name in CONFIG_NAMES)
    target, draft = configs
    return block_round(
        MODEL, target, DRAFTER, draft, batch=batch, context=4096, sampling=False
    ).graph


def matmuls(program: Program, *words: str) -> list[MatmulPhase]:
    """Those with a parameter whose key holds one of `words`."""
    return [
        one
        for one in program.phases()
        if isinstance(one, MatmulPhase)
        and any(word in piece.param for piece in one.pieces for word in words)
    ]


def test_states_are_divided_like_what_they_come_from() -> None:
    sharded = shard(2)
    found = {key.rpartition(".")[2]: one for key, one in sharded.states.items()}
    for name in ("conv", "kept_inputs", "kept_k", "kept_u", "kept_decay", "key", "value"):
        assert found[name] == Sharding(axis=1, shards=2), name
    assert found["recurrent"] == Sharding(axis=0, shards=2)
    assert found["output#0"] == REPLICATED, "a tap is the residual stream, which all ranks hold"


def test_every_rank_can_look_everything_up() -> None:
    sharded = shard(2)
    for word in ("embed_tokens", "predecessor_codebook", "successor_codebook", "base_kernel"):
        assert all(one == REPLICATED for key, one in sharded.params.items() if word in key), word
    operands = [one for one in lowered(2).program.operands if one.role == "table"]
    assert [one.param.rpartition(".")[2] for one in operands] == [
        "weight",
        "predecessor_codebook",
        "successor_codebook",
    ]


def test_vocabulary_stays_divided() -> None:
    """The logits are never whole on a rank; acceptance and candidates exchange what is best."""
    mnemonics = [node.op.mnemonic for node in shard(2).graph.body.nodes()]
    assert mnemonics.count("sharded_accept") == 1
    assert mnemonics.count("sharded_top_k") == 1
    plans = {one.name: one.rows for one in lowered(2).program.exchanges}
    assert plans["exchange_argmax"] == plans["exchange_top_k"] == 16
    single = [node.op.mnemonic for node in shard(1).graph.body.nodes()]
    assert "accept" in single and "top_k" in single


def test_whole_results_are_gathered_where_that_is_cheaper() -> None:
    """At full size; in a small model an exchange costs more than the weights."""
    assert not shard(2).gathered
    large = shard(8, full_size())
    words = sorted(key.removesuffix(".weight").rpartition(".")[2] for key in large.gathered)
    assert words == ["fc", "kernel_projection", "kernel_projection"]
    assert all(large.params[key] == Sharding(axis=0, shards=8) for key in large.gathered)
    # 32 columns of each rank would be padded to the 256 that the whole has.
    (whole,) = (one for key, one in large.params.items() if "hidden_projection" in key)
    assert whole == REPLICATED


def test_every_batch_divides_alike() -> None:
    """Weights are packed once for all batches."""
    gathered = [shard(8, full_size(batch=batch)).gathered for batch in (1, 8)]
    assert gathered[0] == gathered[1]


def test_loads_of_a_round_are_larger() -> None:
    """The core is the bound; a plain step, and a round of many rows, keep the target's size."""
    wanted = load_target(TARGET).dma.load_target_bytes
    for graph, factor in ((full_size(), 2), (full_size(batch=8), 1), (plain_full_size(), 1)):
        one = Pipeline(shard=Shard(ranks=8)).run(graph, load_target(TARGET))
        chosen = next(d.chosen for d in one.log.decisions if d.id == "tile.load_bytes")
        assert chosen == str(factor * wanted)


def test_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    gather_everything(monkeypatch)
    pipeline = Pipeline(shard=Shard(ranks=2), lower=Lower(logits=True, rounds=4))
    program = pipeline.run(round_of(), load_target(TARGET)).program
    gathers = [one for one in program.phases() if isinstance(one, AllGatherPhase)]
    assert [[view.width for view in one.outputs] for one in gathers] == [[256], [64], [64], [32]]
    for one in gathers:
        assert [2 * view.width for view in one.parts] == [view.width for view in one.outputs]
    plans = {one.name: one for one in program.exchanges if one.kind == "gather"}
    assert [plans[one.exchange].columns for one in gathers] == [128] * 4
    assert all(not one.meets for one in gathers), "sums over the ranks lie between them"


def test_another_graph_takes_the_choice_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts run over the weights that were packed for rounds."""
    gather_everything(monkeypatch)
    packed = shard(2)
    prompts = golden_round(sampling=False).prefill
    like = Shard(ranks=2).apply(prompts, DecisionLog(), like=packed)
    assert like.gathered == {"draft.fc.weight": 2}
    assert all(like.params[key] == packed.params[key] for key in like.params)


@pytest.mark.parametrize("ranks", [1, 2])
def test_keys_and_values_of_both_kinds_of_rows_come_from_one_read(ranks: int) -> None:
    (both,) = matmuls(lowered(ranks).program, *KV)
    assert tuple(piece.param for piece in both.pieces) == KV
    (other,) = both.also
    assert other.left.buffer != both.left.buffer
    assert other.output.buffer != both.output.buffer
    assert other.output.width == both.output.width


def test_the_head_is_read_twice() -> None:
    """Drafting depends on the accepted tokens, so nothing can be read once for both."""
    program = lowered(1).program
    assert len(matmuls(program, "lm_head")) == 2
    lookups = [one for one in program.phases() if isinstance(one, EmbedPhase)]
    assert [one.source for one in lookups] == ["s_tokens", "s_block_tokens"]
    assert len({one.table for one in lookups}) == 1, "one table, two lookups"


def test_taps_lie_side_by_side_from_the_first_layer_on() -> None:
    program = lowered(1).program
    (tap,) = (one for one in program.phases() if isinstance(one, TapPhase))
    # Layers 1, 4 and 6 of 0..2 and 4..6; what nobody reads has a place behind them.
    assert tap.places == (3, 0, 3, 1, 3, 2)
    buffer = next(one for one in program.buffers if one.name == tap.buffer)
    (fc,) = matmuls(program, "draft.fc")
    assert fc.left.buffer == tap.buffer
    assert (buffer.dtype, buffer.shape) == (DType.BF16, (8, 4 * tap.width))
    assert buffer.first == 0, "nothing else is there while layers add to it"


def test_scalars_have_no_buffer() -> None:
    program = lowered(2).program
    values = {one.value for one in program.scalars}
    assert {"tokens", "positions", "kept", "next_positions", "block_tokens"} <= values
    held = {name for one in program.buffers for name in one.purpose.split(", ")}
    assert not held & values
    sizes = {one.name: one.size for one in lowered(1, 2).program.scalars}
    assert (sizes["s_positions"], sizes["s_kept"], sizes["s_accept"]) == (16, 2, 16)


def test_the_plan_of_rounds() -> None:
    plan = lowered(1).program.round
    assert plan is not None
    assert (plan.rows_per_sequence, plan.emitted, plan.count) == (8, "s_accept", "s_accept_2")
    assert plan.carried[1:] == (
        Carried(target="s_positions", source="s_next_positions"),
        Carried(target="s_kept", source="s_accept_2"),
    )
    assert lowered(1).program.scheme == "dflash2"


def test_caches_of_target_and_drafter() -> None:
    """Both begin with the positions that the round begins with."""
    program = lowered(1).program
    target, draft = (one for one in program.phases() if isinstance(one, RowsAttentionPhase))
    assert (target.remembered, target.causal, target.window) == (None, True, None)
    assert draft.remembered is not None
    assert (draft.causal, draft.window) == (False, 32)
    assert target.first == draft.first == "s_positions"
    assert [one.window for one in program.caches] == [None, 32]


def test_kept_rows_are_streams() -> None:
    program = lowered(1, 2).program
    shapes = {one.name: (one.items, one.item_shape) for one in program.streams}
    assert shapes["state_conv"] == (6, (3, 8, 1280))
    assert shapes["state_inputs"] == (6, (16, 1280)), "one item for all sequences of a layer"
    assert shapes["state_u"] == (12, (8, 768)), "one for each sequence"
    assert shapes["state_decay"] == (12, (8, 128)), "a register for 24 decays"


def test_rounds_that_sample() -> None:
    """Two exchanges, options in scalar memory, and rows that go from round to round."""
    program = sampled(2).program
    roles = {one.name: one.role for one in program.operands}
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "forced"):
        assert roles[name] == name
    seed = next(one for one in program.operands if one.name == "seed")
    assert seed.shape == (2,)
    carried = [one for one in program.operands if one.role == "carried"]
    assert [(one.name, one.shape, one.dtype) for one in carried] == [
        ("candidates", (8, 128), DType.I32),
        ("proposal", (8, 128), DType.F32),
    ]
    assert all(one.updated for one in carried)
    rows = {one.name: one.rows for one in program.exchanges}
    assert (rows["exchange_argmax"], rows["exchange_race"]) == (24, 16)
    plan = program.round
    assert plan is not None
    assert [one.target for one in plan.rows] == ["candidates", "proposal"]
    (accept,) = (one for one in program.phases() if isinstance(one, AcceptPhase))
    assert accept.sampling is not None
    assert (accept.sampling.listed, accept.sampling.k) == (64, 16)
    assert {one.value for one in program.scalars} >= {"tokens", "positions", "kept"}
    assert "top_k" not in {one.value for one in program.scalars}, "an option is not carried on"
    assert lowered(2).program.round.rows == ()  # type: ignore[union-attr]
