"""EMIT facets: how each vector operation is written in the generated kernel.

A facet gets the op, its operands as Python expressions and the context, and answers one expression
per result. Inside a vector phase every value is an f32 array `[rows, lanes]`; a value of shape
[rows, heads, dim] has heads * dim lanes, a vector is `[1, n]`. The caller rounds bf16 results,
unless the facet says that they are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

from mkc.ir import ops
from mkc.ir.facets import EMIT
from mkc.ir.types import DType
from mkc.ir.types import TensorType


@dataclass(frozen=True, kw_only=True)
class Operand:
    """An operand as source: `code` is a Python expression, `type` the graph type on one rank."""

    code: str
    type: TensorType

    @property
    def heads(self) -> int:
        """Heads of a value [rows, heads, dim], 1 for others."""
        return self.type.shape[1] if self.type.rank == 3 else 1


@dataclass(frozen=True, kw_only=True)
class Emitted:
    """Source of a result; `exact` when it needs no rounding to its dtype."""

    code: str
    exact: bool = False


@dataclass(frozen=True, kw_only=True)
class EmitContext:
    """What a facet may use besides its operands.

    Attributes:
      results: types of the results on one rank.
      positions: scalar array of the positions of the step's rows.
      rows: number of rows that scalar arrays are for.
      states: expressions of the stream and the cursor of each of the op's states.
      constant: expression of the op's constant vector, None without one.
      taps: expressions of a convolution weight's vectors, one per tap.
    """

    results: tuple[TensorType, ...]
    positions: str
    rows: str
    states: tuple[tuple[str, str], ...] = ()
    constant: str | None = None
    taps: tuple[str, ...] = ()

    def column(self, positions: str) -> str:
        """Positions in scalar memory as a column."""
        return f"support.positions_column({positions}, {self.rows}, ROWS)"


FUNCTIONS = {
    ops.Activation.SILU: "support.silu",
    ops.Activation.SIGMOID: "support.sigmoid",
    ops.Activation.SOFTPLUS: "support.softplus",
    ops.Activation.EXP: "support.exp",
    ops.Activation.TANH: "support.tanh",
    ops.Activation.GELU_TANH: "support.gelu_tanh",
    ops.Activation.NEGATE: "support.negate",
}
SIGNS = {ops.BinaryKind.ADD: "+", ops.BinaryKind.SUB: "-", ops.BinaryKind.MUL: "*"}

type Operands = tuple[Operand, ...]


@EMIT.register(ops.RmsNorm)
def rms_norm(op: ops.RmsNorm, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """Over each head's lanes."""
    x, weight = operands
    heads = f", heads={x.heads}" if x.heads > 1 else ""
    round_inner = op.rounding is ops.NormRounding.TWICE and x.type.dtype is DType.BF16
    return (
        Emitted(
            code=f"support.rms_norm({x.code}, {weight.code}, eps={op.eps!r}, "
            f"zero_centred={op.weight is ops.NormWeight.ZERO_CENTRED}, "
            f"round_inner={round_inner}{heads})"
        ),
    )


@EMIT.register(ops.L2Norm)
def l2_norm(op: ops.L2Norm, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """Over each head's lanes."""
    (x,) = operands
    return (Emitted(code=f"support.l2_norm({x.code}, eps={op.eps!r}, heads={x.heads})"),)


@EMIT.register(ops.Slice)
def slice_heads(op: ops.Slice, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """Of every head."""
    (x,) = operands
    code = f"support.slice_heads({x.code}, {x.heads}, {op.start}, {op.size})"
    return (Emitted(code=code, exact=True),)


@EMIT.register(ops.RotaryTable)
def rotary_table(
    op: ops.RotaryTable, operands: Operands, context: EmitContext
) -> tuple[Emitted, ...]:
    """One call with two results."""
    column = context.column(operands[0].code)
    return (Emitted(code=f"support.rotary_table({column}, {context.constant})"),)


@EMIT.register(ops.Rotary)
def rotary(op: ops.Rotary, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """Rounds inside, as the op says."""
    x, cos, sin = operands
    rounds = x.type.dtype is DType.BF16
    code = f"support.rotary({x.code}, {cos.code}, {sin.code}, heads={x.heads}, round={rounds})"
    return (Emitted(code=code, exact=True),)


@EMIT.register(ops.CausalConv)
def causal_conv(
    op: ops.CausalConv, operands: Operands, context: EmitContext
) -> tuple[Emitted, ...]:
    """Reads and shifts the history in its stream slot."""
    ((stream, cursor),) = context.states
    activation = FUNCTIONS.get(op.activation, "None")
    taps = ", ".join(context.taps)
    code = (
        f"support.causal_conv({stream}, {cursor}, {operands[0].code}, ({taps}), "
        f"positions={context.column(context.positions)}, activation={activation})"
    )
    return (Emitted(code=code),)


@EMIT.register(ops.Unary)
def unary(op: ops.Unary, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """A function of each element."""
    (x,) = operands
    if op.function is ops.Activation.NONE:
        return (Emitted(code=x.code),)
    exact = op.function is ops.Activation.NEGATE and context.results[0].dtype is x.type.dtype
    return (Emitted(code=f"{FUNCTIONS[op.function]}({x.code})", exact=exact),)


@EMIT.register(ops.Binary)
def binary(op: ops.Binary, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """A vector along the last axis is repeated for every head."""
    a, b = operands
    right = b.code
    if a.type.rank == 3 and b.type.rank == 1:
        right = f"jnp.concatenate([{b.code}] * {a.heads}, axis=1)"
    return (Emitted(code=f"{a.code} {SIGNS[op.function]} {right}"),)


@EMIT.register(ops.Scale)
def scale(op: ops.Scale, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """By a constant."""
    return (Emitted(code=f"{operands[0].code} * {op.factor!r}"),)


@EMIT.register(ops.Cast)
def cast(op: ops.Cast, operands: Operands, context: EmitContext) -> tuple[Emitted, ...]:
    """Values are f32 in registers; rounding is all a cast does."""
    return (Emitted(code=operands[0].code, exact=op.dtype is DType.F32),)
