"""The choice of experts against its reference meaning: order, ties, weights, what to load."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mkc.codegen_pallas import support as s
from mkc.ir.ops_experts import Route
from mkc.ir.ops_experts import RouterScore
from mkc.schedule.expert_store import CHOSEN
from mkc.schedule.expert_store import COUNT
from tests.codegen_pallas.round_reference import meaning
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import VMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

SIGMOID = RouterScore.SIGMOID
START = 128  # lane where the logits begin


def routed(
    logits: np.ndarray,
    bias: np.ndarray | None,
    op: Route,
    *,
    rows: int,
    first: int,
    local: int,
    mode: Mode = Mode.LATE,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and weights `[R, k]`, and the list of experts of a rank."""
    height, experts = logits.shape
    size = -(-rows * op.k // 128) * 128
    wide = np.concatenate([np.full((height, START), np.inf, np.float32), logits], axis=1)

    def body(first: Any, logits: Any, bias_row: Any, *rest: Any) -> None:
        ids, weights, chosen, places, landing, sem = rest
        s.route(
            s.View(ref=logits, start=START, width=experts),
            None if bias is None else bias_row[...],
            ids=s.View(ref=ids, start=0, width=op.k),
            weights=s.View(ref=weights, start=0, width=op.k),
            space=places if rows > 8 else None,
            landing=landing,
            chosen=chosen,
            sem=sem,
            rows=rows,
            k=op.k,
            score=op.score,
            renormalise=op.renormalise,
            factor=op.scale,
            first=first[0],
            local=local,
        )

    given = np.zeros(experts, np.float32) if bias is None else bias
    ids, weights, chosen = run(
        body,
        operands=[(np.array([first], np.int32), SMEM), (wide, VMEM), (given[None], VMEM)],
        results=[
            ((height, op.k), jnp.int32, VMEM),
            ((height, op.k), jnp.float32, VMEM),
            ((8, size), jnp.int32, SMEM),
        ],
        scratch=[
            VMEM((height, experts), jnp.float32),
            VMEM((8, size), jnp.int32),
            pltpu.SemaphoreType.DMA,
        ],
        mode=mode,
    )
    return ids, weights, chosen[CHOSEN, : chosen[COUNT, 0]]


@pytest.mark.parametrize(
    ("rows", "experts", "k", "score", "first", "local", "mode", "kind"),
    [
        pytest.param(1, 300, 16, SIGMOID, 0, 300, Mode.LATE, "ties", id="one row, ties"),
        pytest.param(8, 256, 16, SIGMOID, 64, 64, Mode.LATE, "distinct", id="eight rows"),
        pytest.param(8, 140, 16, SIGMOID, 0, 90, Mode.GENERIC, "alike", id="eight rows alike"),
        pytest.param(3, 40, 4, RouterScore.SOFTMAX, 8, 32, Mode.GENERIC, "ties", id="softmax"),
        pytest.param(3, 40, 4, RouterScore.SOFTMAX, 8, 32, Mode.GENERIC, "alike", id="rows alike"),
        pytest.param(12, 24, 12, SIGMOID, 0, 24, Mode.EAGER, "distinct", id="two registers"),
        pytest.param(16, 300, 16, SIGMOID, 0, 150, Mode.LATE, "ties", id="two registers, ties"),
        pytest.param(8, 896, 16, SIGMOID, 112, 112, Mode.GENERIC, "ties", id="many, ties"),
        pytest.param(5, 300, 1, SIGMOID, 0, 300, Mode.GENERIC, "ties", id="one choice, ties"),
        pytest.param(1, 40, 1, SIGMOID, 0, 40, Mode.GENERIC, "alike", id="one row, one choice"),
        pytest.param(8, 300, 16, SIGMOID, 0, 300, Mode.GENERIC, "equal", id="all equal"),
    ],
)
def test_route(
    rows: int,
    experts: int,
    k: int,
    score: RouterScore,
    first: int,
    local: int,
    mode: Mode,
    kind: str,
) -> None:
    random = np.random.default_rng(rows)
    height = -(-rows // 8) * 8
    # Scores of distinct logits differ by more than their last digit.
    order = np.array([random.permutation(experts) for _ in range(height)])
    logits = (order / experts * 6 - 3).astype(np.float32)
    bias = random.integers(-2, 3, size=experts).astype(np.float32) / 8
    if kind == "ties":
        logits, bias = np.round(logits), np.round(bias)
    if kind == "alike":
        logits[:] = logits[0]
    if kind == "equal":  # but for one that never wins
        logits[:], bias[:] = 1.0, 0.0
        logits[:, 3] = -np.inf
    op = Route(k=k, score=score, renormalise=score is RouterScore.SIGMOID, scale=1.5)
    given = None if kind == "ties" else bias
    ids, weights, chosen = routed(logits, given, op, rows=rows, first=first, local=local, mode=mode)
    operands = (logits,) if given is None else (logits, given)
    (expected, expected_weights), _ = meaning(op, operands)
    np.testing.assert_array_equal(ids[:rows], expected[:rows])
    np.testing.assert_allclose(weights[:rows], expected_weights[:rows], rtol=1e-5)
    assert ((ids >= 0) & (ids < experts)).all()
    used = np.unique(expected[:rows])
    np.testing.assert_array_equal(chosen, used[(used >= first) & (used < first + local)] - first)


@pytest.mark.parametrize("rows", [1, 8, 12])
def test_ids_exist_where_there_are_no_numbers(rows: int) -> None:
    """Ids decide addresses, so they stay in range whatever the logits are."""
    logits = np.full((-(-rows // 8) * 8, 40), np.nan, np.float32)
    op = Route(k=4, score=RouterScore.SIGMOID, renormalise=True)
    ids, _, chosen = routed(logits, None, op, rows=rows, first=8, local=8)
    assert ((ids >= 0) & (ids < 40)).all()
    assert ((chosen >= 0) & (chosen < 8)).all()
