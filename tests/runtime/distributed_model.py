"""A one-layer model with attention and a checkpoint of it: compiled and loaded in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import mkc
from mkc.runtime.pack import DTYPES
from tests.runtime.text.checkpoints import byte_level_checkpoint
from tests.runtime.text.checkpoints import write_json

type Weights = dict[str, np.ndarray[Any, Any]]

HIDDEN = 128
WIDE = 256
HEADS = 4
KV_HEADS = 2  # fewer than the processes of a test
HEAD_DIM = 32
VOCAB = 416  # a share of it for every process
CONTEXT = 64


def decoder(config: Mapping[str, Any], step: mkc.Step) -> mkc.Outputs:
    """Embedding, one layer of attention and MLP, head."""
    heads, kv_heads = mkc.heads(HEADS, HEAD_DIM), mkc.heads(KV_HEADS, HEAD_DIM)
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
    for layer in mkc.layers(2, prefix="layers.{index}."):
        x = mkc.rms_norm(h, layer.param("norm.weight", [HIDDEN]), eps=1e-6)
        q, k, v = (
            mkc.split_heads(mkc.linear(x, layer.param(f"{name}.weight", [out, HIDDEN])))
            for name, out in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        cache = layer.kv_cache("kv", KV_HEADS, HEAD_DIM)
        o = mkc.attention(q, k, v, positions=step.positions, cache=cache, scale=HEAD_DIM**-0.5)
        h = h + mkc.linear(mkc.merge_heads(o), layer.param("o.weight", [HIDDEN, heads]))
        up = mkc.silu(mkc.linear(h, layer.param("up.weight", [WIDE, HIDDEN])))
        h = h + mkc.linear(up, layer.param("down.weight", [HIDDEN, WIDE]))
    return mkc.next_token(h, mkc.param("head.weight", [VOCAB, HIDDEN]))


def small_graph(batch: int) -> mkc.Graph:
    return mkc.trace(decoder, name="small", batch=batch, context=CONTEXT, config={})


def small_weights() -> Weights:
    return random_weights(small_graph(1))


def random_weights(graph: mkc.Graph) -> Weights:
    """Every tensor of a graph by name, in its dtype."""
    random = np.random.default_rng(1)
    found = {}
    for param in graph.params.values():
        for name in param.tensor_names():
            values = random.standard_normal(param.type.shape) * param.type.shape[-1] ** -0.5
            plain = 1 + values if "norm" in name else values
            found[name] = plain.astype(DTYPES[param.type.dtype])
    return found


def write_small_checkpoint(folder: Path) -> Path:
    """A Hugging Face folder with a byte-level tokenizer."""
    folder.mkdir(parents=True)
    save_file(small_weights(), folder / "model.safetensors")
    write_json(folder / "config.json", {"max_position_embeddings": CONTEXT})
    pipeline = byte_level_checkpoint(folder)
    missing = VOCAB - pipeline.get_vocab_size()
    pipeline.add_tokens([f"<more{number}>" for number in range(missing)])
    pipeline.save(str(folder / "tokenizer.json"))
    return folder
