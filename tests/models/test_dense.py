"""The example of a second family, against the same decoder written in plain numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import mkc
from mkc.ir.graph import Repeat
from mkc.ir.reference import compile_step
from mkc.ir.reference import initial_states
from mkc.ir.verify import verify
from models.examples import dense

type Doubles = NDArray[np.float64]

CONTEXT = 16
TOKENS = (7, 4000, 7, 12)


def graph_of(batch: int = 1) -> mkc.Graph:
    graph = mkc.trace(dense.decoder, name="dense", batch=batch, context=CONTEXT)
    verify(graph)
    return graph


def random_weights(graph: mkc.Graph) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(1)
    weights: dict[str, NDArray[Any]] = {}
    for param in graph.params.values():
        shape = param.type.shape
        for name in param.tensor_names():
            noise = random.standard_normal(shape)
            is_norm = len(shape) == 1
            value = 1 + 0.1 * noise if is_norm else noise / np.sqrt(shape[-1])
            weights[name] = value.astype(np.float32)
    return weights


def rms(x: Doubles, weight: Doubles) -> Doubles:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + dense.EPS) * weight


def rotate(x: Doubles, position: int) -> Doubles:
    """x [heads, dim] as complex pairs (i, i + dim / 2)."""
    half = dense.HEAD_DIM // 2
    angle = position * dense.THETA ** (-np.arange(half) / half)
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
    return np.concatenate([turned.real, turned.imag], axis=1)


def plain_decoder(weights: dict[str, NDArray[np.float32]], tokens: tuple[int, ...]) -> Doubles:
    """Logits after the last token, all positions kept in lists."""
    wide = {name: array.astype(np.float64) for name, array in weights.items()}
    cache: list[list[tuple[Doubles, Doubles]]] = [[] for _ in range(dense.LAYERS)]
    h = np.zeros(dense.HIDDEN)
    for position, token in enumerate(tokens):
        h = wide["model.embed_tokens.weight"][token]
        for n in range(dense.LAYERS):

            def layer(name: str, n: int = n) -> Doubles:
                return wide[f"model.layers.{n}.{name}.weight"]

            x = rms(h, layer("input_layernorm"))
            q, k, v = (
                (layer(f"self_attn.{name}_proj") @ x).reshape(-1, dense.HEAD_DIM) for name in "qkv"
            )
            cache[n].append((rotate(k, position), v))
            q = rotate(q, position)
            heads = []
            for head in range(dense.HEADS):
                kv = head // (dense.HEADS // dense.KV_HEADS)
                keys = np.stack([key[kv] for key, _ in cache[n]])
                values = np.stack([value[kv] for _, value in cache[n]])
                scores = np.exp(keys @ q[head] / np.sqrt(dense.HEAD_DIM))
                heads.append(scores @ values / scores.sum())
            h = h + layer("self_attn.o_proj") @ np.concatenate(heads)
            x = rms(h, layer("post_attention_layernorm"))
            gate, up = layer("mlp.gate_proj") @ x, layer("mlp.up_proj") @ x
            h = h + layer("mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * up)
    return wide["lm_head.weight"] @ rms(h, wide["model.norm.weight"])


def test_the_layers_are_one_region() -> None:
    graph = graph_of(batch=2)
    (region,) = (item for item in graph.body.items if isinstance(item, Repeat))
    assert region.count == dense.LAYERS
    assert all(
        one.indices == tuple(range(dense.LAYERS))
        for key, one in graph.params.items()
        if "layers" in key
    )


def test_logits_agree_with_plain_numpy() -> None:
    graph = graph_of()
    weights = random_weights(graph)
    step = compile_step(graph, weights, rounding="float32")
    states = initial_states(graph, "float32")
    for position, token in enumerate(TOKENS):
        result = step([token], [position], states)
        states = result.states
    expected = plain_decoder(weights, TOKENS)
    found = np.asarray(result.outputs["logits"][0], np.float64)
    # f32 over 8 layers; logits are about 1.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)
    assert expected.std() > 0.5
    assert int(result.outputs["next_token"][0]) == expected.argmax()


def test_roundings_stay_within_bf16_noise() -> None:
    graph = graph_of()
    weights = random_weights(graph)
    logits = []
    for rounding in ("float32", "reference"):
        step = compile_step(graph, weights, rounding=rounding)
        result = step([7], [0], initial_states(graph, rounding))
        logits.append(np.asarray(result.outputs["logits"][0], np.float64))
    difference = logits[0] - logits[1]
    # A few roundings of 2^-9 relative in each of 8 layers: visible, and below 5 % of the logits.
    assert 1e-3 < np.sqrt((difference**2).mean()) < 0.05 * logits[0].std()
