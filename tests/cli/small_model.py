"""A user's model for the tests of the command line: one layer, quickly compiled."""

from __future__ import annotations

import mkc

HIDDEN = 256
WIDE = 512
VOCAB = 2048

not_a_function = 3


def decoder(step: mkc.Step) -> mkc.Outputs:
    """Embedding, one MLP, head."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
    for layer in mkc.layers(1, prefix="layers.{index}."):
        x = mkc.rms_norm(h, layer.param("norm.weight", [HIDDEN]), eps=1e-6)
        up = mkc.silu(mkc.linear(x, layer.param("up.weight", [WIDE, HIDDEN])))
        h = h + mkc.linear(up, layer.param("down.weight", [HIDDEN, WIDE]))
    h = mkc.rms_norm(h, mkc.param("norm.weight", [HIDDEN]), eps=1e-6)
    return mkc.next_token(h, mkc.param("head.weight", [VOCAB, HIDDEN]))


def broken(step: mkc.Step) -> mkc.Outputs:
    """Raises an error of its own."""
    raise ValueError("of my own")
