"""Shape inference of `mkc.ir.ops_markov`; registers its operations in the text form."""

from __future__ import annotations

from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.infer import Types
from mkc.ir.infer import no_states
from mkc.ir.infer import require
from mkc.ir.infer import require_positions
from mkc.ir.infer import require_rank
from mkc.ir.infer import require_rows
from mkc.ir.infer import take
from mkc.ir.ops import Op
from mkc.ir.ops_markov import MARKOV_OPS
from mkc.ir.ops_markov import CutDrafts
from mkc.ir.ops_markov import MarkovWalk
from mkc.ir.types import DType
from mkc.ir.types import TensorType

MNEMONICS.update({op_type.mnemonic: op_type for op_type in MARKOV_OPS})


@INFER.register(MarkovWalk)
def _markov_walk(op: MarkovWalk, operands: Types, states: Types) -> Types:
    what = "logits, predecessor, successor, tokens, hidden, head, bias"
    logits, predecessor, successor, tokens, hidden, head, bias = take(op, operands, 7, what)
    no_states(op, states)
    require_rank(op, "logits", logits, 2, "[rows, vocab]")
    require_rank(op, "hidden", hidden, 2, "[rows, n]")
    vocab = logits.shape[1]
    rank = predecessor.shape[-1]
    for name, book in (("predecessor", predecessor), ("successor", successor)):
        require(
            book.shape == (vocab, rank),
            op,
            f"{name} [{vocab}, {rank}]",
            book,
            "Give both tables the vocabulary of the logits, and one rank",
        )
    _require_tokens(op, tokens, logits)
    require_rows(op, logits, "hidden", hidden)
    require(
        head.shape == (1, hidden.shape[1] + rank) and bias.shape == (1,),
        op,
        f"head [1, {hidden.shape[1]} + {rank}] and bias [1]",
        f"{head}, {bias}",
        "Declare the head over a row of hidden and one of predecessor",
    )
    _require_sequences(op, op.rows, logits)
    return (tokens, TensorType(dtype=DType.F32, axes=logits.axes[:1]))


@INFER.register(CutDrafts)
def _cut_drafts(op: CutDrafts, operands: Types, states: Types) -> Types:
    positions, confidence = take(op, operands, 2, "positions, confidence")
    no_states(op, states)
    require_positions(op, positions)
    require(
        confidence.dtype is DType.F32 and confidence.shape == positions.shape,
        op,
        f"confidence f32[{positions.shape[0]}]",
        confidence,
        "Pass that of mkc.markov_walk",
    )
    _require_sequences(op, op.rows, positions)
    return (positions,)


def _require_tokens(op: Op, tokens: TensorType, logits: TensorType) -> None:
    require(
        tokens.dtype is DType.I32 and tokens.shape == logits.shape[:1],
        op,
        f"tokens i32[{logits.shape[0]}]",
        tokens,
        "Pass one token per row",
    )


def _require_sequences(op: Op, rows: int, first: TensorType) -> None:
    require(
        rows > 0 and first.shape[0] % rows == 0,
        op,
        f"rows of a sequence that divide {first.shape[0]}",
        rows,
        "Pass the rows of one sequence",
    )
