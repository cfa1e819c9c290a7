"""A step whose tokens are chosen among allowed ones: masks as an input, applied to the logits.

The author's graph knows nothing of masks; a caller that needs them adds them. With all bits set
the step is the same, bit for bit. Where nothing is allowed all logits are minus infinity, and the
next token is the lowest id.
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
from mkc.ir.types import DType
from mkc.ir.types import axis
from mkc.ir.types import tensor

TOKEN_MASKS = "token_masks"  # name of the input


def mask_words(tokens: int) -> int:
    """Words of 32 bits that have a bit for each token."""
    return -(-tokens // MASK_BITS)


def with_token_masks(graph: Graph) -> Graph:
    """`graph` with the input `token_masks`, i32 [rows, words], as `MaskTokens` reads it.

    The outputs `next_token` and `logits` are those after masking.

    Raises:
      UnsupportedGraphError: the next token is not the largest one of the output `logits`.
    """
    logits, token = graph.outputs.get("logits"), graph.outputs.get("next_token")
    items = list(graph.body.items)
    place, argmax = next(
        (number, item)
        for number, item in enumerate(items)
        if isinstance(item, Node) and any(value.name == token for value in item.results)
    )
    if not isinstance(argmax.op, Argmax) or argmax.operands != (logits,):
        raise UnsupportedGraphError(
            op=argmax.op.mnemonic,
            location=argmax.location,
            problem="the next token is not the largest of the output 'logits', so a mask of tokens "
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
        location=argmax.location,
    )
    items[place : place + 1] = [masking, replace(argmax, operands=(masked.name,))]
    return replace(
        graph,
        inputs=(*graph.inputs, Value(name=TOKEN_MASKS, type=words)),
        body=Block(items=tuple(items)),
        outputs={**graph.outputs, "logits": masked.name},
    )
