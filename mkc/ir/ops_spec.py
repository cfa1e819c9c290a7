"""The operations of speculative rounds: taps, drafts, acceptance, states that are committed later.

As in `mkc.ir.ops`, a class says operands, states and results. Rows are those of the graph: T
consecutive rows for each of `batch` sequences. A row with a negative position is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mkc.ir.graph import StateKind
from mkc.ir.ops import Activation
from mkc.ir.ops import Op
from mkc.ir.types import DType


@dataclass(frozen=True, kw_only=True)
class Tap(Op):
    """x [rows, n]; state TAP [n] -> nothing: shows x to the end of the step."""

    mnemonic: ClassVar[str] = "tap"


@dataclass(frozen=True, kw_only=True)
class ReadTaps(Op):
    """positions i32 [rows]; states TAP [width] -> [rows, layers * width]: what some layers showed,
    side by side.

    Attributes:
      name: that the layers show it under.
      layers: in the order of the result.
      width, dtype: of one of them.
      numbers, instances: for each, which of the states it is in and which instance; filled in when
        the graph is built.
    """

    mnemonic: ClassVar[str] = "read_taps"
    whole_states: ClassVar[bool] = True
    name: str
    layers: tuple[int, ...]
    width: int
    dtype: DType = DType.BF16
    numbers: tuple[int, ...] = ()
    instances: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class KeptConv(Op):
    """u [rows, C], weight [C, 1, taps], kept i32 [batch]; states CONV [taps - 1, C], KEPT [T, C]
    -> [rows, C].

    The same values as `CausalConv`. Of the inputs of the last step, the first `kept` enter the
    convolution state now; those of this step become the new KEPT rows.
    """

    mnemonic: ClassVar[str] = "kept_conv"
    taps: int
    activation: Activation = Activation.SILU


@dataclass(frozen=True, kw_only=True)
class KeptDeltaRule(Op):
    """q, k f32 [rows, key heads, dk], v [rows, value heads, dv], beta [rows, value heads], decay
    f32 [rows, value heads] or [rows, value heads, dk], kept i32 [batch]; states RECURRENT S f32
    [value heads, dk, dv], KEPT k f32 [T, key heads, dk], KEPT u f32 [T, value heads, dv], KEPT
    decay f32 [T, ...] like a row of decay -> [rows, value heads, dv].

    The same values as `DeltaRule`, in the chunked form over the T rows, all in f32. First the
    state is committed with the first n = `kept` rows of the last step, D_i the sum of their decays
    0 .. i:
      S <- e^(D_n-1) S + sum_i<n e^(D_n-1 - D_i) k_i u_i^T
    Then, with D over this step's rows:
      u_i = beta_i (v_i - e^(D_i) S^T k_i - sum_j<i e^(D_i - D_j) (k_i . k_j) u_j)
      o_i = e^(D_i) S^T q_i + sum_j<=i e^(D_i - D_j) (q_i . k_j) u_j, rounded to `dtype`
    and k, u and decay become the new KEPT rows. S changes by the commit only. With a decay of each
    key channel, e^D multiplies the rows of S and the channels of k and of the sums in (k_i . k_j).
    """

    mnemonic: ClassVar[str] = "kept_delta_rule"
    dtype: DType = DType.BF16


@dataclass(frozen=True, kw_only=True)
class KeptPositions(Op):
    """positions i32 [rows], count i32 [batch] -> i32 [rows]: rows from `count` on are padding."""

    mnemonic: ClassVar[str] = "kept_positions"


@dataclass(frozen=True, kw_only=True)
class NextPositions(Op):
    """positions i32 [rows], count i32 [batch] -> i32 [rows]: of the rows of the next round.

    Row t of a sequence is at first position + count + t; padding from `context` on, and where the
    sequence has no row.
    """

    mnemonic: ClassVar[str] = "next_positions"
    context: int


@dataclass(frozen=True, kw_only=True)
class BlockTokens(Op):
    """anchor i32 [batch], positions i32 [rows] -> i32 [rows]: the anchor, then T - 1 times `mask`.

    Of the positions only the number of rows counts.
    """

    mnemonic: ClassVar[str] = "block_tokens"
    mask: int


@dataclass(frozen=True, kw_only=True)
class DynamicConv(Op):
    """x [rows, C], kernels [rows, sides * taps * C / group], base [sides, taps, C] -> like x.

    y[t, c] = sum_j (base[side, j, c] + kernels[t, side, j, c // group]) x[t - j, c], where j = 0 is
    the row itself and rows before the sequence's first one are zero. In f32, rounded once.

    Attributes:
      rows: of one sequence.
    """

    mnemonic: ClassVar[str] = "dynamic_conv"
    side: int
    group: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class CacheAppend(Op):
    """k, v [rows, kv heads, d], positions i32 [rows]; states KV_CACHE key, value -> nothing.

    Writes each row at its position; padding nowhere.
    """

    mnemonic: ClassVar[str] = "cache_append"


@dataclass(frozen=True, kw_only=True)
class BlockAttention(Op):
    """q [rows, heads, d], k, v [rows, kv heads, d], positions i32 [rows], context k and v [rows, kv
    heads, d], context positions i32 [rows]; states KV_CACHE key, value -> like q.

    Writes the context rows at their positions. A row of the block then attends to the cache before
    the block's first position, and to the rows of its block, which are not written. Scores and
    softmax in f32. Query head h reads key head h * kv_heads // heads.

    Attributes:
      window: keys nearer than this are seen, None for all.
      causal: whether a row sees only the rows of the block up to itself.
      anchored: whether the window is that of the block: every row sees the last `window` positions
        before the block's first one, and rows of the block whatever the window.
    """

    mnemonic: ClassVar[str] = "block_attention"
    scale: float
    window: int | None
    causal: bool
    anchored: bool = False

    @property
    def reach(self) -> int | None:
        """Keys before the block are seen that are nearer than this: to the row, or, when
        `anchored`, to the block's first row. None for all."""
        return self.window + 1 if self.anchored and self.window is not None else self.window


@dataclass(frozen=True, kw_only=True)
class TopK(Op):
    """x [rows, n] -> f32 [rows, k], i32 [rows, k]: the largest elements and where they are.

    In descending order, lowest indices first on ties.
    """

    mnemonic: ClassVar[str] = "top_k"
    k: int


@dataclass(frozen=True, kw_only=True)
class SelectorWalk(Op):
    """values f32 [rows, K], ids i32 [rows, K], hidden [rows, r], predecessor, successor [vocab, r],
    tokens i32 [rows], positions i32 [rows] and, to draw, temperature f32 [batch], seed i32 [batch,
    2] -> tokens i32 [rows], proposal f32 [rows, K].

    Chooses one candidate per row: row 0 of a sequence keeps its token; row t scores candidate j
    with values[t, j] + sum_r predecessor[token of row t - 1]_r hidden[t]_r successor[ids[t, j]]_r,
    in f32. At temperature 0, and without one, the best one is chosen, the first on ties, and its
    proposal is 1. Else the proposal is softmax(score / temperature) and the choice a draw from it,
    see `mkc.ir.counter_random`, stream DRAFT, at the row's position. `tokens` gives row 0.

    Attributes:
      rows: of one sequence.
    """

    mnemonic: ClassVar[str] = "selector_walk"
    rows: int


@dataclass(frozen=True, kw_only=True)
class Accept(Op):
    """logits [rows, vocab], tokens, positions i32 [rows]; to sample also temperature f32, top_k
    i32, top_p f32, min_p f32, each [batch], seed i32 [batch, 2]; when drafts are not certain also
    candidates i32 [rows, K], proposal f32 [rows, K]
    -> emitted i32 [rows], count i32 [batch], last i32 [batch].

    Row t's logits are for the token behind it. The token of row t >= 1 is a draft for its own
    position, drawn from q_t = `proposal` over `candidates`, or certain without them. With p_t from
    row t - 1: temperature 0, as well as none, accepts while the draft is p_t's largest logit
    (lowest id on ties), then emits that of the next row. Else, with p_t after temperature, top-k,
    min-p, top-p, accepts while u q_t(d) < p_t(d), then draws from max(p_t - q_t, 0), or from p_t
    where that is zero everywhere or no draft is left. u and the draw: `mkc.ir.counter_random`,
    streams ACCEPT and CHOICE, at the position of the token in question. Padding rows are no drafts.

    emitted holds `count` tokens of each sequence, -1 behind them; `last` is the last one. A
    sequence whose rows are all padding emits nothing.

    Attributes:
      rows: of one sequence.
    """

    mnemonic: ClassVar[str] = "accept"
    rows: int


SPEC_OPS: tuple[type[Op], ...] = (
    Accept,
    BlockAttention,
    BlockTokens,
    CacheAppend,
    DynamicConv,
    KeptConv,
    KeptDeltaRule,
    KeptPositions,
    NextPositions,
    ReadTaps,
    SelectorWalk,
    Tap,
    TopK,
)

# As `mkc.ir.register.STATE_KINDS`; taps that are read may be any number.
SPEC_STATE_KINDS: dict[type[Op], tuple[StateKind, ...]] = {
    BlockAttention: (StateKind.KV_CACHE, StateKind.KV_CACHE),
    CacheAppend: (StateKind.KV_CACHE, StateKind.KV_CACHE),
    KeptConv: (StateKind.CONV, StateKind.KEPT),
    KeptDeltaRule: (StateKind.RECURRENT, StateKind.KEPT, StateKind.KEPT, StateKind.KEPT),
    Tap: (StateKind.TAP,),
}
