"""Shape inference: result types of every op, and what is refused."""

from __future__ import annotations

import pytest

from mkc.errors import ShapeError
from mkc.errors import UnsupportedOpError
from mkc.ir.graph import Location
from mkc.ir.infer import infer
from mkc.ir.ops import Activation
from mkc.ir.ops import AllReduce
from mkc.ir.ops import Argmax
from mkc.ir.ops import Attention
from mkc.ir.ops import Binary
from mkc.ir.ops import BinaryKind
from mkc.ir.ops import Cast
from mkc.ir.ops import CausalConv
from mkc.ir.ops import DeltaRule
from mkc.ir.ops import Embed
from mkc.ir.ops import L2Norm
from mkc.ir.ops import Linear
from mkc.ir.ops import MaskTokens
from mkc.ir.ops import MergeHeads
from mkc.ir.ops import Op
from mkc.ir.ops import RmsNorm
from mkc.ir.ops import Rotary
from mkc.ir.ops import RotaryTable
from mkc.ir.ops import Scale
from mkc.ir.ops import ShardedArgmax
from mkc.ir.ops import Slice
from mkc.ir.ops import SplitHeads
from mkc.ir.ops import SplitParts
from mkc.ir.ops import Unary
from mkc.ir.register import BUILT_IN
from mkc.ir.types import Axis
from mkc.ir.types import DType
from mkc.ir.types import Part
from mkc.ir.types import TensorType
from mkc.ir.types import concat_axes
from mkc.ir.types import heads
from mkc.ir.types import tensor

BF16, F32, I32 = DType.BF16, DType.F32, DType.I32
ROWS = 2
KEYS, VALUES = heads(2, 8), heads(6, 4)
QKV = concat_axes([KEYS, KEYS, VALUES])
TOKENS = tensor(I32, ROWS)
DELTA = DeltaRule()
DELTA_TYPES = (
    tensor(F32, ROWS, 2, 8),
    tensor(F32, ROWS, 2, 8),
    tensor(BF16, ROWS, 6, 4),
    tensor(BF16, ROWS, 6),
    tensor(F32, ROWS, 6),
)
MEMORY = tensor(F32, 6, 8, 4)
ATTENTION = Attention(scale=1.0)
QUERY, KEY = tensor(BF16, ROWS, 4, 8), tensor(BF16, ROWS, 2, 8)
CACHE = tensor(BF16, 32, 2, 8)
ADD = Binary(function=BinaryKind.ADD)

type Types = tuple[TensorType, ...]

CASES: list[tuple[Op, Types, Types, Types]] = [
    (Embed(), (TOKENS, tensor(BF16, 16, 4)), (), (tensor(BF16, ROWS, 4),)),
    (RmsNorm(eps=1e-6), (QUERY, tensor(F32, 8)), (), (QUERY,)),
    (L2Norm(eps=1e-6), (QUERY,), (), (tensor(F32, ROWS, 4, 8),)),
    (Linear(), (tensor(BF16, ROWS, 4), tensor(BF16, QKV, 4)), (), (tensor(BF16, ROWS, QKV),)),
    (
        Linear(dtype=F32),
        (tensor(BF16, ROWS, VALUES), tensor(BF16, 5, VALUES)),
        (),
        (tensor(F32, ROWS, 5),),
    ),
    (SplitHeads(), (tensor(BF16, ROWS, VALUES),), (), (tensor(BF16, ROWS, 6, 4),)),
    (MergeHeads(), (tensor(BF16, ROWS, 6, 4),), (), (tensor(BF16, ROWS, VALUES),)),
    (
        SplitParts(),
        (tensor(BF16, ROWS, QKV),),
        (),
        (tensor(BF16, ROWS, KEYS), tensor(BF16, ROWS, KEYS), tensor(BF16, ROWS, VALUES)),
    ),
    (Slice(start=2, size=5), (QUERY,), (), (tensor(BF16, ROWS, 4, 5),)),
    (RotaryTable(theta=1e4, dim=6), (TOKENS,), (), (tensor(BF16, ROWS, 3),) * 2),
    (Rotary(), (QUERY, tensor(BF16, ROWS, 2), tensor(BF16, ROWS, 2)), (), (QUERY,)),
    (
        CausalConv(taps=4),
        (tensor(BF16, ROWS, QKV), tensor(BF16, QKV, 1, 4)),
        (tensor(BF16, 3, QKV),),
        (tensor(BF16, ROWS, QKV),),
    ),
    (DELTA, DELTA_TYPES, (MEMORY,), (tensor(BF16, ROWS, 6, 4),)),
    (ATTENTION, (QUERY, KEY, KEY, TOKENS), (CACHE, CACHE), (QUERY,)),
    (Unary(function=Activation.EXP, dtype=F32), (KEY,), (), (tensor(F32, ROWS, 2, 8),)),
    (Unary(function=Activation.EXP), (KEY,), (), (KEY,)),
    (ADD, (KEY, tensor(F32, 8)), (), (tensor(F32, ROWS, 2, 8),)),
    (Binary(function=BinaryKind.MUL, dtype=BF16), (KEY, tensor(F32, 8)), (), (KEY,)),
    (ADD, (TOKENS, TOKENS), (), (TOKENS,)),
    (Scale(factor=2.0), (KEY,), (), (KEY,)),
    (Cast(dtype=F32), (KEY,), (), (tensor(F32, ROWS, 2, 8),)),
    (Argmax(), (tensor(BF16, ROWS, 9),), (), (TOKENS,)),
    (AllReduce(ranks=2), (tensor(F32, ROWS, 9),), (), (tensor(BF16, ROWS, 9),)),
    (ShardedArgmax(ranks=2), (tensor(BF16, ROWS, 9),), (), (TOKENS,)),
    (
        MaskTokens(ranks=4),
        (tensor(BF16, ROWS, 9), tensor(I32, ROWS, 2)),
        (),
        (tensor(BF16, ROWS, 9),),
    ),
]


def plain(types: Types) -> list[tuple[DType, list[tuple[Part, ...]]]]:
    """Types without the names of axes, which do not matter."""
    return [(one.dtype, [axis.parts for axis in one.axes]) for one in types]


@pytest.mark.parametrize(
    ("op", "operands", "states", "results"), CASES, ids=lambda one: getattr(one, "mnemonic", "")
)
def test_result_types(op: Op, operands: Types, states: Types, results: Types) -> None:
    assert plain(infer(op, operands, states)) == plain(results)


def test_every_built_in_op_has_a_case() -> None:
    assert {type(case[0]) for case in CASES} == set(BUILT_IN)


@pytest.mark.parametrize(
    ("op", "operands", "states", "results"), CASES, ids=lambda one: getattr(one, "mnemonic", "")
)
def test_a_missing_operand_is_refused(
    op: Op, operands: Types, states: Types, results: Types
) -> None:
    with pytest.raises(ShapeError, match=f"^{op.mnemonic}: expected .*, got {len(operands) - 1}"):
        infer(op, operands[:-1], states)


REFUSED: list[tuple[Op, Types, Types, str]] = [
    (Embed(), (tensor(F32, ROWS), tensor(BF16, 16, 4)), (), "dtype i32"),
    (RmsNorm(eps=1e-6), (QUERY, tensor(F32, 7)), (), "weight of size 8"),
    (Linear(), (tensor(BF16, ROWS, 4), tensor(BF16, 5, 3)), (), r"in = 4, .*got bf16\[5, 3\]"),
    (Linear(), (QUERY, tensor(BF16, 5, 8)), (), r"x of shape \[rows, in\]"),
    (
        Linear(),
        (tensor(BF16, ROWS, heads(3, 8)), tensor(BF16, 5, VALUES)),
        (),
        "like the last axis of x, 3 x 8, got 6 x 4",
    ),
    (SplitHeads(), (tensor(BF16, ROWS, QKV),), (), r"one part .*got 2 x 8 \+ 2 x 8 \+ 6 x 4"),
    (MergeHeads(), (tensor(BF16, ROWS, VALUES, 4),), (), "axis of heads .*got 6 x 4"),
    (Slice(start=2, size=7), (QUERY,), (), "start 2, size 7"),
    (Slice(start=0, size=8), (tensor(BF16, ROWS, VALUES),), (), "plain last axis"),
    (RotaryTable(theta=1e4, dim=5), (TOKENS,), (), "even"),
    (RotaryTable(theta=1e4, dim=6), (tensor(F32, ROWS),), (), "positions i32"),
    (Rotary(), (QUERY, tensor(BF16, ROWS, 5), tensor(BF16, ROWS, 5)), (), "at most 8 channels"),
    (Rotary(), (QUERY, tensor(BF16, ROWS, 2), tensor(BF16, ROWS, 3)), (), "sin like cos"),
    (
        CausalConv(taps=3),
        (tensor(BF16, ROWS, QKV), tensor(BF16, QKV, 1, 4)),
        (tensor(BF16, 3, QKV),),
        r"weight of shape \(56, 1, 3\)",
    ),
    (
        CausalConv(taps=4),
        (tensor(BF16, ROWS, QKV), tensor(BF16, QKV, 1, 4)),
        (tensor(BF16, 4, QKV),),
        r"state of shape \(3, 56\)",
    ),
    (
        CausalConv(taps=4),
        (tensor(BF16, ROWS, QKV), tensor(BF16, 56, 1, 4)),
        (tensor(BF16, 3, QKV),),
        "divides like x",
    ),
    (DELTA, DELTA_TYPES, (tensor(BF16, 6, 8, 4),), r"state f32 .*\(6, 8, 4\)"),
    (DELTA, (*DELTA_TYPES[:4], tensor(BF16, ROWS, 6)), (MEMORY,), "decay of dtype f32"),
    (DELTA, (*DELTA_TYPES[:3], tensor(BF16, ROWS, 2), DELTA_TYPES[4]), (MEMORY,), "beta of shape"),
    (
        DELTA,
        (*DELTA_TYPES[:2], tensor(BF16, ROWS, 5, 4), *DELTA_TYPES[3:]),
        (MEMORY,),
        "2 key heads divide",
    ),
    (ATTENTION, (tensor(BF16, ROWS, 3, 8), KEY, KEY, TOKENS), (CACHE, CACHE), "2 kv heads divide"),
    (ATTENTION, (QUERY, KEY, KEY, TOKENS), (CACHE, tensor(F32, 32, 2, 8)), "value cache bf16"),
    (ATTENTION, (QUERY, KEY, QUERY, TOKENS), (CACHE, CACHE), "v of the shape of k"),
    (ADD, (KEY, QUERY), (), "b of the shape of a"),
    (ADD, (TOKENS, tensor(F32, ROWS)), (), "mixes with i32"),
    (
        ADD,
        (tensor(BF16, ROWS, VALUES), tensor(BF16, ROWS, heads(3, 8))),
        (),
        "axes divide like those of a, 6 x 4, got 3 x 8",
    ),
    (Cast(dtype=F32), (KEY,), (MEMORY,), "no states"),
]


@pytest.mark.parametrize(("op", "operands", "states", "message"), REFUSED)
def test_operands_that_do_not_fit(op: Op, operands: Types, states: Types, message: str) -> None:
    with pytest.raises(ShapeError, match=f"^model.py:7: {op.mnemonic}: .*{message}"):
        infer(op, operands, states, Location(file="model.py", line=7))


def test_an_op_without_inference_is_named() -> None:
    class Unknown(Op):
        mnemonic = "unknown"

    with pytest.raises(UnsupportedOpError, match=r"model\.py:7: op 'unknown' has no shape"):
        infer(Unknown(), (), (), Location(file="model.py", line=7))


def test_a_part_is_kept_by_name_only() -> None:
    """The name of an axis is for messages: it does not make axes differ."""
    assert Axis(parts=(Part(count=4),), name="a").same_layout(Axis(parts=(Part(count=4),)))
