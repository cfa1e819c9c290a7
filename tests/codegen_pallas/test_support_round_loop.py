"""The loop around rounds inside a kernel, against the same loop written in numpy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mkc.codegen_pallas import support as s
from tests.codegen_pallas.round_reference import rows_of
from tests.codegen_pallas.support_run import SMEM
from tests.codegen_pallas.support_run import Mode
from tests.codegen_pallas.support_run import run

ROUNDS = 4
ROWS = 4
CONTEXT = 40
STOPS = 8


def expected_launch(
    carried: dict[str, np.ndarray],
    limits: dict[str, np.ndarray],
    emitted: np.ndarray,
    counts: np.ndarray,
    following: np.ndarray,
) -> dict[str, Any]:
    """`mkc.runtime.rounds.rounds_function`, but each sequence has its own number of rounds."""
    tokens, positions = (carried[name].reshape(-1, ROWS).copy() for name in ("tokens", "positions"))
    kept, left = carried["kept"].copy(), limits["budgets"].copy()
    inside = positions.copy()  # also rests after the last round
    found: dict[str, Any] = {"counts": [], "drafts": [], "ran": 0}
    for number in range(ROUNDS):
        active = inside[:, 0] >= 0
        if not active.any() or number >= limits["rounds"][active].max():
            break
        found["ran"] += 1
        found["drafts"].append(np.maximum((inside >= 0).sum(axis=1) - 1, 0))
        count = np.where(active, counts[number], 0)
        found["counts"].append(count)
        for sequence in np.flatnonzero(active):
            new = emitted[number, sequence, : count[sequence]]
            kept[sequence] = count[sequence]
            if not count[sequence]:  # not decided
                continue
            left[sequence] -= count[sequence]
            tokens[sequence] = following[number, sequence]
            first = positions[sequence, 0] + count[sequence] + np.arange(ROWS)
            positions[sequence] = np.where(first < CONTEXT, first, -1)
            if left[sequence] <= 0 or np.isin(new, limits["stop_ids"][sequence]).any():
                positions[sequence] = -1
            over = number + 1 >= limits["rounds"][sequence]
            inside[sequence] = -1 if over else positions[sequence]
        if (count[active] == 0).any():
            break
    carried = {"tokens": tokens.reshape(-1), "positions": positions.reshape(-1), "kept": kept}
    return found | carried


@pytest.mark.parametrize(
    ("firsts", "real", "rounds", "budgets", "undecided"),
    [
        pytest.param([3], [1], [4], [99], False, id="one sequence"),
        pytest.param(
            [3, -1, 30, 8], [4, 0, 2, 4], [4, 4, 4, 2], [99, 99, 99, 99], False, id="context"
        ),
        pytest.param([3, 5, 7], [1, 4, 4], [4, 4, 1], [-1, -1, 99], False, id="budgets"),
        pytest.param([-1, -1], [0, 0], [4, 4], [99, 99], False, id="all rest"),
        pytest.param([3, 6, -1, 9], [4, 1, 0, 4], [4] * 4, [99] * 4, True, id="not decided"),
    ],
)
def test_round_loop(
    firsts: list[int],
    real: list[int],
    rounds: list[int],
    budgets: list[int],
    undecided: bool,
) -> None:
    """Where a sequence is not decided, it is the first one in round 1."""
    batch = len(firsts)
    random = np.random.default_rng(batch)
    rows = batch * ROWS
    sizes = {"batch": batch, "rows_per_sequence": ROWS}
    carried = {
        "tokens": random.integers(100, size=rows).astype(np.int32),
        "positions": rows_of(firsts, real, ROWS),
        "kept": random.integers(ROWS, size=batch).astype(np.int32),
    }
    stop_ids = np.full((batch, STOPS), -1, np.int32)  # as what is behind the tokens of a round
    limits = {
        "rounds": np.array(rounds, np.int32),
        "budgets": np.array(budgets, np.int32),
        "stop_ids": stop_ids,
    }
    # what the rounds in between would compute
    emitted = random.integers(100, size=(ROUNDS, batch, ROWS)).astype(np.int32)
    counts = random.integers(1, ROWS + 1, size=(ROUNDS, batch)).astype(np.int32)
    following = random.integers(100, size=(ROUNDS, batch, ROWS)).astype(np.int32)
    if undecided:
        counts[1, 0] = 0
    if budgets[0] < 0:  # exactly what the first round emits, and one token more
        limits["budgets"][:2] = counts[0, :2] + [0, 1]
    stop_ids[-1, 3] = emitted[1, -1, counts[1, -1] - 1]  # the last sequence stops in round 1
    results = {
        "emitted": ROUNDS * rows,
        "counts": ROUNDS * batch,
        "drafts": ROUNDS * batch,
        "ran": 1,
        "tokens_out": rows,
        "positions_out": rows,
        "kept_out": batch,
    }
    scratch = {
        "s_tokens": rows,
        "s_positions": rows,
        "s_kept": batch,
        "s_budgets": batch,
        "s_emitted": rows,
        "s_count": batch,
        "s_following": rows,
        "s_next": rows,
    }
    computed = {"all_emitted": emitted, "all_counts": counts, "all_following": following}
    operands = {**carried, **limits, **computed}
    names = [*operands, *results, *scratch]

    def body(*refs: Any) -> None:
        m = SimpleNamespace(**dict(zip(names, refs, strict=True)))
        longest, running = s.begin_block_rounds(m, **sizes)

        def one_round(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            index, _ = carry
            for sequence in range(batch):
                active = m.s_positions[sequence * ROWS] >= 0
                number = m.all_counts[index * batch + sequence]
                m.s_count[sequence] = jnp.where(active, number, 0)
                for row in range(ROWS):
                    place = sequence * ROWS + row
                    there = active & (row < number)
                    token = m.all_emitted[index * rows + place]
                    m.s_emitted[place] = jnp.where(there, token, -1)
                    m.s_following[place] = m.all_following[index * rows + place]
            s.next_positions(m.s_positions, m.s_count, m.s_next, context=CONTEXT, **sizes)
            running = s.end_block_round(
                m,
                index,
                emitted=m.s_emitted,
                count=m.s_count,
                tokens=m.s_following,
                positions=m.s_next,
                **sizes,
            )
            return index + 1, running

        first = (jnp.int32(0), running)
        m.ran[0], _ = lax.while_loop(
            lambda carry: (carry[0] < longest) & carry[1], one_round, first
        )

    outputs = run(
        body,
        operands=[(one.reshape(-1), SMEM) for one in operands.values()],
        results=[((size,), jnp.int32, SMEM) for size in results.values()],
        scratch=[SMEM((size,), jnp.int32) for size in scratch.values()],
        mode=Mode.GENERIC,
    )
    found = dict(zip(results, outputs, strict=True))
    expected = expected_launch(carried, limits, emitted, counts, following)
    ran = expected["ran"]
    assert found["ran"][0] == ran
    if undecided:
        assert ran == 2
        np.testing.assert_array_equal(found["tokens_out"][:ROWS], following[0, 0])
        assert found["positions_out"][0] == firsts[0] + counts[0, 0]
        assert found["kept_out"][0] == 0
    for name in ("counts", "drafts"):
        got = found[name].reshape(ROUNDS, batch)[:ran]
        np.testing.assert_array_equal(got, np.reshape(expected[name], (ran, batch)))
    for name in ("tokens", "positions", "kept"):
        np.testing.assert_array_equal(found[f"{name}_out"], expected[name])
    for number in range(ran):
        for sequence in range(batch):
            count = expected["counts"][number][sequence]
            got = found["emitted"].reshape(ROUNDS, batch, ROWS)[number, sequence]
            np.testing.assert_array_equal(got[:count], emitted[number, sequence, :count])
            np.testing.assert_array_equal(got[count:], -1)
