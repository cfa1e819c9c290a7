"""A small graph written out node by node: two blocks of two convolution layers and one attention.

It has every feature of the IR: nested regions with carries, numbered parameters, states, an axis of
several parts, a tied parameter that two ops read.
"""

from __future__ import annotations

from mkc.ir.graph import Block
from mkc.ir.graph import Carry
from mkc.ir.graph import Graph
from mkc.ir.graph import Location
from mkc.ir.graph import Node
from mkc.ir.graph import Param
from mkc.ir.graph import Repeat
from mkc.ir.graph import State
from mkc.ir.graph import StateKind
from mkc.ir.graph import Value
from mkc.ir.ops import Argmax
from mkc.ir.ops import Attention
from mkc.ir.ops import Binary
from mkc.ir.ops import BinaryKind
from mkc.ir.ops import CausalConv
from mkc.ir.ops import Embed
from mkc.ir.ops import Linear
from mkc.ir.ops import MergeHeads
from mkc.ir.ops import Op
from mkc.ir.ops import RmsNorm
from mkc.ir.ops import SplitHeads
from mkc.ir.ops import SplitParts
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis
from mkc.ir.types import concat_axes
from mkc.ir.types import heads
from mkc.ir.types import tensor

ROWS, CONTEXT, HIDDEN, VOCAB, HEADS, DIM, TAPS = 2, 32, 16, 64, 2, 8, 4

FLAT = heads(HEADS, DIM)
QKV = concat_axes([FLAT, FLAT, FLAT], name="qkv")
H = tensor(DType.BF16, axis(ROWS, "rows"), axis(HIDDEN, "hidden"))
FLAT_VALUE = tensor(DType.BF16, axis(ROWS, "rows"), FLAT)
HEADS_VALUE = tensor(DType.BF16, axis(ROWS, "rows"), HEADS, DIM)
TOKENS = tensor(DType.I32, axis(ROWS, "rows"))
CONV_LAYERS = (0, 1, 3, 4)
ATTENTION_LAYERS = (2, 5)


def small_graph() -> Graph:
    """The graph; tests edit it with `dataclasses.replace`."""
    return Graph(
        name="small",
        rows=ROWS,
        batch=ROWS,
        context=CONTEXT,
        inputs=(Value(name="tokens", type=TOKENS), Value(name="positions", type=TOKENS)),
        params={param.key: param for param in _params()},
        states={state.key: state for state in _states()},
        body=Block(items=(_embed(), _blocks(), *_head())),
        outputs={"next_token": "next", "logits": "logits"},
        metadata={"scheme": "none"},
    )


def _params() -> list[Param]:
    hidden = axis(HIDDEN, "hidden")

    def layer(key: str, indices: tuple[int, ...], type_: TensorType) -> Param:
        pattern = f"model.layers.{{index}}.{key}.weight"
        return Param(key=key, pattern=pattern, type=type_, indices=indices)

    return [
        Param(key="table", pattern="model.embed.weight", type=tensor(DType.BF16, VOCAB, hidden)),
        layer("norm", CONV_LAYERS, tensor(DType.BF16, hidden)),
        layer("conv", CONV_LAYERS, tensor(DType.BF16, hidden, 1, TAPS)),
        layer("qkv", ATTENTION_LAYERS, tensor(DType.BF16, QKV, hidden)),
        layer("out", ATTENTION_LAYERS, tensor(DType.BF16, hidden, FLAT)),
    ]


def _states() -> list[State]:
    def layer(key: str, kind: StateKind, indices: tuple[int, ...], type_: TensorType) -> State:
        pattern = f"layers.{{index}}.{key}"
        return State(key=key, pattern=pattern, kind=kind, type=type_, indices=indices)

    cache = tensor(DType.BF16, axis(CONTEXT, "context"), HEADS, DIM)
    history = tensor(DType.BF16, TAPS - 1, axis(HIDDEN, "hidden"))
    return [
        layer("history", StateKind.CONV, CONV_LAYERS, history),
        layer("keys", StateKind.KV_CACHE, ATTENTION_LAYERS, cache),
        layer("values", StateKind.KV_CACHE, ATTENTION_LAYERS, cache),
    ]


def _node(
    line: int, op: Op, operands: str, *results: tuple[str, TensorType], states: str = ""
) -> Node:
    """A node at `small.py:line`; `operands` and `states` are names between blanks."""
    return Node(
        op=op,
        operands=tuple(operands.split()),
        states=tuple(states.split()),
        results=tuple(Value(name=name, type=type_) for name, type_ in results),
        location=Location(file="small.py", line=line),
    )


def _embed() -> Node:
    return _node(1, Embed(), "tokens table", ("h", H))


def _carry(initial: str, argument: str, yielded: str, result: str) -> tuple[Carry, ...]:
    return (
        Carry(
            initial=initial,
            argument=Value(name=argument, type=H),
            yielded=yielded,
            result=Value(name=result, type=H),
        ),
    )


def _blocks() -> Repeat:
    add = Binary(function=BinaryKind.ADD)
    convolutions = Repeat(
        name="convolutions",
        count=2,
        carries=_carry("h.block", "h.conv", "h.added", "h.convolved"),
        body=Block(
            items=(
                _node(4, RmsNorm(eps=1e-6), "h.conv norm", ("normed", H)),
                _node(5, CausalConv(taps=TAPS), "normed conv", ("mixed", H), states="history"),
                _node(6, add, "h.conv mixed", ("h.added", H)),
            )
        ),
        location=Location(file="small.py", line=3),
    )
    parts = [(name, FLAT_VALUE) for name in ("q.flat", "k.flat", "v.flat")]
    qkv = tensor(DType.BF16, axis(ROWS, "rows"), QKV)
    attention = (
        _node(7, Linear(), "h.convolved qkv", ("projected", qkv)),
        _node(8, SplitParts(), "projected", *parts),
        _node(9, SplitHeads(), "q.flat", ("q", HEADS_VALUE)),
        _node(9, SplitHeads(), "k.flat", ("k", HEADS_VALUE)),
        _node(9, SplitHeads(), "v.flat", ("v", HEADS_VALUE)),
        _node(
            10,
            Attention(scale=DIM**-0.5),
            "q k v positions",
            ("attended", HEADS_VALUE),
            states="keys values",
        ),
        _node(11, MergeHeads(), "attended", ("merged", FLAT_VALUE)),
        _node(12, Linear(), "merged out", ("attention.out", H)),
        _node(13, add, "h.convolved attention.out", ("h.attended", H)),
    )
    return Repeat(
        name="blocks",
        count=2,
        carries=_carry("h", "h.block", "h.attended", "h.last"),
        body=Block(items=(convolutions, *attention)),
        location=Location(file="small.py", line=2),
    )


def _head() -> tuple[Node, ...]:
    logits = tensor(DType.F32, axis(ROWS, "rows"), VOCAB)
    return (
        _node(14, Linear(dtype=DType.F32), "h.last table", ("logits", logits)),
        _node(15, Argmax(), "logits", ("next", TOKENS)),
    )
