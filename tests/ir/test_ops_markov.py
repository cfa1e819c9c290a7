"""The Markov walk and the early cut of a block: every facet, each meaning against a plain one."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from scipy.stats import chisquare

from mkc.errors import ShapeError
from mkc.ir import ops_markov
from mkc.ir.acceptance import accept
from mkc.ir.acceptance import distribution
from mkc.ir.facets import COST
from mkc.ir.facets import INFER
from mkc.ir.facets import MNEMONICS
from mkc.ir.facets import REFERENCE
from mkc.ir.infer import infer
from mkc.ir.ops import Op
from mkc.ir.ops_markov import MARKOV_OPS
from mkc.ir.ops_markov import CutDrafts
from mkc.ir.ops_markov import MarkovWalk
from mkc.ir.types import DType
from mkc.ir.types import tensor
from tests.ir.evaluate_op import evaluate_op
from tests.ir.evaluate_op import normal
from tests.ir.evaluate_op import numbers

BF16, F32, I32 = DType.BF16, DType.F32, DType.I32
BATCH, ROWS, VOCAB, RANK, WIDTH = 3, 5, 11, 4, 6


def test_every_op_is_complete() -> None:
    defined = {
        one
        for one in vars(ops_markov).values()
        if isinstance(one, type) and issubclass(one, Op) and one is not Op
    }
    assert defined == set(MARKOV_OPS)
    for facet in (INFER, REFERENCE, COST):
        assert [one.__name__ for one in MARKOV_OPS if one not in facet.table] == []
    assert {one.mnemonic: one for one in MARKOV_OPS}.items() <= MNEMONICS.items()


def operands() -> list[NDArray[Any]]:
    count = BATCH * ROWS
    tokens = np.zeros((BATCH, ROWS), np.int32)
    tokens[:, 0], tokens[:, 1:] = [3, 7, 0], 9  # masks behind the anchors
    walk = [normal(count, VOCAB), normal(VOCAB, RANK), normal(VOCAB, RANK), tokens.reshape(-1)]
    return [*walk, normal(count, WIDTH), normal(1, WIDTH + RANK), normal(1)]


def test_the_walk_as_it_is_written() -> None:
    given = operands()
    logits, predecessor, successor, tokens, hidden, head, bias = given
    (walked, confidence), _ = evaluate_op(MarkovWalk(rows=ROWS), given)
    for sequence in range(BATCH):
        first = sequence * ROWS
        token = int(tokens[first])
        assert (walked[first], confidence[first]) == (token, 1.0)
        for row in range(first, first + ROWS - 1):
            latent = predecessor[token]
            judged = head[0] @ np.concatenate([hidden[row], latent]) + bias[0]
            token = int((logits[row] + successor @ latent).argmax())
            assert walked[row + 1] == token
            assert confidence[row + 1] == pytest.approx(1 / (1 + np.exp(-judged)), abs=1e-6)


def test_the_last_row_is_not_read() -> None:
    given = operands()
    expected, _ = evaluate_op(MarkovWalk(rows=ROWS), given)
    for one in (given[0], given[4]):
        one.reshape(BATCH, ROWS, -1)[:, -1] = np.nan
    found, _ = evaluate_op(MarkovWalk(rows=ROWS), given)
    assert all((a == b).all() for a, b in zip(found, expected, strict=True))


def test_the_correction_and_the_sum_are_rounded() -> None:
    """256.2 and 256.9 are both 256 in bf16, a tie which the lowest id wins."""
    logits = np.array([[256, 256], [0, 0]]).astype(bfloat16)
    predecessor, successor = np.ones((2, 1), bfloat16), np.array([[0.2], [0.9]]).astype(bfloat16)
    rest = [np.ones(shape, bfloat16) for shape in ((2, 1), (1, 2), (1,))]
    given = [logits, predecessor, successor, numbers(0, 1), *rest]
    types = [tensor(BF16, *one.shape) for one in given]
    types[3] = tensor(I32, 2)
    op = MarkovWalk(rows=2)
    (rounded, _), _ = evaluate_op(op, given, types=types, rounding="reference")
    assert rounded.tolist() == [0, 0]
    (exact, _), _ = evaluate_op(op, given, types=types)
    assert exact.tolist() == [0, 1]


def test_a_block_is_cut_at_the_first_doubtful_draft() -> None:
    positions = numbers(4, 5, 6, 7, 8, 9, -1, -1, 3, 4, 5, -1)
    confidence = np.array([0, 0.9, 0.5, 0.9] * 3, np.float32)
    confidence[4:8] = 0.1
    (found,), _ = evaluate_op(CutDrafts(threshold=0.6, rows=4), [positions, confidence])
    assert found.reshape(3, 4).tolist() == [[4, 5, -1, -1], [8, -1, -1, -1], [3, 4, -1, -1]]
    (found,), _ = evaluate_op(CutDrafts(threshold=0.05, rows=4), [positions, confidence])
    assert (found == positions).all()


@pytest.mark.parametrize("drafts", [0, 1, 2])
def test_emitted_tokens_have_the_targets_distribution_for_every_cut(drafts: int) -> None:
    """One-hot drafts, as a walk makes them. First and second token of 4096 sequences, each with its
    own seed, against the target's own distribution: the same with and without a cut.
    """
    batch, vocab, rows = 4096, 5, 3
    logits = np.tile(normal(rows, vocab), (batch, 1))
    tokens = np.tile(numbers(0, 2, 1), (batch, 1))
    positions = np.tile(np.where(np.arange(rows) <= drafts, np.arange(rows) + 6, -1), (batch, 1))
    heat = np.full(batch, 0.8, np.float32)
    seeds = np.stack([np.arange(batch), np.full(batch, 7)], axis=1).astype(np.int32)
    none, all_ = np.zeros(batch, np.int32), np.ones(batch, np.float32)
    emitted, count, _ = accept(
        *map(jnp.asarray, (logits, tokens.reshape(-1), positions.reshape(-1).astype(np.int32))),
        *map(jnp.asarray, (heat, none, all_, np.zeros(batch, np.float32), seeds)),
        rows=rows,
    )
    given = (np.full(rows, 0.8, np.float32), none[:rows], all_[:rows], np.zeros(rows, np.float32))
    p = np.asarray(distribution(jnp.asarray(logits[:rows]), *map(jnp.asarray, given)))
    shown = np.asarray(emitted).reshape(batch, rows)
    assert same_distribution(shown[:, 0], p[0])
    assert not same_distribution(shown[:, 0], p[0] ** 0.8)  # of a temperature of 1
    assert (np.asarray(count) <= 1 + drafts).all()
    went_on = shown[np.asarray(count) >= 2, 1]
    if drafts:
        assert len(went_on) == pytest.approx(batch * p[0, 2], rel=0.2)
        assert same_distribution(went_on, p[1])


def same_distribution(drawn: NDArray[Any], p: NDArray[Any]) -> bool:
    """Pearson's test: one in ten thousand fair draws is told apart wrongly."""
    found, wide = np.bincount(drawn, minlength=len(p)), p.astype(np.float64)
    return bool(chisquare(found, wide / wide.sum() * len(drawn)).pvalue > 1e-4)


def test_operands_that_do_not_fit() -> None:
    types = [tensor(I32 if one.dtype.kind == "i" else F32, *one.shape) for one in operands()]
    assert infer(MarkovWalk(rows=ROWS), tuple(types))[1] == tensor(F32, BATCH * ROWS)
    for place, type_, message in (
        (1, tensor(F32, VOCAB + 1, RANK), "predecessor"),
        (2, tensor(F32, VOCAB, RANK + 1), "successor"),
        (3, tensor(F32, BATCH * ROWS), "tokens i32"),
        (5, tensor(F32, 1, WIDTH), r"head \[1, 6 \+ 4\]"),
    ):
        with pytest.raises(ShapeError, match=message):
            infer(MarkovWalk(rows=ROWS), (*types[:place], type_, *types[place + 1 :]))
    with pytest.raises(ShapeError, match="rows of a sequence that divide 15"):
        infer(MarkovWalk(rows=4), tuple(types))
    with pytest.raises(ShapeError, match=r"confidence f32\[6\]"):
        infer(CutDrafts(threshold=0.5, rows=3), (tensor(I32, 6), tensor(BF16, 6)))


def test_every_step_of_a_walk_reads_the_table_of_successors() -> None:
    types = [tensor(I32 if one.dtype.kind == "i" else F32, *one.shape) for one in operands()]
    cost = COST.find(MarkovWalk(rows=ROWS))
    assert cost is not None
    found = cost(MarkovWalk(rows=ROWS), types, [], [])
    table, row = VOCAB * RANK * 4, RANK * 4
    head = (WIDTH + RANK) * 4
    assert found.weight_bytes == (ROWS - 1) * (table + BATCH * row) + head
