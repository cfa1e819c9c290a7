"""Phases that only rounds of speculative schemes have; see `mkc.schedule.program`.

Scalars are named by their `ScalarArray`. Rows are T for each sequence, one sequence behind the
other; a row with a negative position is padding, a sequence whose first row is padding is idle and
keeps every bit of its states.
"""

from __future__ import annotations

from dataclasses import dataclass

from mkc.ir.graph import Node
from mkc.schedule.exchange_plan import Part
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import View


@dataclass(frozen=True, kw_only=True)
class KeptDeltaRulePhase(Phase):
    """The delta rule over the rows of every sequence, after the commit of what was accepted.

    Attributes:
      state, kept_k, kept_u, kept_decay: streams, one item for each sequence; all are changed in
        place.
      kept: scalars [batch], how many of the kept rows are committed.
      positions: scalars [rows].
      channels, rounds: as for `DeltaRulePhase`.
    """

    state: str
    kept_k: str
    kept_u: str
    kept_decay: str
    kept: str
    positions: str
    q: View
    k: View
    v: View
    beta: View
    decay: View
    output: View
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    channels: bool = False
    rounds: bool = True


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """Rows that enter a cache and are not those of the block: `positions` are scalars [rows]."""

    k: View
    v: View
    positions: str


@dataclass(frozen=True, kw_only=True)
class RowsAttentionPhase(Phase):
    """Attention of several rows per sequence to a cache and to one another.

    Tiles of the cache hold positions before the round's first one. Without `remembered` rows the
    rows themselves enter the cache. With them those enter the cache and are seen by all rows of the
    block; the block's own keys are seen and not written.

    Attributes:
      first: scalars [rows]; the round's first position of sequence s is entry s * T.
      positions: scalars [rows], of the block.
      causal: a row sees only the rows of its block up to itself.
      window: keys nearer than this are seen, None for all.
      anchored: nearer to the block's first row; its own rows are seen whatever the window.
      rounds: the output is rounded to bf16.
    """

    cache: str
    first: str
    positions: str
    q: View
    k: View
    v: View
    remembered: Remembered | None
    output: View
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    causal: bool
    window: int | None
    rounds: bool
    anchored: bool = False


@dataclass(frozen=True, kw_only=True)
class TapPhase(Phase):
    """Stores what a layer shows in its place of the tap buffer.

    Attributes:
      counter: name of the cursor that counts the executions.
      width: lanes of one place.
      places: place of every execution, in order; those that nobody reads share the last place.
    """

    counter: str
    source: View
    buffer: str
    width: int
    places: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class AllGatherPhase(Phase):
    """Every output is a part of all ranks, side by side; all parts travel together.

    Attributes:
      algorithm: `gather` in bf16 or `gather_f32`.
      exchange: name of the receive buffers.
      meets, part: as for `AllReducePhase`.
    """

    algorithm: str
    exchange: str
    parts: tuple[View, ...]
    outputs: tuple[View, ...]
    meets: bool
    part: Part = Part.WHOLE


@dataclass(frozen=True, kw_only=True)
class TopKPhase(Phase):
    """The `k` largest logits of each row over all ranks' columns and their indices.

    Attributes:
      columns: of this rank that count.
      values, ids: f32 and i32, in descending order, lowest indices first on ties.
      exchange, meets: as for `ArgmaxPhase`.
    """

    logits: View
    columns: int
    k: int
    values: View
    ids: View
    exchange: str | None
    meets: bool


@dataclass(frozen=True, kw_only=True)
class SampledAccept:
    """How acceptance samples; see `mkc.codegen_pallas.support.sampled_accept`.

    Attributes:
      temperature, top_k, top_p, min_p, seed: scalar operands.
      forced: scalars [rows], what a sequence has to emit.
      candidates, proposal: VMEM arrays of carried rows; empty for drafts that are certain.
      k: candidates of a draft.
      listed: logits of each rank that all ranks look at.
      race: name of the receive buffers of the second exchange; None on one rank.
    """

    temperature: str
    top_k: str
    top_p: str
    min_p: str
    seed: str
    forced: str
    candidates: str
    proposal: str
    k: int
    listed: int
    race: str | None


@dataclass(frozen=True, kw_only=True)
class SampledWalk:
    """How a walk draws: scalar operands, scalars [rows] of positions, and what it drew from."""

    temperature: str
    seed: str
    positions: str
    proposal: View


@dataclass(frozen=True, kw_only=True)
class AcceptPhase(Phase):
    """Acceptance of drafts: greedy, those that are the largest logit of the row before them.

    Attributes:
      tokens, positions: scalars [rows].
      emitted, count, last: scalars that it writes, [rows], [batch], [batch].
      exchange, meets, masks: as for `ArgmaxPhase`.
      sampling: None for greedy acceptance.
    """

    logits: View
    columns: int
    tokens: str
    positions: str
    emitted: str
    count: str
    last: str
    exchange: str | None
    meets: bool
    sampling: SampledAccept | None = None
    masks: str = ""


def masks_of(phase: Phase) -> str:
    """The operand with masks of tokens that a phase applies; empty for none."""
    return phase.masks if isinstance(phase, ArgmaxPhase | AcceptPhase) else ""


@dataclass(frozen=True, kw_only=True)
class SelectorWalkPhase(Phase):
    """Chooses one candidate per row, each depending on the one before it: the best one.

    Attributes:
      predecessor, successor: table operands.
      params: keys of their parameters.
      rank: lanes of a table row.
      tokens: scalars [rows]; entry s * T is the anchor of sequence s.
      output: scalars [rows] that it writes.
      sampling: None for the best candidates.
    """

    values: View
    ids: View
    hidden: View
    predecessor: str
    successor: str
    params: tuple[str, str]
    rank: int
    k: int
    tokens: str
    output: str
    sampling: SampledWalk | None = None


@dataclass(frozen=True, kw_only=True)
class MarkovWalkPhase(Phase):
    """Chooses a token per row, the best of its logits as the token before corrects them.

    Attributes:
      predecessor: table operand, of the parameter `param`.
      successor: stream of this rank's rows of successors.
      rank: lanes of a table row.
      tokens, output: scalars [rows]; entry s * T is the anchor of sequence s.
      confidence: None where nobody asks how sure the choices are.
      page, head, bias: the stream of what confidences are made of, and its parameters.
      exchanges: names of the receive buffers that rows use in turn; empty on one rank.
      rounds: corrections and sums are rounded to bf16.
    """

    logits: View
    hidden: View
    predecessor: str
    param: str
    successor: str
    rank: int
    tokens: str
    output: str
    confidence: View | None
    page: str
    head: str
    bias: str
    exchanges: tuple[str, ...]
    rounds: bool


@dataclass(frozen=True, kw_only=True)
class CutDraftsPhase(Phase):
    """Rows become padding from the first one on, behind row 0, whose confidence is too small.

    Attributes:
      positions, output: scalars [rows].
    """

    confidence: View
    positions: str
    output: str
    threshold: float


@dataclass(frozen=True, kw_only=True)
class ScalarPhase(Phase):
    """Arithmetic of scalars, such as the positions of the next round.

    Attributes:
      nodes: graph nodes in order.
      scalars: value name -> array, of everything that is read and written.
    """

    nodes: tuple[Node, ...]
    scalars: dict[str, str]
