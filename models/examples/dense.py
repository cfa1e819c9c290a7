"""A small dense decoder in the style of Llama: grouped-query attention, SwiGLU, rotary positions.

Compile it with `mkc compile models/examples/dense.py:decoder`. docs/define-a-model.md explains it.
To make it yours, change the sizes and the parameter names to those of your checkpoint.
"""

from __future__ import annotations

import mkc

HIDDEN = 512
LAYERS = 8
HEADS = 8
KV_HEADS = 4
HEAD_DIM = 128
MLP = 1536
VOCAB = 4096
THETA = 500_000.0
EPS = 1e-5


def decoder(step: mkc.Step) -> mkc.Outputs:
    """One decode step: next token and logits for every row."""
    table = mkc.param("model.embed_tokens.weight", [VOCAB, HIDDEN])
    cos, sin = mkc.rotary_table(step.positions, theta=THETA, dim=HEAD_DIM)
    h = mkc.embed(step.tokens, table)
    for layer in mkc.layers(LAYERS, prefix="model.layers.{index}."):
        x = norm(h, layer.param("input_layernorm.weight", [HIDDEN]))
        h = h + attention(x, layer, step, cos, sin)
        x = norm(h, layer.param("post_attention_layernorm.weight", [HIDDEN]))
        h = h + mlp(x, layer)
    h = norm(h, mkc.param("model.norm.weight", [HIDDEN]))
    return mkc.next_token(h, mkc.param("lm_head.weight", [VOCAB, HIDDEN]))


def norm(x: mkc.Tensor, weight: mkc.Tensor) -> mkc.Tensor:
    """RMS norm that rounds before and after the weight, as Llama does."""
    return mkc.rms_norm(x, weight, eps=EPS, rounding="twice")


def attention(
    x: mkc.Tensor, layer: mkc.Layer, step: mkc.Step, cos: mkc.Tensor, sin: mkc.Tensor
) -> mkc.Tensor:
    """Causal attention over the cache: HEADS query heads share KV_HEADS keys and values."""
    query = mkc.heads(HEADS, HEAD_DIM)
    kv = mkc.heads(KV_HEADS, HEAD_DIM)
    q = mkc.split_heads(mkc.linear(x, layer.param("self_attn.q_proj.weight", [query, HIDDEN])))
    k = mkc.split_heads(mkc.linear(x, layer.param("self_attn.k_proj.weight", [kv, HIDDEN])))
    v = mkc.split_heads(mkc.linear(x, layer.param("self_attn.v_proj.weight", [kv, HIDDEN])))
    o = mkc.attention(
        mkc.rotary(q, cos, sin),
        mkc.rotary(k, cos, sin),
        v,
        positions=step.positions,
        cache=layer.kv_cache("self_attn.kv", KV_HEADS, HEAD_DIM),
        scale=HEAD_DIM**-0.5,
    )
    o_proj = layer.param("self_attn.o_proj.weight", [HIDDEN, query])
    return mkc.linear(mkc.merge_heads(o), o_proj)


def mlp(x: mkc.Tensor, layer: mkc.Layer) -> mkc.Tensor:
    """SwiGLU: silu(gate(x)) * up(x), then down."""
    gate = mkc.linear(x, layer.param("mlp.gate_proj.weight", [MLP, HIDDEN]))
    up = mkc.linear(x, layer.param("mlp.up_proj.weight", [MLP, HIDDEN]))
    return mkc.linear(mkc.silu(gate) * up, layer.param("mlp.down_proj.weight", [HIDDEN, MLP]))
