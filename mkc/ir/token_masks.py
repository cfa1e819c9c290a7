"""Tokens that are chosen among allowed ones: masks as an input, applied to the logits.

The author's graph knows nothing of masks; a caller that needs them adds them. With all bits set
a step or a round is the same, bit for bit. Where nothing is allowed all logits are minus infinity;
the next token of a step is then the lowest id, and a round that samples means nothing.

In a round the mask of a row says what may follow the row's token. Drafts are made without masks; a
draft that is not allowed has no probability in the row before it, and is never accepted.
"""

from __future__ import annotations

from dataclasses import replace

from mkc.errors import UnsupportedGraphError
from mkc.ir.graph import Block
from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.graph import Value
from mkc.ir.ops import MASK_BITS
from mkc.ir.ops import Argmax
from mkc.ir.ops import MaskTokens
from mkc.ir.ops_spec import Accept
from mkc.ir.types import DType
from mkc.ir.types import axis
from mkc.ir.types import tensor

TOKEN_MASKS = "token_masks"  # name of the input


def mask_words(tokens: int) -> int:
    """Words of 32 bits that have a bit for each token."""
    return -(-tokens // MASK_BITS)


def with_token_masks(graph: Graph) -> Graph:
    """`graph` with the input `token_masks`, i32 [rows, words], as `MaskTokens` reads it.

    The output `logits`, and what is chosen by them, are those after masking. A graph that has the
    input stays as it is.

    Args:
      graph: of a step that ends with the largest logit, or of a round that accepts drafts.

    Raises:
      UnsupportedGraphError: tokens are chosen by something else than the output `logits`.
    """
    if reads_token_masks(graph):
        return graph
    logits = graph.outputs.get("logits")
    items = list(graph.body.items)
    place, choice = _choice(graph)
    if choice.operands[0] != logits or not isinstance(choice.op, Argmax | Accept):
        raise UnsupportedGraphError(
            op=choice.op.mnemonic,
            location=choice.location,
            problem="the next token is not chosen by the output 'logits', so a mask of tokens "
            "has no meaning",
            hint="End the model with mkc.next_token(hidden, lm_head)",
        )
    source = next(
        value for item in graph.body.nodes() for value in item.results if value.name == logits
    )
    masked = Value(name=f"{source.name}_masked", type=source.type)
    words = tensor(DType.I32, source.type.axes[0], axis(mask_words(source.type.shape[1])))
    masking = Node(
        op=MaskTokens(),
        operands=(source.name, TOKEN_MASKS),
        results=(masked,),
        location=choice.location,
    )
    chosen = replace(choice, operands=(masked.name, *choice.operands[1:]))
    items[place : place + 1] = [masking, chosen]
    return replace(
        graph,
        inputs=(*graph.inputs, Value(name=TOKEN_MASKS, type=words)),
        body=Block(items=tuple(items)),
        outputs={**graph.outputs, "logits": masked.name},
    )


def reads_token_masks(graph: Graph) -> bool:
    """Whether a graph has the input `token_masks`."""
    return any(one.name == TOKEN_MASKS for one in graph.inputs)


def _choice(graph: Graph) -> tuple[int, Node]:
    """The node that chooses the next tokens, and its place in the body."""
    chosen = {graph.outputs.get(name) for name in ("next_token", "emitted")}
    return next(
        (number, item)
        for number, item in enumerate(graph.body.items)
        if isinstance(item, Node) and any(value.name in chosen for value in item.results)
    )
