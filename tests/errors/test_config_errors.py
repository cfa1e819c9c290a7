"""Configs of the shipped model with one thing wrong: the key, what was expected, what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import models
from mkc.errors import ConfigKeyError
from mkc.errors import ConfigValueError
from mkc.errors import UnsupportedFeatureError
from models.qwen38 import MODEL
from tests.errors.expect import refused

CONFIG = Path(models.__path__[0]) / MODEL.default_config


def load(config: dict[str, Any]) -> None:
    MODEL.load_config(config)


def shipped() -> dict[str, Any]:
    config: dict[str, Any] = json.loads(CONFIG.read_text(encoding="utf-8"))
    return config


def section(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The object of the config that holds `key`."""
    text: dict[str, Any] = config.get("text_config", config)
    holders = (config, text, text["rope_parameters"])
    (found,) = (one for one in holders[1:] if key in one)
    return found


def without(key: str) -> dict[str, Any]:
    config = shipped()
    del section(config, key)[key]
    return config


def changed(key: str, value: object) -> dict[str, Any]:
    config = shipped()
    section(config, key)[key] = value
    return config


def added(key: str, value: object) -> dict[str, Any]:
    config = shipped()
    config.get("text_config", config)[key] = value
    return config


def test_the_shipped_config_is_right() -> None:
    load(shipped())


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("hidden_size", "a positive integer"),
        ("intermediate_size", "a positive integer"),
        ("vocab_size", "a positive integer"),
        ("num_hidden_layers", "a positive integer"),
        ("num_attention_heads", "a positive integer"),
        ("num_key_value_heads", "a positive integer"),
        ("head_dim", "a positive integer"),
        ("linear_num_key_heads", "a positive integer"),
        ("linear_num_value_heads", "a positive integer"),
        ("linear_key_head_dim", "a positive integer"),
        ("linear_value_head_dim", "a positive integer"),
        ("linear_conv_kernel_dim", "an integer of at least 2"),
        ("rms_norm_eps", "a positive number"),
        ("rope_theta", "a positive number"),
        ("rope_parameters", "an object with rope_type"),
        ("layer_types", "a list of 64 entries"),
    ],
)
def test_missing_key(key: str, expected: str) -> None:
    with refused(ConfigKeyError, f"key '{key}' is missing", expected, f"Add '{key}'"):
        load(without(key))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hidden_size", 0, "a positive integer"),
        ("hidden_size", "5120", "a positive integer"),
        ("vocab_size", True, "a positive integer"),
        ("head_dim", 256.0, "a positive integer"),
        ("rms_norm_eps", -1e-6, "a positive number"),
        ("rope_theta", None, "a positive number"),
        ("num_key_value_heads", 5, "a multiple of num_key_value_heads"),
        ("linear_num_key_heads", 7, "a multiple of linear_num_key_heads"),
        ("partial_rotary_factor", 1.5, "at most 1"),
        ("layer_types", ["full_attention"], "a list of 64 entries"),
        ("rope_parameters", [], "an object"),
    ],
)
def test_wrong_value(key: str, value: object, expected: str) -> None:
    # A head count is checked against the number of groups, and the message names the head count.
    named = {
        "num_key_value_heads": ("num_attention_heads", 24),
        "linear_num_key_heads": ("linear_num_value_heads", 48),
    }
    shown, got = named.get(key, (key, value))
    with refused(ConfigValueError, f"key '{shown}' is {got!r}", expected):
        load(changed(key, value))


@pytest.mark.parametrize(
    ("key", "value", "feature", "supported"),
    [
        ("attention_bias", True, "biases in attention", "False"),
        ("hidden_act", "gelu", "another MLP activation", "'silu'"),
        ("model_type", "llama", "another architecture", "'qwen3_5'"),
        ("attn_output_gate", False, "without an output gate", "True"),
        ("quantization_config", {"quant_method": "fp8"}, "quantised weights", "no such key"),
    ],
)
def test_unsupported_feature(key: str, value: object, feature: str, supported: str) -> None:
    with refused(
        UnsupportedFeatureError, f"key '{key}' is {value!r}", feature, f"Supported: {supported}"
    ):
        load(added(key, value))


def test_layers_of_an_unknown_type() -> None:
    kinds = ["sliding_attention"] * 64
    with refused(UnsupportedFeatureError, "'layer_types'", "'sliding_attention'", "linear_attent"):
        load(changed("layer_types", kinds))


def test_scaled_rotary_embeddings() -> None:
    with refused(UnsupportedFeatureError, "'rope_type'", "'yarn'", "scaled rotary", "'default'"):
        load(changed("rope_type", "yarn"))
