"""The shipped model file: its config, its size, and the shape of the graph that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from json import loads
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest

import mkc
import models.kimi_k3
from mkc.ir.cost import graph_cost
from mkc.ir.graph import Block
from mkc.ir.graph import Repeat
from mkc.ir.graph import StateKind
from mkc.ir.ops import DeltaRule
from mkc.ir.ops import L2Norm
from mkc.ir.ops import RmsNorm
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.ops_mixing import MixBlocks
from mkc.ir.text import parse
from mkc.ir.text import print_graph
from mkc.ir.types import DType
from mkc.ir.verify import verify
from models.kimi_k3 import MODEL
from models.kimi_k3 import Config

SHIPPED: dict[str, Any] = loads(
    (Path(models.kimi_k3.__file__).parent / MODEL.default_config).read_text()
)
PREFIX = "language_model.model.layers."
LINEAR = "linear_attn_config"
LINEAR_KEYS = (
    "full_attn_layers",
    "gate_lower_bound",
    "kda_layers",
    "num_heads",
    "short_conv_kernel_size",
    "use_full_rank_gate",
)


def changed(**keys: Any) -> dict[str, Any]:
    """The shipped config with keys replaced where they are; None removes one."""
    config = deepcopy(SHIPPED)
    text = config["text_config"]
    for key, value in keys.items():
        part = text[LINEAR] if key in LINEAR_KEYS else text
        part.pop(key, None)
        if value is not None:
            part[key] = value
    return config


def layered(count: int, full: list[int]) -> dict[str, Any]:
    """The shipped model with other layers; `full` counts from 1."""
    delta = [one for one in range(1, count + 1) if one not in full]
    return changed(num_hidden_layers=count, full_attn_layers=full, kda_layers=delta)


def trace(config: Mapping[str, Any], batch: int = 1, context: int = 64) -> mkc.Graph:
    graph = MODEL.trace(config, batch=batch, context=context)
    verify(graph)
    return graph


def regions(block: Block) -> str:
    """`7{ 2{ } }`."""
    inner = [item for item in block.items if isinstance(item, Repeat)]
    return " ".join(f"{item.count}{{ {regions(item.body)}}}" for item in inner) + " " * bool(inner)


# The released size.


def test_the_shipped_config_has_the_published_size() -> None:
    """Parameters of the text part: two codes are a byte, scales are none."""
    graph = trace(SHIPPED)
    per_element = {DType.E2M1X2: 2, DType.E8M0: 0}
    total = sum(
        one.type.elements * one.instances * per_element.get(one.type.dtype, 1)
        for one in graph.params.values()
    )
    assert total == 2_779_484_478_208


def test_tensors_of_the_released_checkpoint() -> None:
    """Counts by dtype, and bytes: one expert has 17.547 MB."""
    graph = trace(SHIPPED)
    counts = dict.fromkeys(DType, 0)
    for one in graph.params.values():
        counts[one.type.dtype] += len(one.tensor_names())
    assert counts[DType.E2M1X2] + counts[DType.E8M0] == 494_592
    assert counts[DType.F32] == 506
    experts = [one for one in graph.params.values() if one.is_stacked]
    stored = sum(one.type.bytes * one.instances for one in experts)
    assert stored == 92 * 896 * 33_030_144 * 17 // 32
    rest = sum(one.type.bytes * one.instances for one in graph.params.values()) - stored
    assert rest / 1e9 == pytest.approx(111.16 + 2.35, abs=0.01)  # the embedding is read by rows


def test_shapes_of_the_released_checkpoint() -> None:
    graph = trace(SHIPPED)
    shapes = {
        name: (one.tensor_type.shape, one.type.dtype)
        for one in graph.params.values()
        for name in one.tensor_names()
    }
    assert len(shapes) == sum(len(one.tensor_names()) for one in graph.params.values())
    delta, latent, moe = "0.self_attn.", "91.self_attn.", "1.block_sparse_moe."
    expected = {
        delta + "q_proj.weight": ((12288, 7168), "bf16"),
        delta + "v_conv1d.weight": ((12288, 1, 4), "f32"),
        delta + "f_b_proj.weight": ((12288, 128), "bf16"),
        delta + "A_log": ((128,), "f32"),
        delta + "dt_bias": ((12288,), "f32"),
        delta + "o_norm.weight": ((128,), "f32"),
        latent + "q_b_proj.weight": ((18432, 1536), "bf16"),
        latent + "kv_a_proj_with_mqa.weight": ((576, 7168), "bf16"),
        latent + "kv_b_proj.weight": ((24576, 512), "bf16"),
        "92.self_attn.o_proj.weight": ((7168, 12288), "bf16"),
        "0.mlp.down_proj.weight": ((7168, 33792), "bf16"),
        "0.self_attention_res_proj.weight": ((1, 7168), "bf16"),
        moe + "gate.e_score_correction_bias": ((896,), "f32"),
        moe + "shared_experts.up_proj.weight": ((6144, 7168), "bf16"),
        moe + "experts.895.w1.weight_packed": ((3072, 1792), "e2m1x2"),
        moe + "experts.0.w3.weight_scale": ((3072, 112), "e8m0"),
        moe + "experts.7.w2.weight_packed": ((3584, 1536), "e2m1x2"),
        moe + "experts.7.w2.weight_scale": ((3584, 96), "e8m0"),
    }
    assert {name: shapes[PREFIX + name] for name in expected} == expected
    assert shapes["language_model.model.output_attn_res_proj.weight"] == ((1, 7168), "bf16")


def test_states_of_one_sequence() -> None:
    """434.1 MB of recurrent state, 15.3 MB of convolution state, 27,648 bytes per position."""
    totals = dict.fromkeys(StateKind, 0)
    for state in trace(SHIPPED, context=1000).states.values():
        totals[state.kind] += state.type.bytes * state.instances
    assert totals[StateKind.RECURRENT] == 69 * 96 * 128 * 128 * 4
    assert totals[StateKind.CONV] == 69 * 3 * 3 * 12288 * 2
    assert totals[StateKind.KV_CACHE] == 1000 * 27_648


@pytest.mark.parametrize(("batch", "expected"), [(1, 137.0), (2, 162.4), (4, 211.7), (8, 305.3)])
def test_weight_bytes_of_a_step(batch: int, expected: float) -> None:
    """In GB, with routing that is uniform and independent between rows."""
    cost = graph_cost(trace(SHIPPED, batch=batch))
    assert cost.weight_bytes / 1e9 == pytest.approx(expected, abs=0.1)


# The graph.


def test_layers_fold_across_blocks() -> None:
    """A layer that stores a block is like one that does not: latent attention and three layers of
    delta attention, 22 times, between what the ends of the stack have of their own."""
    graph = trace(SHIPPED)
    assert regions(graph.body).startswith("2{ } 22{ 3{ } } 2{ } ")
    assert parse(print_graph(graph)) == graph


def test_a_deeper_model_is_not_a_larger_graph() -> None:
    full = [one for one in range(1, 187) if one % 4 == 0 or one == 186]
    start = perf_counter()
    nodes = [len(list(trace(one).body.nodes())) for one in (SHIPPED, layered(186, full))]
    assert nodes[1] == nodes[0]
    assert perf_counter() - start < 20


def test_every_norm_has_its_epsilon() -> None:
    graph = trace(SHIPPED)
    eps: dict[str, set[float]] = {}
    for node in graph.body.nodes():
        if isinstance(node.op, RmsNorm):
            eps.setdefault(node.operands[1].split("#")[0].split(".")[-2], set()).add(node.op.eps)
        if isinstance(node.op, MixBlocks | L2Norm):
            eps.setdefault(node.op.mnemonic, set()).add(node.op.eps)
    low = {"q_a_layernorm": {1e-6}, "kv_a_layernorm": {1e-6}, "l2_norm": {1e-6}}
    names = ("input_layernorm", "post_attention_layernorm", "o_norm", "routed_expert_norm", "norm")
    assert eps == low | {name: {1e-5} for name in (*names, "mix_blocks")}


def test_the_low_rank_norms_can_be_those_of_other_servers() -> None:
    assert Config.from_hf(SHIPPED).low_rank_eps == 1e-6
    assert Config.from_hf(changed(low_rank_norm_eps=1e-5)).low_rank_eps == 1e-5


def test_layer_lists_count_from_one() -> None:
    """Published: layers 3, 7, ..., 91 and 92, counted from 0, have latent attention."""
    full = Config.from_hf(SHIPPED).full
    assert [number for number, one in enumerate(full) if one] == [*range(3, 92, 4), 92]


def test_experts_may_be_plain() -> None:
    graph = trace(changed(quantization_config=None))
    (op,) = {node.op for node in graph.body.nodes() if isinstance(node.op, ExpertMlp)}
    assert op == ExpertMlp(gate_cap=4.0, up_cap=25.0)
    stacked = [one for one in graph.params.values() if one.is_stacked]
    assert {one.type.dtype for one in stacked} == {DType.BF16}


def test_the_delta_rule_is_f32() -> None:
    """State, decay and result; one rounding comes behind the norm and the gate."""
    graph = trace(SHIPPED)
    types = {value.name: value.type for node in graph.body.nodes() for value in node.results}
    for node in graph.body.nodes():
        if isinstance(node.op, DeltaRule):
            assert node.op.dtype is DType.F32
            assert types[node.operands[4]].shape == (1, 96, 128)
            assert {types[name].dtype for name in node.operands[3:]} == {DType.F32}


# The config.


def test_the_text_config_may_stand_alone() -> None:
    assert Config.from_hf(SHIPPED["text_config"]) == Config.from_hf(SHIPPED)


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "linear_attn_config",
        "full_attn_layers",
        "kda_layers",
        "gate_lower_bound",
        "attn_res_block_size",
        "q_lora_rank",
        "routed_expert_hidden_size",
        "activation_situ_beta",
        "num_shared_experts",
        "moe_renormalize",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(mkc.ConfigKeyError, match=f"'{key}' is missing"):
        Config.from_hf(changed(**{key: None}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": "7168"}, "'hidden_size' is '7168'"),
        ({"num_experts_per_token": 897}, "at most num_experts, which is 896"),
        ({"gate_lower_bound": 5.0}, "'gate_lower_bound' is 5.0; expected a negative number"),
        ({"short_conv_kernel_size": 1}, "an integer of at least 2"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan"),
        ({"full_attn_layers": [0, 4]}, "'full_attn_layers' is .* numbers from 1 to 93"),
        ({"kda_layers": [1, 2, 3]}, "the layers from 1 to 93 that are not in full_attn_layers"),
        ({"moe_renormalize": 1}, "expected true or false"),
    ],
)
def test_a_wrong_value_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(mkc.ConfigValueError, match=message):
        Config.from_hf(changed(**keys))


def test_a_list_that_counts_from_zero_is_refused() -> None:
    full = [one - 1 for one in SHIPPED["text_config"][LINEAR]["full_attn_layers"]]
    with pytest.raises(mkc.ConfigValueError, match="'kda_layers' is .*not in full_attn_layers"):
        Config.from_hf(changed(full_attn_layers=full))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "kimi_linear_2"}, "another architecture"),
        (
            {"mla_use_nope": False},
            "'mla_use_nope' is False.* rotary embeddings",
        ),
        ({"mla_use_output_gate": False}, "without an output gate"),
        ({"num_expert_group": 8}, "'num_expert_group' is 8.* grouped routing"),
        ({"topk_group": 4}, "'topk_group' is 4.* grouped routing"),
        ({"moe_router_activation_func": "softmax"}, "another score of experts"),
        ({"latent_moe_use_norm": False}, "without a norm of their latent sum"),
        ({"hidden_act": "silu"}, "'hidden_act' is 'silu'"),
        ({"num_key_value_heads": 8}, "heads that share keys"),
        ({"use_full_rank_gate": False}, "a low-rank output gate"),
        ({"num_nextn_predict_layers": 1}, "predict several tokens"),
        ({"tie_word_embeddings": True}, "one table for embedding and head"),
        ({"quantization_config": {"format": "nvfp4-pack-quantized"}}, "another quantisation"),
    ],
)
def test_an_unsupported_feature_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(mkc.UnsupportedFeatureError, match=message):
        Config.from_hf(changed(**keys))


@pytest.mark.parametrize(
    ("key", "value"), [("num_bits", 8), ("group_size", 16), ("type", "int"), ("dynamic", True)]
)
def test_other_quantised_weights_are_refused(key: str, value: object) -> None:
    config = deepcopy(SHIPPED)
    groups = config["text_config"]["quantization_config"]["config_groups"]
    groups["group_0"]["weights"][key] = value
    with pytest.raises(mkc.UnsupportedFeatureError, match=f"'{key}' is .* another quantisation"):
        Config.from_hf(config)


def test_quantised_activations_are_refused() -> None:
    config = deepcopy(SHIPPED)
    groups = config["text_config"]["quantization_config"]["config_groups"]
    groups["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(mkc.UnsupportedFeatureError, match="quantised activations"):
        Config.from_hf(config)


def test_positions_beyond_the_models_are_refused() -> None:
    with pytest.raises(mkc.MkcError, match="at most the 1048576 positions"):
        trace(SHIPPED, context=1_048_577)
