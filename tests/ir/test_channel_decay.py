"""The delta rule with a decay of each key channel, stepwise and committed late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.errors import ShapeError
from mkc.ir.infer import infer
from mkc.ir.ops import DeltaRule
from mkc.ir.ops_spec import KeptDeltaRule
from mkc.ir.reference_spec import committed_state
from mkc.ir.types import DType
from mkc.ir.types import tensor
from mkc.spec.commit import COMMIT
from tests.ir.evaluate_op import RANDOM
from tests.ir.evaluate_op import evaluate_op
from tests.ir.evaluate_op import normal

F32 = DType.F32
ROWS, KEY_HEADS, VALUE_HEADS, DK, DV = 8, 2, 6, 5, 7
DELTA, KEPT = DeltaRule(dtype=F32), KeptDeltaRule(dtype=F32)


def operands(batch: int, rows: int) -> list[NDArray[Any]]:
    """q, k, v, beta, decay; keys have length 1, decays are as strong as a bound of -5 lets them."""
    count = batch * rows
    k = normal(count, KEY_HEADS, DK)
    k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    beta = RANDOM.random((count, VALUE_HEADS), np.float32)
    decay = -5 * RANDOM.random((count, VALUE_HEADS, DK), np.float32)
    return [normal(count, KEY_HEADS, DK), k, normal(count, VALUE_HEADS, DV), beta, decay]


def no_rows(batch: int) -> list[NDArray[Any]]:
    return [
        np.zeros((batch, ROWS, KEY_HEADS, DK), np.float32),
        np.zeros((batch, ROWS, VALUE_HEADS, DV), np.float32),
        np.zeros((batch, ROWS, VALUE_HEADS, DK), np.float32),
    ]


def by_hand(given: list[NDArray[Any]], memory: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Outputs and state of one sequence, head by head as the rule is written."""
    q, k, v, beta, decay = given
    state, found = memory.astype(np.float64), np.zeros(v.shape)
    for row in range(len(q)):
        for head in range(VALUE_HEADS):
            key = head * KEY_HEADS // VALUE_HEADS
            state[head] *= np.exp(decay[row, head])[:, None]
            update = beta[row, head] * (v[row, head] - state[head].T @ k[row, key])
            state[head] += np.outer(k[row, key], update)
            found[row, head] = state[head].T @ q[row, key]
    return found, state


def test_each_row_of_the_state_decays_by_itself() -> None:
    given, memory = operands(1, ROWS), normal(1, VALUE_HEADS, DK, DV)
    (found,), (state,) = evaluate_op(DELTA, given, [memory])
    expected, wanted = by_hand(given, memory[0])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(state[0], wanted, atol=1e-5)


def test_equal_channels_are_one_decay_of_the_head() -> None:
    given, memory = operands(2, ROWS), normal(2, VALUE_HEADS, DK, DV)
    narrow = given[4][..., 0]
    given[4] = np.repeat(narrow[..., None], DK, axis=2)
    wide = evaluate_op(DELTA, given, [memory])
    one = evaluate_op(DELTA, [*given[:4], narrow], [memory])
    assert (wide[0][0] == one[0][0]).all() and (wide[1][0] == one[1][0]).all()


def test_the_chunked_rule_is_the_stepwise_one() -> None:
    """Outputs of all rows, and the state after any number of them."""
    batch = 16
    given, memory = operands(batch, ROWS), normal(batch, VALUE_HEADS, DK, DV)
    nothing = np.zeros(batch, np.int32)
    (found,), states = evaluate_op(KEPT, [*given, nothing], [memory, *no_rows(batch)])
    assert (states[0] == memory).all(), "nothing is committed, bit for bit"
    rows = [one.reshape(batch, ROWS, *one.shape[1:]) for one in given]
    expected, stepped = [], [memory]
    for row in range(ROWS):
        (output,), (state,) = evaluate_op(DELTA, [one[:, row] for one in rows], stepped[-1:])
        expected.append(output)
        stepped.append(state)
    np.testing.assert_allclose(found, np.stack(expected, axis=1).reshape(found.shape), atol=2e-5)
    for count, state in enumerate(stepped):
        kept = jnp.full(batch, count, jnp.int32)
        committed = committed_state(*map(jnp.asarray, states), kept)
        np.testing.assert_allclose(np.asarray(committed), state, atol=1e-5)


def test_decays_of_both_kinds_in_one_block_do_not_overflow() -> None:
    """Channels that vanish beside channels that stay: e^(D_i - D_j) of later rows is infinite."""
    given = operands(1, ROWS)
    given[4][..., 0], given[4][..., 1] = -80.0, 0.0
    memory, nothing = normal(1, VALUE_HEADS, DK, DV), np.zeros(1, np.int32)
    (found,), states = evaluate_op(KEPT, [*given, nothing], [memory, *no_rows(1)])
    np.testing.assert_allclose(found, by_hand(given, memory[0])[0], atol=1e-5)
    kept = committed_state(*map(jnp.asarray, states), jnp.array([ROWS]))
    assert np.isfinite(np.asarray(kept)).all()


def test_padding_and_idle_sequences() -> None:
    given, memory = operands(2, ROWS), normal(2, VALUE_HEADS, DK, DV)
    valid = np.array([[True] * 3 + [False] * 5, [False] * ROWS])
    rows, kept = [one + 0.5 for one in no_rows(2)], np.array([0, 2], np.int32)
    (found,), states = evaluate_op(KEPT, [*given, kept], [memory, *rows], valid=valid)
    for old, new in zip([memory, *rows], states, strict=True):
        assert (old[1] == new[1]).all(), "an idle sequence keeps every bit"
    for one in given:
        one[3:ROWS] = 99.0
    (again,), _ = evaluate_op(KEPT, [*given, kept], [memory, *rows], valid=valid)
    assert (found[:3] == again[:3]).all(), "padding has no influence"


def test_types() -> None:
    head = (tensor(F32, 4, 2, DK), tensor(F32, 4, 2, DK), tensor(F32, 4, 6, DV), tensor(F32, 4, 6))
    memory = (tensor(F32, 6, DK, DV),)
    (result,) = infer(DELTA, (*head, tensor(F32, 4, 6, DK)), memory)
    assert result == tensor(F32, 4, 6, DV)
    with pytest.raises(ShapeError, match=r"or \[rows, value heads, key dim\]"):
        infer(DELTA, (*head, tensor(F32, 4, 6, DV)), memory)


def test_the_late_commit_keeps_a_decay_of_each_channel() -> None:
    types = tuple(tensor(F32, *one.shape) for one in operands(1, 1))
    function = COMMIT.find(DELTA)
    assert function is not None
    late = function(DELTA, types)
    assert late.op == KEPT
    assert late.rows["decay"].shape == (VALUE_HEADS, DK)
    scalar = function(DELTA, (*types[:4], replace(types[4], axes=types[4].axes[:2])))
    assert scalar.rows["decay"].shape == (VALUE_HEADS,)
