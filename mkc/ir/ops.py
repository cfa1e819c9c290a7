"""The operations of the graph IR.

One op is one frozen dataclass that holds its attributes only; operands, states and results are in
the `Node`. Each class says its operands, states and results. `mnemonic` is its name in the text
form. The four facets (shape inference, reference meaning, cost, emission) are registered by op
type.

Rounding: every op computes in f32 and rounds once to the dtype of its result unless it says
otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from mkc.ir.types import DType


@dataclass(frozen=True, kw_only=True)
class Op:
    """Base of all operations.

    Attributes:
      whole_states: the op only reads its states, which other ops own, with all their instances.
    """

    mnemonic: ClassVar[str] = "op"
    whole_states: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Embed(Op):
    """tokens i32 [rows], table [vocab, hidden] -> [rows, hidden] in the table's dtype."""

    mnemonic: ClassVar[str] = "embed"


class NormWeight(StrEnum):
    """How a norm's weight scales: `w` or `1 + w`."""

    PLAIN = "plain"
    ZERO_CENTRED = "zero_centred"


class NormRounding(StrEnum):
    """`once`: after the weight. `twice`: the normalised value is rounded before the weight too."""

    ONCE = "once"
    TWICE = "twice"


@dataclass(frozen=True, kw_only=True)
class RmsNorm(Op):
    """x [..., n], weight [n] -> like x: x * rsqrt(mean(x^2) + eps), times the weight."""

    mnemonic: ClassVar[str] = "rms_norm"
    eps: float
    weight: NormWeight = NormWeight.PLAIN
    rounding: NormRounding = NormRounding.ONCE


@dataclass(frozen=True, kw_only=True)
class L2Norm(Op):
    """x [..., n] -> f32 [..., n]: x * rsqrt(sum(x^2) + eps)."""

    mnemonic: ClassVar[str] = "l2_norm"
    eps: float


@dataclass(frozen=True, kw_only=True)
class Linear(Op):
    """x [rows, K], weight [N, K] -> [rows, N] in `dtype`: x @ weight^T, f32 accumulation.

    The result's last axis is the weight's first axis, parts and units included.
    """

    mnemonic: ClassVar[str] = "linear"
    dtype: DType = DType.BF16


@dataclass(frozen=True, kw_only=True)
class SplitHeads(Op):
    """x [rows, heads * dim] whose last axis is one part -> [rows, heads, dim]."""

    mnemonic: ClassVar[str] = "split_heads"


@dataclass(frozen=True, kw_only=True)
class MergeHeads(Op):
    """x [rows, heads, dim] -> [rows, heads * dim], one part of `heads` units."""

    mnemonic: ClassVar[str] = "merge_heads"


@dataclass(frozen=True, kw_only=True)
class SplitParts(Op):
    """x [rows, axis of several parts] -> one [rows, part] per part, in order."""

    mnemonic: ClassVar[str] = "split_parts"


@dataclass(frozen=True, kw_only=True)
class Slice(Op):
    """x [..., n] -> [..., size]: elements start .. start + size of the last axis (not sharded)."""

    mnemonic: ClassVar[str] = "slice"
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class RotaryTable(Op):
    """positions i32 [rows] -> cos, sin, each [rows, dim / 2] in `dtype`.

    Angle i is position * theta^(-2 i / dim), computed in f32.
    """

    mnemonic: ClassVar[str] = "rotary_table"
    theta: float
    dim: int
    dtype: DType = DType.BF16


@dataclass(frozen=True, kw_only=True)
class Rotary(Op):
    """x [rows, heads, n], cos, sin [rows, d / 2] -> like x: the first d channels rotated.

    Pairs are (i, i + d / 2). The two products and their sum are each rounded to x's dtype.
    """

    mnemonic: ClassVar[str] = "rotary"


class Activation(StrEnum):
    """Element-wise functions."""

    NONE = "none"
    SILU = "silu"
    SIGMOID = "sigmoid"
    SOFTPLUS = "softplus"
    EXP = "exp"
    TANH = "tanh"
    GELU_TANH = "gelu_tanh"
    NEGATE = "negate"


@dataclass(frozen=True, kw_only=True)
class CausalConv(Op):
    """u [rows, C], weight [C, 1, taps]; state CONV [taps - 1, C] -> [rows, C].

    out = activation(sum_t weight[:, 0, t] * window[t]) over the newest `taps` inputs; the last tap
    multiplies the newest. Sum and activation in f32, rounded once. Several rows of a sequence come
    one after the other.
    """

    mnemonic: ClassVar[str] = "causal_conv"
    taps: int
    activation: Activation = Activation.SILU


@dataclass(frozen=True, kw_only=True)
class DeltaRule(Op):
    """q, k f32 [rows, key heads, dk], v [rows, value heads, dv], beta [rows, value heads],
    decay f32 [rows, value heads] or [rows, value heads, dk]; state RECURRENT f32 [value heads, dk,
    dv] -> [rows, value heads, dv].

    Per value head, with key head h * key_heads // value_heads, all in f32:
    S <- exp(decay) S;  p = S^T k;  S <- S + k (beta (v - p))^T;  o = S^T q, rounded to `dtype`.
    The decay is one number of a head, or one of each key channel, which is a row of S.
    Several rows of a sequence come one after the other.
    """

    mnemonic: ClassVar[str] = "delta_rule"
    dtype: DType = DType.BF16


@dataclass(frozen=True, kw_only=True)
class Attention(Op):
    """q [rows, heads, d], k, v [rows, kv heads, d], positions i32 [rows];
    states KV_CACHE key, value [context, kv heads, d] -> [rows, heads, d] in q's dtype.

    Writes k and v at each row's position, then attends to positions 0 .. position, those of the
    sequence's earlier rows included. Scores, scaling and softmax in f32. Query head h reads key
    head h * kv_heads // heads.
    """

    mnemonic: ClassVar[str] = "attention"
    scale: float


@dataclass(frozen=True, kw_only=True)
class Unary(Op):
    """x -> function(x), like x or in `dtype` when given."""

    mnemonic: ClassVar[str] = "unary"
    function: Activation
    dtype: DType | None = None


class BinaryKind(StrEnum):
    """Element-wise functions of two operands."""

    ADD = "add"
    SUB = "sub"
    MUL = "mul"


@dataclass(frozen=True, kw_only=True)
class Binary(Op):
    """a, b -> element-wise; b has a's shape or is a vector along a's last axis.

    The result has `dtype`, or the wider dtype of the two.
    """

    mnemonic: ClassVar[str] = "binary"
    function: BinaryKind
    dtype: DType | None = None


@dataclass(frozen=True, kw_only=True)
class Scale(Op):
    """x -> x * factor, like x."""

    mnemonic: ClassVar[str] = "scale"
    factor: float


@dataclass(frozen=True, kw_only=True)
class Cast(Op):
    """x -> x in `dtype`."""

    mnemonic: ClassVar[str] = "cast"
    dtype: DType


@dataclass(frozen=True, kw_only=True)
class Argmax(Op):
    """x [rows, n] -> i32 [rows]: index of the largest element, the lowest one on ties."""

    mnemonic: ClassVar[str] = "argmax"


@dataclass(frozen=True, kw_only=True)
class AllReduce(Op):
    """x f32 [rows, n], a partial sum per rank -> the sum over `ranks` in rank order, in `dtype`.

    Inserted by the sharding pass. The reference meaning on one device is a cast.
    """

    mnemonic: ClassVar[str] = "all_reduce"
    ranks: int
    dtype: DType = DType.BF16


@dataclass(frozen=True, kw_only=True)
class ShardedArgmax(Op):
    """x [rows, n] of each rank's columns -> i32 [rows]: argmax over all `ranks` shards.

    Column j of rank r is index r * n + j. Inserted by the sharding pass.
    """

    mnemonic: ClassVar[str] = "sharded_argmax"
    ranks: int


MASK_BITS = 32  # tokens of one word of a mask


@dataclass(frozen=True, kw_only=True)
class MaskTokens(Op):
    """x [rows, n], masks i32 [rows, words] -> x, minus infinity where a token is not allowed.

    Column j of rank r is token t = r * n + j, allowed when bit t % MASK_BITS of word t // MASK_BITS
    is set; there are as many words as that takes.

    Attributes:
      ranks: ranks that have n columns each.
    """

    mnemonic: ClassVar[str] = "mask_tokens"
    ranks: int = 1
