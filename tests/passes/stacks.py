"""Random decoders: stacks of layers of different kinds and widths, one letter per layer.

A stack is what loops, loop borders and buffer lifetimes are made of; the letters decide which
regions the tracer finds. Every kind of layer is written with the public DSL only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies

import mkc
from mkc.ir.graph import Graph

DIM, CONTEXT = 128, 64


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Attributes:
    pattern: layers by letter, see `LAYERS`.
    taps: layers whose output the head reads too.
    """

    pattern: str
    vocab: int = 1024
    hidden: int = 256
    mlp: int = 1024
    heads: int = 8
    kv_heads: int = 2
    batch: int = 1
    taps: tuple[int, ...] = ()

    def graph(self) -> Graph:
        return mkc.trace(_decoder, name="stack", batch=self.batch, context=CONTEXT, config=self)


def _decoder(stack: Stack, step: mkc.Step) -> mkc.Outputs:
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [stack.vocab, stack.hidden]))
    kept = []
    for layer in mkc.layers(len(stack.pattern)):
        h = LAYERS[stack.pattern[layer.index]](stack, h, layer, step)
        if layer.index in stack.taps:
            kept.append(h)
    for one in kept:
        h = h + one
    h = mkc.rms_norm(h, mkc.param("norm.weight", [stack.hidden]), eps=1e-6)
    return mkc.next_token(h, mkc.param("head.weight", [stack.vocab, stack.hidden]))


def _mlp(width: int) -> Callable[[Stack, mkc.Tensor, mkc.Layer, mkc.Step], mkc.Tensor]:
    """A gated MLP `width` times as wide as the stack says: one exchange."""

    def layer_function(stack: Stack, h: mkc.Tensor, layer: mkc.Layer, step: mkc.Step) -> mkc.Tensor:
        mlp = mkc.axis(width * stack.mlp, "mlp")
        x = mkc.rms_norm(h, layer.param(f"norm{width}.weight", [stack.hidden]), eps=1e-6)
        gate = mkc.linear(x, layer.param(f"gate{width}.weight", [mlp, stack.hidden]))
        up = mkc.linear(x, layer.param(f"up{width}.weight", [mlp, stack.hidden]))
        down = layer.param(f"down{width}.weight", [stack.hidden, mlp])
        return h + mkc.linear(mkc.silu(gate) * up, down)

    return layer_function


def _attention(stack: Stack, h: mkc.Tensor, layer: mkc.Layer, step: mkc.Step) -> mkc.Tensor:
    """Grouped-query attention and an MLP: two exchanges."""
    q, k, v = (
        mkc.split_heads(mkc.linear(h, layer.param(f"{name}.weight", [heads, stack.hidden])))
        for name, heads in (
            ("q", mkc.heads(stack.heads, DIM)),
            ("k", mkc.heads(stack.kv_heads, DIM)),
            ("v", mkc.heads(stack.kv_heads, DIM)),
        )
    )
    cache = layer.kv_cache("kv", stack.kv_heads, DIM)
    o = mkc.merge_heads(mkc.attention(q, k, v, positions=step.positions, cache=cache, scale=0.1))
    out = layer.param("o.weight", [stack.hidden, mkc.heads(stack.heads, DIM)])
    return _mlp(1)(stack, h + mkc.linear(o, out), layer, step)


def _delta(stack: Stack, h: mkc.Tensor, layer: mkc.Layer, step: mkc.Step) -> mkc.Tensor:
    """Convolution, delta rule and its projections to a few columns: one exchange."""
    heads, gates = mkc.heads(stack.heads, DIM), mkc.heads(stack.heads, 1)
    channels = mkc.concat_axes([heads, heads, heads])
    qkv = mkc.linear(h, layer.param("qkv.weight", [channels, stack.hidden]))
    beta = mkc.linear(h, layer.param("beta.weight", [gates, stack.hidden]))
    decay = mkc.linear(h, layer.param("decay.weight", [gates, stack.hidden]))
    qkv = mkc.causal_conv(
        qkv,
        layer.param("conv.weight", [channels, 1, 4]),
        state=layer.state("conv", "conv", [3, channels]),
    )
    q, k, v = (mkc.split_heads(part) for part in mkc.split_parts(qkv))
    o = mkc.delta_rule(
        mkc.l2_norm(q, eps=1e-6),
        mkc.l2_norm(k, eps=1e-6),
        v,
        beta=mkc.sigmoid(beta),
        decay=mkc.negate(mkc.softplus(decay, dtype=mkc.F32)),
        state=layer.state("recurrent", "recurrent", [gates, DIM, DIM], mkc.F32),
    )
    out = layer.param("out.weight", [stack.hidden, heads])
    return h + mkc.linear(mkc.merge_heads(o), out)


def _plain(stack: Stack, h: mkc.Tensor, layer: mkc.Layer, step: mkc.Step) -> mkc.Tensor:
    """No residual and no norm: what comes out replaces what went in."""
    heads = mkc.heads(stack.heads, DIM)
    x = mkc.split_heads(mkc.linear(h, layer.param("in.weight", [heads, stack.hidden])))
    cos, sin = mkc.rotary_table(step.positions, theta=1e4, dim=DIM)
    x = mkc.merge_heads(mkc.rotary(x, cos, sin))
    return mkc.linear(x, layer.param("back.weight", [stack.hidden, heads]))


LAYERS = {"m": _mlp(1), "w": _mlp(3), "a": _attention, "d": _delta, "p": _plain}


def _pattern(parts: list[tuple[str, int]], times: int, tail: str) -> str:
    return "".join(letters * count for letters, count in parts) * times + tail


PATTERNS = strategies.builds(
    _pattern,
    strategies.lists(
        strategies.tuples(
            strategies.text(sorted(LAYERS), min_size=1, max_size=3), strategies.integers(1, 3)
        ),
        min_size=1,
        max_size=3,
    ),
    strategies.integers(1, 3),
    strategies.text(sorted(LAYERS), max_size=2),
)

STACKS = strategies.builds(
    Stack,
    pattern=PATTERNS,
    vocab=strategies.sampled_from([256, 1024, 4096]),
    hidden=strategies.sampled_from([256, 1024, 1280]),
    mlp=strategies.sampled_from([256, 1024, 2176]),
    batch=strategies.sampled_from([1, 3]),
)
