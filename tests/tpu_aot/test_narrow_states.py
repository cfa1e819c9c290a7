"""Caches narrower than a vector register: XLA must not lay them out otherwise than the kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mkc
from mkc.driver import CompileRequest
from mkc.driver import compile_graph

VOCAB, HIDDEN, HEADS, WIDE = 4096, 512, 16, 1024


def decoder(head_dim: int, kv_heads: int) -> Callable[[mkc.Step], mkc.Outputs]:
    """Layers of attention and MLP; one key head of `head_dim` per rank."""

    def decode(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
        for layer in mkc.layers(4):
            x = mkc.rms_norm(h, layer.param("norm.weight", [HIDDEN]), eps=1e-6)
            q, k, v = (
                mkc.split_heads(
                    mkc.linear(x, layer.param(name, [mkc.heads(count, head_dim), HIDDEN]))
                )
                for name, count in (("q", HEADS), ("k", kv_heads), ("v", kv_heads))
            )
            a = mkc.attention(
                q,
                k,
                v,
                positions=step.positions,
                cache=layer.kv_cache("kv", kv_heads, head_dim),
                scale=head_dim**-0.5,
            )
            out = layer.param("o", [HIDDEN, mkc.heads(HEADS, head_dim)])
            h = h + mkc.linear(mkc.merge_heads(a), out)
        return mkc.next_token(h, mkc.param("head.weight", [VOCAB, HIDDEN]))

    return decode


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 8), (192, 8)])
def test_no_copies_around_the_launch(head_dim: int, kv_heads: int) -> None:
    graph = mkc.trace(decoder(head_dim, kv_heads), name="narrow", batch=2, context=512)
    aot = compile_graph(CompileRequest(graph=graph, target="tpu7x:2x2x1")).report["aot"]
    assert aot["custom_calls"] == 1
    assert aot["other_ops"] == []
