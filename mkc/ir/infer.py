"""Shape inference: the result types of every op from the types of its operands and states.

A function raises `ShapeError` when the types do not fit; `infer` adds the author's place.
"""

from __future__ import annotations

from dataclasses import replace

from mkc.errors import ShapeError
from mkc.errors import UnsupportedOpError
from mkc.ir.facets import INFER
from mkc.ir.graph import Location
from mkc.ir.ops import MASK_BITS
from mkc.ir.ops import AllReduce
from mkc.ir.ops import Argmax
from mkc.ir.ops import Attention
from mkc.ir.ops import Binary
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
from mkc.ir.types import Axis
from mkc.ir.types import DType
from mkc.ir.types import TensorType
from mkc.ir.types import axis

type Types = tuple[TensorType, ...]


def infer(
    op: Op, operand_types: Types, state_types: Types = (), location: Location | None = None
) -> Types:
    """Result types of `op`.

    Raises:
      ShapeError: the operands do not fit together; names `location`.
      UnsupportedOpError: no inference function is registered for the op.
    """
    function = INFER.find(op)
    if function is None:
        raise UnsupportedOpError(op=op.mnemonic, facet=INFER.name, location=location)
    try:
        result: Types = function(op, operand_types, state_types)
    except ShapeError as error:
        if error.location is not None or location is None:
            raise
        raise error.at(location) from None
    return result


def require(condition: bool, op: Op, expected: str, got: object, hint: str) -> None:
    """Raises `ShapeError` unless `condition` holds."""
    if not condition:
        raise ShapeError(op=op.mnemonic, location=None, expected=expected, got=str(got), hint=hint)


def take(op: Op, types: Types, count: int, what: str) -> Types:
    """`types`, which must be `count` many; `what` lists them in order."""
    require(
        len(types) == count,
        op,
        f"{count} of: {what}",
        f"{len(types)}",
        f"Pass exactly {what}",
    )
    return types


def no_states(op: Op, types: Types) -> None:
    require(not types, op, "no states", f"{len(types)} states", "Remove the states")


def require_rank(op: Op, name: str, type_: TensorType, rank: int, form: str) -> None:
    require(
        type_.rank == rank,
        op,
        f"{name} of shape {form}",
        type_,
        f"Give {name} {rank} axes: {form}",
    )


def require_rows(op: Op, first: TensorType, name: str, other: TensorType) -> None:
    require(
        first.axes[0].size == other.axes[0].size,
        op,
        f"{name} with {first.axes[0].size} rows",
        other,
        "Use values of the same step",
    )


def is_plain(one: Axis) -> bool:
    """A single part of single elements: it may be divided anywhere."""
    return len(one.parts) == 1 and one.parts[0].unit == 1


@INFER.register(Embed)
def _embed(op: Embed, operands: Types, states: Types) -> Types:
    tokens, table = take(op, operands, 2, "tokens, table")
    no_states(op, states)
    require_rank(op, "tokens", tokens, 1, "[rows]")
    require_rank(op, "table", table, 2, "[vocab, hidden]")
    require(
        tokens.dtype is DType.I32, op, "tokens of dtype i32", tokens, "Pass the tokens of the step"
    )
    return (TensorType(dtype=table.dtype, axes=(tokens.axes[0], table.axes[1])),)


@INFER.register(RmsNorm)
def _rms_norm(op: RmsNorm, operands: Types, states: Types) -> Types:
    x, weight = take(op, operands, 2, "x, weight")
    no_states(op, states)
    require_rank(op, "weight", weight, 1, "[n]")
    require(
        x.axes[-1].size == weight.axes[0].size,
        op,
        f"a weight of size {x.axes[-1].size}, the last axis of x {x}",
        weight,
        "Declare the weight with the size of the axis that is normalised",
    )
    return (x,)


@INFER.register(L2Norm)
def _l2_norm(op: L2Norm, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    no_states(op, states)
    return (TensorType(dtype=DType.F32, axes=x.axes),)


@INFER.register(Linear)
def _linear(op: Linear, operands: Types, states: Types) -> Types:
    x, weight = take(op, operands, 2, "x, weight")
    no_states(op, states)
    require_rank(op, "x", x, 2, "[rows, in]")
    require_rank(op, "weight", weight, 2, "[out, in]")
    out_axis, in_axis = weight.axes
    require(
        x.axes[1].size == in_axis.size,
        op,
        f"a weight [out, in] with in = {x.axes[1].size}, the last axis of x {x}",
        weight,
        "Correct the weight's second axis, or feed a value of that width",
    )
    require(
        x.axes[1].same_layout(in_axis) or is_plain(in_axis),
        op,
        f"a weight whose second axis divides like the last axis of x, {describe(x.axes[1])}",
        describe(in_axis),
        "Declare the second axis with the same heads, or as a plain size",
    )
    return (TensorType(dtype=op.dtype, axes=(x.axes[0], out_axis)),)


def describe(one: Axis) -> str:
    """`16 x 128 + 48 x 128`: the parts of an axis."""
    return " + ".join(
        f"{part.count} x {part.unit}" if part.unit != 1 else f"{part.count}" for part in one.parts
    )


@INFER.register(SplitHeads)
def _split_heads(op: SplitHeads, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    no_states(op, states)
    require_rank(op, "x", x, 2, "[rows, heads * dim]")
    require(
        len(x.axes[1].parts) == 1,
        op,
        "a last axis of one part (heads of equal size)",
        describe(x.axes[1]),
        "Take the parts apart with mkc.split_parts first",
    )
    part = x.axes[1].parts[0]
    split = Axis(parts=(replace(part, unit=1),), name="heads")
    return (TensorType(dtype=x.dtype, axes=(x.axes[0], split, axis(part.unit, "dim"))),)


@INFER.register(MergeHeads)
def _merge_heads(op: MergeHeads, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    no_states(op, states)
    require_rank(op, "x", x, 3, "[rows, heads, dim]")
    require(
        is_plain(x.axes[1]),
        op,
        "x with an axis of heads as mkc.split_heads makes it",
        describe(x.axes[1]),
        "Merge the heads of one part at a time",
    )
    merged = replace(x.axes[1].parts[0], unit=x.axes[2].size)
    return (TensorType(dtype=x.dtype, axes=(x.axes[0], Axis(parts=(merged,), name="heads"))),)


@INFER.register(SplitParts)
def _split_parts(op: SplitParts, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    no_states(op, states)
    require_rank(op, "x", x, 2, "[rows, parts]")
    return tuple(
        TensorType(dtype=x.dtype, axes=(x.axes[0], Axis(parts=(part,)))) for part in x.axes[1].parts
    )


@INFER.register(Slice)
def _slice(op: Slice, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    no_states(op, states)
    last = x.axes[-1]
    require(
        is_plain(last),
        op,
        "a plain last axis",
        describe(last),
        "Use mkc.split_parts or mkc.split_heads on an axis of heads",
    )
    require(
        op.start >= 0 and op.size > 0 and op.start + op.size <= last.size,
        op,
        f"0 <= start and start + size <= {last.size}, the last axis of x {x}",
        f"start {op.start}, size {op.size}",
        "Correct start and size",
    )
    return (TensorType(dtype=x.dtype, axes=(*x.axes[:-1], axis(op.size, last.name))),)


@INFER.register(RotaryTable)
def _rotary_table(op: RotaryTable, operands: Types, states: Types) -> Types:
    (positions,) = take(op, operands, 1, "positions")
    no_states(op, states)
    require_positions(op, positions)
    require(
        op.dim > 0 and op.dim % 2 == 0, op, "an even, positive dim", op.dim, "Rotate whole pairs"
    )
    table = TensorType(dtype=op.dtype, axes=(positions.axes[0], axis(op.dim // 2)))
    return (table, table)


def require_positions(op: Op, positions: TensorType) -> None:
    require(
        positions.rank == 1 and positions.dtype is DType.I32,
        op,
        "positions i32 [rows]",
        positions,
        "Pass the positions of the step",
    )


@INFER.register(Rotary)
def _rotary(op: Rotary, operands: Types, states: Types) -> Types:
    x, cos, sin = take(op, operands, 3, "x, cos, sin")
    no_states(op, states)
    require_rank(op, "x", x, 3, "[rows, heads, dim]")
    require_rank(op, "cos", cos, 2, "[rows, rotated / 2]")
    require(cos == sin, op, f"sin like cos {cos}", sin, "Pass both results of one mkc.rotary_table")
    require_rows(op, x, "cos", cos)
    require(
        2 * cos.axes[1].size <= x.axes[2].size,
        op,
        f"tables for at most {x.axes[2].size} channels, the last axis of x {x}",
        f"{2 * cos.axes[1].size} channels",
        "Lower dim of mkc.rotary_table",
    )
    return (x,)


@INFER.register(CausalConv)
def _causal_conv(op: CausalConv, operands: Types, states: Types) -> Types:
    x, weight = take(op, operands, 2, "x, weight")
    (history,) = take(op, states, 1, "the convolution state")
    require_rank(op, "x", x, 2, "[rows, channels]")
    channels = x.axes[1]
    require(
        weight.shape == (channels.size, 1, op.taps) and weight.axes[0].same_layout(channels),
        op,
        f"a weight of shape ({channels.size}, 1, {op.taps}) that divides like x, "
        f"{describe(channels)}",
        weight,
        "Declare the weight with the channel axis of the projection, 1 and the number of taps",
    )
    require(
        history.shape == (op.taps - 1, channels.size) and history.axes[1].same_layout(channels),
        op,
        f"a state of shape ({op.taps - 1}, {channels.size}) that divides like x, "
        f"{describe(channels)}",
        history,
        "Declare the state with taps - 1 rows of the channel axis of the projection",
    )
    require(
        history.dtype is x.dtype, op, f"a state of dtype {x.dtype}", history, "Give it x's dtype"
    )
    return (x,)


@INFER.register(DeltaRule)
def _delta_rule(op: DeltaRule, operands: Types, states: Types) -> Types:
    q, k, v, beta, decay = take(op, operands, 5, "q, k, v, beta, decay")
    (memory,) = take(op, states, 1, "the recurrent state")
    require_rank(op, "q", q, 3, "[rows, key heads, key dim]")
    require_rank(op, "v", v, 3, "[rows, value heads, value dim]")
    require(q == k, op, f"k like q {q}", k, "q and k have the same heads")
    require(q.dtype is DType.F32, op, "q and k of dtype f32", q, "Normalise or cast them to f32")
    require_rows(op, q, "v", v)
    key_heads, value_heads = q.axes[1].size, v.axes[1].size
    require(
        value_heads % key_heads == 0,
        op,
        f"a number of value heads that {key_heads} key heads divide",
        value_heads,
        "Change the head counts",
    )
    gate_shape = (v.axes[0].size, value_heads)
    require(
        beta.shape == gate_shape,
        op,
        f"beta of shape [rows, value heads] = {gate_shape}",
        beta,
        "One number per value head",
    )
    require(
        decay.shape in (gate_shape, (*gate_shape, q.axes[2].size)),
        op,
        f"decay of shape [rows, value heads] = {gate_shape}, or [rows, value heads, key dim]",
        decay,
        "One number per value head, or per channel of its key",
    )
    require(decay.dtype is DType.F32, op, "decay of dtype f32", decay, "Compute it in f32")
    wanted = (value_heads, q.axes[2].size, v.axes[2].size)
    require(
        memory.shape == wanted and memory.dtype is DType.F32,
        op,
        f"a state f32 of shape [value heads, key dim, value dim] = {wanted}",
        memory,
        "Correct the axes of the state",
    )
    return (TensorType(dtype=op.dtype, axes=v.axes),)


@INFER.register(Attention)
def _attention(op: Attention, operands: Types, states: Types) -> Types:
    q, k, v, positions = take(op, operands, 4, "q, k, v, positions")
    key_cache, value_cache = take(op, states, 2, "key cache, value cache")
    require_rank(op, "q", q, 3, "[rows, heads, dim]")
    require_rank(op, "k", k, 3, "[rows, kv heads, dim]")
    require(k.shape == v.shape, op, f"v of the shape of k {k}", v, "k and v share heads and dim")
    require_rows(op, q, "k", k)
    require_positions(op, positions)
    require(
        q.axes[2].size == k.axes[2].size,
        op,
        f"k with head dim {q.axes[2].size}",
        k,
        "q and k must have one head dim",
    )
    require(
        q.axes[1].size % k.axes[1].size == 0,
        op,
        f"a number of query heads that {k.axes[1].size} kv heads divide",
        q.axes[1].size,
        "Change the head counts",
    )
    for name, cache, value in (("key", key_cache, k), ("value", value_cache, v)):
        require(
            cache.rank == 3 and cache.shape[1:] == value.shape[1:] and cache.dtype is value.dtype,
            op,
            f"a {name} cache {value.dtype} [context, {value.shape[1]}, {value.shape[2]}]",
            cache,
            "Create it with layer.kv_cache(name, kv_heads, head_dim)",
        )
    return (q,)


@INFER.register(Unary)
def _unary(op: Unary, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    no_states(op, states)
    return (TensorType(dtype=op.dtype or x.dtype, axes=x.axes),)


# An order of precision; other dtypes do not mix.
_WIDTH = {DType.BF16: 0, DType.F32: 1}


@INFER.register(Binary)
def _binary(op: Binary, operands: Types, states: Types) -> Types:
    a, b = take(op, operands, 2, "a, b")
    no_states(op, states)
    is_vector = b.rank == 1 and a.rank >= 1 and b.axes[0].size == a.axes[-1].size
    require(
        a.shape == b.shape or is_vector,
        op,
        f"b of the shape of a {a}, or a vector along its last axis",
        b,
        "Put the larger operand first, or split the heads of both",
    )
    for mine, other in zip(a.axes[::-1], b.axes[::-1], strict=False):
        require(
            mine.same_layout(other) or is_plain(other) or is_plain(mine),
            op,
            f"b whose axes divide like those of a, {describe(mine)}",
            describe(other),
            "Split the heads of both operands",
        )
    require(
        a.dtype is b.dtype or (a.dtype in _WIDTH and b.dtype in _WIDTH),
        op,
        f"b of a dtype that mixes with {a.dtype}",
        b,
        "Cast one of them",
    )
    if op.dtype is not None:
        return (TensorType(dtype=op.dtype, axes=a.axes),)
    if a.dtype not in _WIDTH:
        return (a,)
    wider = max(a.dtype, b.dtype, key=lambda dtype: _WIDTH[dtype])
    return (TensorType(dtype=wider, axes=a.axes),)


@INFER.register(Scale)
def _scale(op: Scale, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    no_states(op, states)
    return (x,)


@INFER.register(Cast)
def _cast(op: Cast, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    no_states(op, states)
    return (TensorType(dtype=op.dtype, axes=x.axes),)


@INFER.register(Argmax)
@INFER.register(ShardedArgmax)
def _argmax(op: Argmax | ShardedArgmax, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    no_states(op, states)
    require_rank(op, "x", x, 2, "[rows, n]")
    return (TensorType(dtype=DType.I32, axes=(x.axes[0],)),)


@INFER.register(AllReduce)
def _all_reduce(op: AllReduce, operands: Types, states: Types) -> Types:
    (x,) = take(op, operands, 1, "x")
    no_states(op, states)
    return (TensorType(dtype=op.dtype, axes=x.axes),)


@INFER.register(MaskTokens)
def _mask_tokens(op: MaskTokens, operands: Types, states: Types) -> Types:
    x, masks = take(op, operands, 2, "x, masks")
    no_states(op, states)
    require_rank(op, "x", x, 2, "[rows, n]")
    words = (x.shape[0], -(-op.ranks * x.shape[1] // MASK_BITS))
    require(
        masks.dtype is DType.I32 and masks.shape == words,
        op,
        f"masks i32[{words[0]}, {words[1]}], a bit for each token",
        masks,
        "Give each row the bits of all tokens",
    )
    return (x,)
