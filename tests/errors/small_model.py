"""A one-layer model with every dimension as an argument, to be compiled into what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

import mkc
from mkc.driver import CompileRequest
from mkc.driver import CompileResult
from mkc.driver import compile_graph


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Dimensions; the defaults compile for every target."""

    hidden: int = 256
    mlp: int = 512
    vocab: int = 512
    heads: int = 8
    kv_heads: int = 8
    dim: int = 128


def decoder(sizes: Sizes, step: mkc.Step) -> mkc.Outputs:
    """Embedding, one layer of attention and MLP, LM head."""
    hidden = sizes.hidden
    heads, kv_heads = mkc.heads(sizes.heads, sizes.dim), mkc.heads(sizes.kv_heads, sizes.dim)
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [sizes.vocab, hidden]))
    for layer in mkc.layers(1):
        x = mkc.rms_norm(h, layer.param("norm.weight", [hidden]), eps=1e-6)
        q, k, v = (
            mkc.split_heads(mkc.linear(x, layer.param(f"{name}.weight", [out, hidden])))
            for name, out in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        cache = layer.kv_cache("kv", sizes.kv_heads, sizes.dim)
        o = mkc.attention(q, k, v, positions=step.positions, cache=cache, scale=1.0)
        h = h + mkc.linear(mkc.merge_heads(o), layer.param("o.weight", [hidden, heads]))
        up = layer.param("up.weight", [mkc.axis(sizes.mlp, "mlp"), hidden])
        down = layer.param("down.weight", [hidden, sizes.mlp])
        h = h + mkc.linear(mkc.silu(mkc.linear(h, up)), down)
    return mkc.next_token(h, mkc.param("head.weight", [sizes.vocab, hidden]))


def compile_small(
    sizes: Sizes | None = None,
    *,
    target: str = "v6e:2x4",
    batch: int = 1,
    context: int = 256,
    tp: int | None = None,
    passes: str = "",
    rounds: int = 1,
    aot: bool = False,
) -> CompileResult:
    """Traces and compiles the model, without the TPU compiler unless `aot`."""
    config = sizes or Sizes()
    graph = mkc.trace(decoder, name="small", batch=batch, context=context, config=config)
    request = CompileRequest(
        graph=graph,
        target=target,
        tp=tp,
        passes=passes,
        rounds_per_launch=rounds,
        aot=aot,
        retrace=lambda n, positions: mkc.trace(
            decoder, name="small", batch=n, context=positions, config=config
        ),
    )
    return compile_graph(request)
