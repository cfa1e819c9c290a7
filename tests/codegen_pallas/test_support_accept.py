"""Acceptance and the scalars between the parts of a round, against their reference meaning."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mkc.codegen_pallas import support as s
from mkc.ir.acceptance import accept
from mkc.ir.ops_spec import BlockTokens
from mkc.ir.ops_spec import KeptPositions
from mkc.ir.ops_spec import NextPositions
from tests.codegen_pallas.round_reference import meaning
from tests.codegen_pallas.round_reference import padded
from tests.codegen_pallas.round_reference import rows_of
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

VOCABULARY = 6
CONTEXT = 64


@pytest.mark.parametrize(
    ("rows", "firsts", "real", "right"),
    [
        pytest.param(8, [5], [8], [3], id="one sequence"),
        pytest.param(8, [5] * 8, [8] * 8, list(range(8)), id="every count"),
        pytest.param(8, [5, 6, -1, 58, 0], [1, 2, 0, 6, 3], [7] * 5, id="padding and rest"),
        pytest.param(3, [9, 20, -1, 2], [3, 2, 0, 3], [1, 2, 2, 2], id="short blocks"),
    ],
)
def test_round_scalars(rows: int, firsts: list[int], real: list[int], right: list[int]) -> None:
    """The first `right` drafts of each sequence are what the target would have emitted."""
    batch = len(firsts)
    random = np.random.default_rng(rows)
    best = random.integers(0, VOCABULARY, size=batch * rows).astype(np.int32)
    tokens = random.integers(0, VOCABULARY, size=(batch, rows)).astype(np.int32)
    for sequence, agreed in enumerate(right):
        wanted = best.reshape(batch, rows)[sequence]
        tokens[sequence, 1 : 1 + agreed] = wanted[:agreed]
        if agreed + 1 < rows:
            tokens[sequence, agreed + 1] = (wanted[agreed] + 1) % VOCABULARY
    tokens = tokens.reshape(-1)
    positions = rows_of(firsts, real, rows)
    sizes = {"batch": batch, "rows_per_sequence": rows}

    def body(best: Any, tokens: Any, positions: Any, *out: Any) -> None:
        emitted, count, last, kept, following, block = out
        s.accept_greedy(
            best[...],
            tokens=tokens,
            positions=positions,
            emitted=emitted,
            count=count,
            last=last,
            **sizes,
        )
        s.kept_positions(positions, count, kept, **sizes)
        s.next_positions(positions, count, following, context=CONTEXT, **sizes)
        s.block_tokens(last, block, mask=77, **sizes)

    shapes = [(batch * rows,), (batch,), (batch,), *[(batch * rows,)] * 3]
    found = run(
        body,
        operands=[(padded(best[:, None]), VMEM), (tokens, SMEM), (positions, SMEM)],
        results=[(shape, jnp.int32, SMEM) for shape in shapes],
        mode=Mode.GENERIC,
    )
    logits = np.eye(VOCABULARY, dtype=np.float32)[best]
    expected = [np.asarray(one) for one in accept(logits, tokens, positions, rows=rows)]
    _, count, last = expected
    for op, operands in (
        (KeptPositions(), (positions, count)),
        (NextPositions(context=CONTEXT), (positions, count)),
        (BlockTokens(mask=77), (last, positions)),
    ):
        expected += meaning(op, operands)[0]
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    counts = [min(one + 1, number) for one, number in zip(right, real, strict=True)]
    np.testing.assert_array_equal(found[1], counts)
