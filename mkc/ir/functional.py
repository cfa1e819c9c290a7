"""The operations that a model's author calls; `mkc.ir.ops` says what each one computes."""

from __future__ import annotations

from math import inf
from math import isfinite
from math import nan
from numbers import Real

from mkc.errors import TraceError
from mkc.ir.builder import KvCache
from mkc.ir.builder import Outputs
from mkc.ir.builder import StateRef
from mkc.ir.builder import Tensor
from mkc.ir.builder import apply
from mkc.ir.location import author_location
from mkc.ir.ops import Activation
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
from mkc.ir.ops import MergeHeads
from mkc.ir.ops import NormRounding
from mkc.ir.ops import NormWeight
from mkc.ir.ops import Op
from mkc.ir.ops import RmsNorm
from mkc.ir.ops import Rotary
from mkc.ir.ops import RotaryTable
from mkc.ir.ops import Scale
from mkc.ir.ops import Slice
from mkc.ir.ops import SplitHeads
from mkc.ir.ops import SplitParts
from mkc.ir.ops import Unary
from mkc.ir.types import DType


def _one(op: Op, *operands: Tensor, states: tuple[StateRef, ...] = ()) -> Tensor:
    (result,) = apply(op, *operands, states=states)
    return result


def _optional(dtype: DType | str | None) -> DType | None:
    return None if dtype is None else DType(dtype)


def _constant(op: str, name: str, value: float, *, least: float, above: bool = False) -> float:
    """A constant of an op, finite and not below `least`, or above it.

    Raises:
      TraceError: another value would make results NaN.
    """
    given: object = value
    number = float(given) if isinstance(given, Real) else nan
    if not isfinite(number) or number < least or (above and number == least):
        bound = "" if least == -inf else f" above {least}" if above else f" of at least {least}"
        raise TraceError(
            where=op,
            location=author_location(),
            problem=f"{name} is {value!r}",
            expected=f"a finite number{bound}",
            hint=f"Correct {name}",
        )
    return value


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """Rows of `table` [vocab, hidden] for `tokens` [rows] -> [rows, hidden]."""
    return _one(Embed(), tokens, table)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float,
    zero_centred: bool = False,
    rounding: NormRounding | str = NormRounding.ONCE,
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) times the weight, over the last axis.

    Args:
      zero_centred: the weight scales by `1 + w` instead of `w`.
      rounding: "once" after the weight, or "twice": also before it.
    """
    _constant("rms_norm", "eps", eps, least=0)
    scaling = NormWeight.ZERO_CENTRED if zero_centred else NormWeight.PLAIN
    return _one(RmsNorm(eps=eps, weight=scaling, rounding=NormRounding(rounding)), x, weight)


def l2_norm(x: Tensor, *, eps: float) -> Tensor:
    """x * rsqrt(sum(x^2) + eps) over the last axis, in f32."""
    return _one(L2Norm(eps=_constant("l2_norm", "eps", eps, least=0)), x)


def linear(x: Tensor, weight: Tensor, *, dtype: DType | str = DType.BF16) -> Tensor:
    """x [rows, in] @ weight [out, in]^T -> [rows, out]."""
    return _one(Linear(dtype=DType(dtype)), x, weight)


def split_heads(x: Tensor) -> Tensor:
    """[rows, heads * dim] -> [rows, heads, dim]."""
    return _one(SplitHeads(), x)


def merge_heads(x: Tensor) -> Tensor:
    """[rows, heads, dim] -> [rows, heads * dim]."""
    return _one(MergeHeads(), x)


def split_parts(x: Tensor) -> tuple[Tensor, ...]:
    """One tensor per part of the last axis."""
    return apply(SplitParts(), x)


def slice(x: Tensor, start: int, size: int) -> Tensor:
    """Elements start .. start + size of the last axis."""
    return _one(Slice(start=start, size=size), x)


def rotary_table(
    positions: Tensor, *, theta: float, dim: int, dtype: DType | str = DType.BF16
) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, dim / 2] of position * theta^(-2 i / dim)."""
    _constant("rotary_table", "theta", theta, least=0, above=True)
    cos, sin = apply(RotaryTable(theta=theta, dim=dim, dtype=DType(dtype)), positions)
    return cos, sin


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + d / 2) of the first d channels of x [rows, heads, dim]."""
    return _one(Rotary(), x, cos, sin)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    *,
    state: StateRef,
    activation: Activation | str = Activation.SILU,
) -> Tensor:
    """Depthwise convolution over the newest inputs; weight [channels, 1, taps], last tap newest."""
    taps = weight.shape[-1]
    op = CausalConv(taps=taps, activation=Activation(activation))
    return _one(op, x, weight, states=(state,))


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    decay: Tensor,
    state: StateRef,
    dtype: DType | str = DType.BF16,
) -> Tensor:
    """Gated delta rule: q, k f32 [rows, key heads, dk], v [rows, value heads, dv] -> like v.

    `beta` and `decay` (f32, the logarithm of what stays) are [rows, value heads]; a decay of each
    key channel is [rows, value heads, dk].
    """
    return _one(DeltaRule(dtype=DType(dtype)), q, k, v, beta, decay, states=(state,))


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, positions: Tensor, cache: KvCache, scale: float
) -> Tensor:
    """Appends k and v to the cache, then attends causally; q [rows, heads, dim] -> like q."""
    _constant("attention", "scale", scale, least=-inf)
    return _one(Attention(scale=scale), q, k, v, positions, states=(cache.key, cache.value))


def unary(function: Activation | str, x: Tensor, *, dtype: DType | str | None = None) -> Tensor:
    """An element-wise function in f32, rounded to x's dtype or `dtype`."""
    return _one(Unary(function=Activation(function), dtype=_optional(dtype)), x)


def silu(x: Tensor, *, dtype: DType | str | None = None) -> Tensor:
    """x * sigmoid(x)."""
    return unary(Activation.SILU, x, dtype=dtype)


def sigmoid(x: Tensor, *, dtype: DType | str | None = None) -> Tensor:
    """1 / (1 + e^-x)."""
    return unary(Activation.SIGMOID, x, dtype=dtype)


def softplus(x: Tensor, *, dtype: DType | str | None = None) -> Tensor:
    """ln(1 + e^x)."""
    return unary(Activation.SOFTPLUS, x, dtype=dtype)


def exp(x: Tensor, *, dtype: DType | str | None = None) -> Tensor:
    """e^x."""
    return unary(Activation.EXP, x, dtype=dtype)


def tanh(x: Tensor, *, dtype: DType | str | None = None) -> Tensor:
    """Hyperbolic tangent."""
    return unary(Activation.TANH, x, dtype=dtype)


def gelu_tanh(x: Tensor, *, dtype: DType | str | None = None) -> Tensor:
    """GELU in its tanh form."""
    return unary(Activation.GELU_TANH, x, dtype=dtype)


def negate(x: Tensor, *, dtype: DType | str | None = None) -> Tensor:
    """-x."""
    return unary(Activation.NEGATE, x, dtype=dtype)


def add(a: Tensor, b: Tensor, *, dtype: DType | str | None = None) -> Tensor:
    """a + b in f32, rounded to `dtype` or the wider of the two."""
    return _one(Binary(function=BinaryKind.ADD, dtype=_optional(dtype)), a, b)


def subtract(a: Tensor, b: Tensor, *, dtype: DType | str | None = None) -> Tensor:
    """a - b, as `add`."""
    return _one(Binary(function=BinaryKind.SUB, dtype=_optional(dtype)), a, b)


def multiply(a: Tensor, b: Tensor, *, dtype: DType | str | None = None) -> Tensor:
    """a * b, as `add`."""
    return _one(Binary(function=BinaryKind.MUL, dtype=_optional(dtype)), a, b)


def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor."""
    return _one(Scale(factor=_constant("scale", "factor", factor, least=-inf)), x)


def cast(x: Tensor, dtype: DType | str) -> Tensor:
    """x in another dtype."""
    return _one(Cast(dtype=DType(dtype)), x)


def argmax(x: Tensor) -> Tensor:
    """Index of the largest element of each row, the lowest on ties; i32 [rows]."""
    return _one(Argmax(), x)


def next_token(hidden: Tensor, lm_head: Tensor) -> Outputs:
    """Logits of `hidden` [rows, hidden] under `lm_head` [vocab, hidden], and their argmax."""
    logits = linear(hidden, lm_head)
    return Outputs(next_token=argmax(logits), logits=logits)
