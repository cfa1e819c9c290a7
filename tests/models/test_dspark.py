"""The shipped drafter: its config, its size, and its rounds with the released target."""

from __future__ import annotations

from copy import deepcopy
from json import loads
from pathlib import Path
from typing import Any

import pytest

import mkc
import models.dspark
from mkc.ir.graph import StateKind
from mkc.ir.ops_spec import Accept
from mkc.ir.ops_spec import BlockAttention
from mkc.ir.ops_spec import KeptDeltaRule
from mkc.ir.ops_spec import ReadTaps
from mkc.ir.text import parse
from mkc.ir.text import print_graph
from mkc.ir.verify import verify
from mkc.spec import DRAFT_NAMESPACE
from mkc.spec import Round
from mkc.spec import block_round
from models.dspark import DRAFTER
from models.dspark import Config
from models.kimi_k3 import MODEL
from tests.spark_goldens import spark_case
from tests.spark_goldens import spark_round

FOLDER = Path(models.dspark.__file__).parent
SHIPPED: dict[str, Any] = loads((FOLDER / DRAFTER.default_config).read_text())
TARGET: dict[str, Any] = loads((FOLDER / MODEL.default_config).read_text())
TRUNK = "transformer_layer_config"


def changed(**keys: Any) -> dict[str, Any]:
    """The shipped config with keys replaced where they are; None removes one."""
    config = deepcopy(SHIPPED)
    for key, value in keys.items():
        part = config[TRUNK] if key in config[TRUNK] else config
        part.pop(key, None)
        if value is not None:
            part[key] = value
    return config


def released(context: int = 4096, **changes: Any) -> Round:
    return block_round(MODEL, TARGET, DRAFTER, SHIPPED | changes, batch=1, context=context)


def test_the_shipped_config_has_the_published_size() -> None:
    graph = released().graph
    verify(graph)
    assert parse(print_graph(graph)) == graph
    own = [one for key, one in graph.params.items() if key.startswith(DRAFT_NAMESPACE)]
    names = [name for one in own for name in one.tensor_names()]
    assert len(names) == len(set(names)) == 64
    assert sum(one.type.elements * one.instances for one in own) == 4_744_900_481


def test_caches_of_one_position() -> None:
    """Sixteen key heads of 64 in five layers."""
    graph = released(context=1000).prefill
    verify(graph)
    own = [one for key, one in graph.states.items() if key.startswith(DRAFT_NAMESPACE)]
    assert {one.kind for one in own} == {StateKind.KV_CACHE}
    assert sum(one.type.bytes * one.instances for one in own) == 1000 * 5 * 2 * 16 * 64 * 2


def test_kept_rows_of_the_released_target() -> None:
    """Eight rows of keys, updates and a decay of each channel: 3 x 12288 numbers in 69 layers."""
    graph = released().graph
    kept = [one for one in graph.states.values() if one.kind is StateKind.KEPT]
    found = sum(one.type.bytes * one.instances for one in kept if one.type.rank == 3)
    assert found == 69 * 8 * 3 * 12288 * 4
    assert any(isinstance(node.op, KeptDeltaRule) for node in graph.body.nodes())


def test_taps_enter_their_layers() -> None:
    """What is shown as 'input' of a layer is the stream in front of it, and nothing else reads it
    first."""
    (read,) = (one.op for one in released().graph.body.nodes() if isinstance(one.op, ReadTaps))
    assert (read.name, read.layers, read.width) == ("input", (24, 48, 72, 88, 92), 7168)


def test_the_block_is_causal_and_its_window_its_own() -> None:
    ops = {one.op for one in released().graph.body.nodes() if isinstance(one.op, BlockAttention)}
    assert {(one.window, one.causal, one.anchored) for one in ops} == {(2048, True, True)}


def test_drafts_are_certain() -> None:
    """Nothing to draw them from goes from round to round."""
    scheme = released()
    assert scheme.carried == ("tokens", "positions", "kept")
    (accept,) = (one for one in scheme.graph.body.nodes() if isinstance(one.op, Accept))
    assert len(accept.operands) == 8


@pytest.mark.parametrize("drafts", [1, 7, 8])
def test_the_number_of_drafts_can_be_chosen(drafts: int) -> None:
    assert spark_round(drafts=drafts).drafts == drafts


def test_seven_drafts_are_usual() -> None:
    assert Config.from_hf(SHIPPED).drafts == 7
    assert Config.from_hf(changed(block_size=4)).drafts == 4


# The config.


@pytest.mark.parametrize(
    "key",
    [
        TRUNK,
        "block_size",
        "mask_token_id",
        "markov_rank",
        "aux_hidden_state_layer_ids",
        "sliding_window",
        "layer_types",
        "rope_parameters",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(mkc.ConfigKeyError, match=f"'{key}' is missing"):
        Config.from_hf(changed(**{key: None}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": "7168"}, "'hidden_size' is '7168'"),
        ({"mask_token_id": 163840}, "'mask_token_id' is 163840; expected a token id below"),
        ({"aux_hidden_state_layer_ids": [24, 24]}, "a list of different numbers"),
        ({"aux_hidden_state_layer_ids": []}, "at least one layer of the target"),
        ({"layer_types": ["sliding_attention"] * 4}, "'layer_types' is .* list of 5 entries"),
        ({"num_attention_heads": 90}, "'num_attention_heads' is 90; .* which is 16"),
        ({"drafts": 9}, "'drafts' is 9; expected at most block_size, which is 8"),
        ({"confidence_threshold": 1.5}, "'confidence_threshold' is 1.5; expected a confidence"),
    ],
)
def test_a_wrong_value_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(mkc.ConfigValueError, match=message):
        Config.from_hf(changed(**keys))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"markov_head_type": "gated"}, "another Markov head"),
        ({"sample_from_anchor": False}, "'sample_from_anchor' is False"),
        ({"sliding_window_non_causal": True}, "blocks that are not causal"),
        ({"draft_vocab_size": 32000}, "a vocabulary smaller than the target's"),
        ({"enable_confidence_head": False}, "without a confidence head"),
        ({"attention_bias": True}, "biases in attention"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'rope_type' is 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
    ],
)
def test_an_unsupported_feature_is_named(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(mkc.UnsupportedFeatureError, match=message):
        Config.from_hf(changed(**keys))


def test_a_drafter_of_another_target_is_refused() -> None:
    with pytest.raises(mkc.MkcError, match="looks at layer 9, and the target shows layers 0 to 8"):
        spark_round(aux_hidden_state_layer_ids=[2, 9])
    trunk = spark_case().meta["config"][TRUNK]
    with pytest.raises(mkc.MkcError, match="it was made for an embedding"):
        spark_round(transformer_layer_config=trunk | {"vocab_size": 2048}, draft_vocab_size=2048)
    with pytest.raises(mkc.MkcError, match="at most the 64 positions of drafter 'dspark'"):
        spark_round(transformer_layer_config=trunk | {"max_position_embeddings": 64})
