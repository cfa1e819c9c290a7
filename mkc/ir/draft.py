"""What the author of a drafter calls and gets; `mkc.ir.ops_spec` says what each op computes."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.ir import cost_markov
from mkc.ir import cost_spec
from mkc.ir import infer_markov
from mkc.ir import infer_spec
from mkc.ir.builder import KvCache
from mkc.ir.builder import Tensor
from mkc.ir.builder import apply
from mkc.ir.graph import StateKind
from mkc.ir.layers import Layer
from mkc.ir.ops_markov import CutDrafts
from mkc.ir.ops_markov import MarkovWalk
from mkc.ir.ops_spec import BlockAttention
from mkc.ir.ops_spec import BlockTokens
from mkc.ir.ops_spec import CacheAppend
from mkc.ir.ops_spec import DynamicConv
from mkc.ir.ops_spec import SelectorWalk
from mkc.ir.ops_spec import Tap
from mkc.ir.ops_spec import TopK

REGISTERED = (cost_markov, cost_spec, infer_markov, infer_spec)  # imported for what they register


@dataclass(frozen=True, kw_only=True)
class ContextStep:
    """Verified rows that a drafter remembers.

    Attributes:
      rows: of all sequences; `context` positions fit a cache.
      features: what the target's taps showed, [rows, taps * hidden].
      positions: i32 [rows]; negative for rows that are not to be remembered.
    """

    rows: int
    batch: int
    context: int
    features: Tensor
    positions: Tensor


@dataclass(frozen=True, kw_only=True)
class DraftStep:
    """A block that a drafter fills: row 0 of each sequence has its newest token, the anchor.

    Attributes:
      remembered: the rows that were verified just before, to be remembered first.
      anchor: i32 [batch].
      positions: i32 [rows]; that of the anchor, then those that drafts are wanted for.
      sampling: temperature f32 [batch] and seed i32 [batch, 2], or nothing: the best tokens.
      table, head: embedding and LM head of the target, [vocab, hidden].
    """

    rows: int
    batch: int
    remembered: ContextStep
    anchor: Tensor
    positions: Tensor
    sampling: tuple[Tensor, ...]
    table: Tensor
    head: Tensor

    @property
    def rows_per_sequence(self) -> int:
        return self.rows // self.batch


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """What a drafter proposes.

    Attributes:
      tokens: i32 [rows], row 0 of each sequence its anchor.
      candidates, proposal: i32 and f32 [rows, K]: what each token was drawn from; rows 0 mean
        nothing. None where drafts are certain.
      positions: i32 [rows], padding where the drafter rather drafts nothing; None for those of
        the step.
    """

    tokens: Tensor
    candidates: Tensor | None = None
    proposal: Tensor | None = None
    positions: Tensor | None = None


def tap(layer: Layer, name: str, x: Tensor) -> None:
    """Shows x [rows, n] of this layer to drafters; nothing without one."""
    if layer.trace.taps:
        state = layer.state(name, StateKind.TAP, x.type.axes[1:], x.dtype)
        apply(Tap(), x, states=(state,))


def block_tokens(step: DraftStep, *, mask: int) -> Tensor:
    """The anchor of each sequence, then `mask` for the rows behind it; i32 [rows]."""
    (tokens,) = apply(BlockTokens(mask=mask), step.anchor, step.positions)
    return tokens


def dynamic_conv(
    x: Tensor, kernels: Tensor, base: Tensor, *, side: int, group: int, rows: int
) -> Tensor:
    """Causal convolution in a block with kernels that depend on the row; x [rows, C] -> like x.

    Args:
      kernels: [rows, sides * taps * C / group], one number per group of channels.
      base: [sides, taps, C], added to them; tap 0 is the row itself.
      rows: of one sequence.
    """
    (result,) = apply(DynamicConv(side=side, group=group, rows=rows), x, kernels, base)
    return result


def append_cache(k: Tensor, v: Tensor, *, positions: Tensor, cache: KvCache) -> None:
    """Writes k, v [rows, kv heads, dim] at their positions; rows with a negative one nowhere."""
    apply(CacheAppend(), k, v, positions, states=(cache.key, cache.value))


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Tensor,
    context: tuple[Tensor, Tensor, Tensor],
    cache: KvCache,
    scale: float,
    window: int | None,
    causal: bool,
    anchored: bool = False,
) -> Tensor:
    """Attention of a block to a cache and to itself; q [rows, heads, dim] -> like q.

    Args:
      context: keys, values and positions that are written into the cache first.
      window: only keys nearer than this are seen.
      causal: a row of the block does not see those behind it.
      anchored: the window begins at the block's first row, for all of its rows.
    """
    op = BlockAttention(scale=scale, window=window, causal=causal, anchored=anchored)
    (result,) = apply(op, q, k, v, positions, *context, states=(cache.key, cache.value))
    return result


def top_k(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row f32 [rows, k], in descending order, and their indices."""
    values, ids = apply(TopK(k=k), x)
    return values, ids


def selector_walk(
    step: DraftStep,
    values: Tensor,
    ids: Tensor,
    hidden: Tensor,
    *,
    tokens: Tensor,
    predecessor: Tensor,
    successor: Tensor,
) -> Drafts:
    """Chooses one candidate per row, each depending on the one before it.

    Args:
      values, ids: candidates from `top_k`.
      hidden: [rows, rank]; the codebooks are [vocab, rank].
      tokens: row 0 of each sequence has its anchor.
    """
    chosen, proposal = apply(
        SelectorWalk(rows=step.rows_per_sequence),
        *(values, ids, hidden, predecessor, successor),
        *(tokens, step.positions, *step.sampling),
    )
    return Drafts(tokens=chosen, candidates=ids, proposal=proposal)


def markov_walk(
    step: DraftStep,
    logits: Tensor,
    *,
    tokens: Tensor,
    predecessor: Tensor,
    successor: Tensor,
    hidden: Tensor,
    head: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor]:
    """The best token behind each row, given the one before it: row t has that of row t - 1.

    Args:
      logits: [rows, vocab], corrected by the product of two rows of the tables [vocab, rank].
      tokens: row 0 of each sequence has its anchor.
      hidden, head, bias: [rows, n], [1, n + rank], [1]: what a draft is judged by.

    Returns:
      i32 [rows], and how sure each of them is, f32 [rows] from 0 to 1.
    """
    op = MarkovWalk(rows=step.rows_per_sequence)
    chosen, confidence = apply(op, logits, predecessor, successor, tokens, hidden, head, bias)
    return chosen, confidence


def cut_drafts(step: DraftStep, confidence: Tensor, *, threshold: float) -> Tensor:
    """Positions of the step, padding from the first draft on that is less sure; i32 [rows]."""
    op = CutDrafts(threshold=threshold, rows=step.rows_per_sequence)
    (positions,) = apply(op, step.positions, confidence)
    return positions
