"""The shipped model file: its config, and the shape of the graph that follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from json import loads
from pathlib import Path
from typing import Any

import pytest

import mkc
import models.qwen38
from mkc.ir.graph import Block
from mkc.ir.graph import Repeat
from mkc.ir.graph import StateKind
from mkc.ir.ops import L2Norm
from mkc.ir.ops import RmsNorm
from mkc.ir.verify import verify
from models.qwen38 import MODEL
from models.qwen38 import Config

SHIPPED: dict[str, Any] = loads(
    (Path(models.qwen38.__file__).parent / MODEL.default_config).read_text()
)
LINEAR, FULL = "linear_attention", "full_attention"


def changed(**keys: Any) -> dict[str, Any]:
    """The shipped config with keys of `text_config` replaced; None removes one."""
    config = deepcopy(SHIPPED)
    text = config["text_config"]
    for key, value in keys.items():
        text.pop(key, None)
        if value is not None:
            text[key] = value
    return config


def small(layer_types: list[str], **keys: Any) -> dict[str, Any]:
    """A small model of the family."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
    }
    return changed(**(sizes | keys))


def trace(config: Mapping[str, Any], batch: int = 1, context: int = 64) -> mkc.Graph:
    graph = MODEL.trace(config, batch=batch, context=context)
    verify(graph)
    return graph


def regions(block: Block) -> str:
    """`16{ 3{ } }`."""
    inner = [item for item in block.items if isinstance(item, Repeat)]
    return " ".join(f"{item.count}{{ {regions(item.body)}}}" for item in inner) + " " * bool(inner)


def test_the_shipped_config_has_the_published_size() -> None:
    """Counts of the released checkpoint's text part."""
    graph = trace(SHIPPED, context=4096)
    tensors = [name for one in graph.params.values() for name in one.tensor_names()]
    assert len(tensors) == len(set(tensors)) == 851
    elements = sum(one.type.elements * one.instances for one in graph.params.values())
    assert elements == 26_895_998_464


def test_shapes_of_the_released_checkpoint() -> None:
    graph = trace(SHIPPED)
    shapes = {name: one.type.shape for one in graph.params.values() for name in one.tensor_names()}
    prefix = "model.language_model."
    assert shapes["lm_head.weight"] == shapes[prefix + "embed_tokens.weight"] == (248320, 5120)
    assert shapes[prefix + "layers.0.linear_attn.in_proj_qkv.weight"] == (10240, 5120)
    assert shapes[prefix + "layers.62.linear_attn.conv1d.weight"] == (10240, 1, 4)
    assert shapes[prefix + "layers.1.linear_attn.A_log"] == (48,)
    assert shapes[prefix + "layers.3.self_attn.q_proj.weight"] == (12288, 5120)
    assert shapes[prefix + "layers.63.self_attn.v_proj.weight"] == (1024, 5120)
    assert shapes[prefix + "layers.63.mlp.down_proj.weight"] == (5120, 17408)


def test_states_of_one_sequence() -> None:
    """151.0 MB of recurrent state, 2.9 MB of convolution state, 64 KiB of cache per position."""
    graph = trace(SHIPPED, context=1000)
    totals = dict.fromkeys(StateKind, 0)
    for state in graph.states.values():
        totals[state.kind] += state.type.bytes * state.instances
    assert totals[StateKind.RECURRENT] == 48 * 48 * 128 * 128 * 4
    assert totals[StateKind.CONV] == 48 * 3 * 10240 * 2
    assert totals[StateKind.KV_CACHE] == 1000 * 65_536


@pytest.mark.parametrize(
    ("layer_types", "expected"),
    [
        ([LINEAR] * 3 + [FULL], "3{ } "),
        (([LINEAR] * 3 + [FULL]) * 2, "2{ 3{ } } "),
        (([LINEAR] * 3 + [FULL]) * 2 + [LINEAR] * 2, "2{ 3{ } } 2{ } "),
        ([FULL] * 5, "5{ } "),
        ([LINEAR], ""),
    ],
)
def test_the_layer_pattern_becomes_regions(layer_types: list[str], expected: str) -> None:
    assert regions(trace(small(layer_types), batch=2).body) == expected


def test_a_deeper_model_is_not_a_larger_graph() -> None:
    graph = trace(SHIPPED)
    deep = trace(
        changed(num_hidden_layers=640, layer_types=SHIPPED["text_config"]["layer_types"] * 10)
    )
    assert regions(graph.body) == "16{ 3{ } } "
    assert regions(deep.body) == "160{ 3{ } } "
    assert len(list(deep.body.nodes())) == len(list(graph.body.nodes()))


def test_every_norm_has_the_published_epsilon() -> None:
    """Also of the q and k normalisation, which random weights hardly show."""
    graph = trace(SHIPPED)
    norms = [node.op for node in graph.body.nodes() if isinstance(node.op, L2Norm | RmsNorm)]
    assert len(norms) == 2 + 1 + 2 + 2 + 2 + 1  # l2, gated, q and k, two per layer kind, final
    assert {op.eps for op in norms} == {1e-6}


def test_tied_embeddings_are_one_parameter() -> None:
    graph = trace(small([FULL], tie_word_embeddings=True))
    assert "lm_head.weight" not in graph.params
    (head,) = (
        node for node in graph.body.nodes() if node.results[0].name == graph.outputs["logits"]
    )
    assert head.operands[1] == "model.language_model.embed_tokens.weight"


def test_the_text_config_may_stand_alone() -> None:
    assert Config.from_hf(SHIPPED["text_config"]) == Config.from_hf(SHIPPED)


def test_tying_may_be_said_at_the_top() -> None:
    config = changed(tie_word_embeddings=None)
    config["tie_word_embeddings"] = True
    assert Config.from_hf(config).tied


REQUIRED = (
    "head_dim",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "vocab_size",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(mkc.ConfigKeyError, match=f"key '{key}' is missing; expected "):
        Config.from_hf(changed(**{key: None}))


ROPE = SHIPPED["text_config"]["rope_parameters"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": "5120"}, "'hidden_size' is '5120'; expected a positive integer"),
        ({"head_dim": 0}, "'head_dim' is 0"),
        ({"vocab_size": True}, "'vocab_size' is True"),
        ({"rms_norm_eps": -1e-6}, "'rms_norm_eps' is -1e-06; expected a positive number"),
        ({"rms_norm_eps": float("inf")}, "'rms_norm_eps' is inf; .* finite in f32"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' is nan; .* finite in f32"),
        ({"rms_norm_eps": 10**400}, "'rms_norm_eps' is 1000.*; .* finite in f32"),
        ({"rope_parameters": ROPE | {"rope_theta": float("inf")}}, "'rope_theta' is inf"),
        (
            {"rope_parameters": ROPE | {"partial_rotary_factor": float("inf")}},
            "'partial_rotary_factor' is inf",
        ),
        ({"hidden_size": 10**12}, "'hidden_size' is 1000000000000; .* at most 2147483647"),
        ({"linear_conv_kernel_dim": 10**12}, "'linear_conv_kernel_dim' is .* at most 2147483647"),
        ({"linear_conv_kernel_dim": 1}, "'linear_conv_kernel_dim' is 1; .* at least 2"),
        ({"num_hidden_layers": 63}, "'layer_types' is .*; expected a list of 63 entries"),
        ({"num_attention_heads": 22}, "'num_attention_heads' is 22; .* which is 4"),
        ({"linear_num_value_heads": 40}, "'linear_num_value_heads' is 40; .* which is 16"),
        ({"rope_parameters": 7}, "'rope_parameters' is 7; expected an object"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 1.5}}, "'partial_rotary_factor'"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' is 'no'; expected true or false"),
    ],
)
def test_a_wrong_value_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(mkc.ConfigValueError, match=message):
        Config.from_hf(changed(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_bias": True}, "'attention_bias' is True, .* biases in attention"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"attn_output_gate": False}, "without an output gate"),
        ({"output_gate_type": "sigmoid"}, "'output_gate_type' is 'sigmoid'.*'swish' or 'silu'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "'mamba_ssm_dtype' is 'bfloat16'"),
        ({"dtype": "float16"}, "'dtype' is 'float16'"),
        ({"model_type": "qwen3_5_moe_text"}, "'model_type' is 'qwen3_5_moe_text'"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"rope_parameters": ROPE | {"rope_type": "yarn"}}, "scaled rotary embeddings.*'default'"),
        (
            {"layer_types": [LINEAR, "sliding_attention"] * 32},
            "layers of type 'sliding_attention'.*'linear_attention' and 'full_attention'",
        ),
    ],
)
def test_an_unsupported_feature_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(mkc.UnsupportedFeatureError, match=message):
        Config.from_hf(changed(**keys))


def test_config_errors_are_of_one_kind() -> None:
    with pytest.raises(mkc.ConfigError):
        Config.from_hf({"text_config": 3})


def test_model_files_import_the_public_names_only() -> None:
    folder = Path(models.qwen38.__file__).parent
    files = sorted(folder.rglob("*.py"))
    assert len(files) >= 2
    for file in files:
        for line in file.read_text().splitlines():
            if line.startswith(("import ", "from ")) and "mkc" in line:
                assert line == "import mkc", f"{file}: {line}"
            assert "jax" not in line, file
