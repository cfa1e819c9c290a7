"""Operations of drafters that correct a block's logits by the token before, and judge their drafts.

As in `mkc.ir.ops_spec`: T consecutive rows for each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mkc.ir.ops import Op


@dataclass(frozen=True, kw_only=True)
class MarkovWalk(Op):
    """logits [rows, vocab], predecessor, successor [vocab, r], tokens i32 [rows], hidden [rows, n],
    head [1, n + r], bias [1] -> tokens i32 [rows], confidence f32 [rows].

    Row 0 of a sequence keeps its token. Row t takes the largest of logits[t - 1] + c, the lowest id
    on ties, where c_v = successor_v . p and p = predecessor[token of row t - 1]; c and the sum are
    rounded to the dtype of the logits. Its confidence is sigmoid(head . [hidden[t - 1]; p] + bias)
    in f32, that of row 0 is 1.

    Attributes:
      rows: of one sequence.
    """

    mnemonic: ClassVar[str] = "markov_walk"
    rows: int


@dataclass(frozen=True, kw_only=True)
class CutDrafts(Op):
    """positions i32 [rows], confidence f32 [rows] -> positions i32 [rows]: rows are padding from
    the first one on, behind a sequence's row 0, whose confidence is below `threshold`.

    Emitted tokens have the same distribution for every threshold, as long as a row's confidence is
    a function of what stands before its token: how many drafts there are is then known without the
    random numbers that judge them.

    Attributes:
      rows: of one sequence.
    """

    mnemonic: ClassVar[str] = "cut_drafts"
    threshold: float
    rows: int


MARKOV_OPS: tuple[type[Op], ...] = (CutDrafts, MarkovWalk)
