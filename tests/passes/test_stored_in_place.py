"""Blocks are stored in place: what they and the stream were before cannot be read any more."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import mkc
from mkc.errors import UnsupportedGraphError
from tests.passes.lowering import lower

VOCAB, HIDDEN, LAYERS = 512, 256, 4

type Reader = Callable[[mkc.Tensor, mkc.StoredBlocks, Callable[..., mkc.Tensor]], mkc.Tensor]
"""What a layer makes of the stream and the blocks as they were before the store."""


def graph_of(read: Reader, *, late: bool) -> mkc.Graph:
    """Layers that read the old values in front of a store, or, `late`, behind it."""

    def decoder(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
        blocks = mkc.residual_blocks(h, 2, period=2)
        for layer in mkc.layers(LAYERS):
            stored, stream = mkc.store_block(blocks, h) if late else (blocks, h)
            seen = read(h, blocks, layer.param)
            blocks, h = (stored, stream) if late else mkc.store_block(blocks, h)
            h = h + seen
        return mkc.next_token(h, mkc.param("head.weight", [VOCAB, HIDDEN]))

    return mkc.trace(decoder, name="stored", batch=1, context=64)


def stream(h: mkc.Tensor, _: mkc.StoredBlocks, param: Callable[..., mkc.Tensor]) -> mkc.Tensor:
    return mkc.linear(h, param("stream.weight", [HIDDEN, HIDDEN]))


def half(h: mkc.Tensor, _: mkc.StoredBlocks, param: Callable[..., mkc.Tensor]) -> mkc.Tensor:
    """Lanes of the stream under another name."""
    lanes = mkc.slice(h, HIDDEN // 2, HIDDEN // 2)
    return mkc.linear(lanes, param("half.weight", [HIDDEN, HIDDEN // 2]))


def mixture(
    h: mkc.Tensor, blocks: mkc.StoredBlocks, param: Callable[..., mkc.Tensor]
) -> mkc.Tensor:
    norm, projection = param("norm.weight", [HIDDEN]), param("proj.weight", [1, HIDDEN])
    x = mkc.mix_blocks(blocks, h, norm=norm, projection=projection, eps=1e-5)
    return mkc.linear(x, param("mixed.weight", [HIDDEN, HIDDEN]))


@pytest.mark.parametrize("read", [stream, half, mixture])
def test_what_is_read_before_the_store(read: Reader) -> None:
    assert lower(graph_of(read, late=False), 1).program.ranks == 1


@pytest.mark.parametrize(
    ("read", "what"), [(stream, "stream"), (half, "stream"), (mixture, "blocks")]
)
def test_what_is_read_behind_it_is_refused(read: Reader, what: str) -> None:
    with pytest.raises(UnsupportedGraphError, match=rf"still reads the {what} from before") as one:
        lower(graph_of(read, late=True), 1)
    assert f"Read the {what} before the next one is stored" in str(one.value)


def test_lanes_that_were_named_before_the_store() -> None:
    """The slice stands in front of the store, what reads it behind."""

    def decoder(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [VOCAB, HIDDEN]))
        blocks = mkc.residual_blocks(h, 2)
        lanes = mkc.slice(h, 0, HIDDEN // 2)
        blocks, h = mkc.store_block(blocks, h)
        h = h + mkc.linear(lanes, mkc.param("half.weight", [HIDDEN, HIDDEN // 2]))
        return mkc.next_token(h, mkc.param("head.weight", [VOCAB, HIDDEN]))

    with pytest.raises(UnsupportedGraphError, match="still reads the stream from before"):
        lower(mkc.trace(decoder, name="stored", batch=1, context=64), 1)
