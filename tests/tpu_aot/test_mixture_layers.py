"""Layers of Kimi K3 at full width on 32 devices, compiled by the real TPU compiler.

Depth repeats what is here: delta attention with a dense MLP, then with experts, then latent
attention with experts.
"""

from __future__ import annotations

from json import loads
from pathlib import Path

import pytest

from mkc.codegen_pallas.aot import compile_ahead
from mkc.codegen_pallas.source import kernel_source
from mkc.passes.p10_shard import Shard
from mkc.passes.pipeline import Pipeline
from mkc.targets import load_target
from models.kimi_k3 import MODEL

CONFIG = Path(__file__).parents[2] / "models" / MODEL.default_config
TARGET = load_target("tpu7x:2x2x4")
LAYERS = 3


@pytest.mark.long
def test_three_layers_are_one_custom_call() -> None:
    config = loads(CONFIG.read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] = LAYERS
    text["linear_attn_config"] |= {"full_attn_layers": [LAYERS], "kda_layers": [1, 2]}
    graph = MODEL.trace(config, batch=1, context=4096)
    lowered = Pipeline(shard=Shard(ranks=32)).run(graph, TARGET)
    source = kernel_source(lowered.program, lowered.steps, target=TARGET)
    assert TARGET.topology is not None
    result = compile_ahead(source, topology=TARGET.topology.full_name)
    assert result.ok, result.error
    assert (result.custom_calls, result.other_ops) == (1, ())
