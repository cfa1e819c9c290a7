"""Kept rows enter the states of a kernel as they enter those of the graph."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.ir.graph import StateKind
from mkc.ir.reference import initial_states
from mkc.runtime.late_commit import LateCommit
from mkc.runtime.rounds import committed
from tests.runtime.emulated_rounds import EmulatedRounds
from tests.runtime.rounds_backends import LANE
from tests.runtime.rounds_backends import emulated_session
from tests.runtime.rounds_backends import scheme_of

type Array = NDArray[Any]

BATCH = 2


@cache
def session_of(ranks: int) -> EmulatedRounds:
    return emulated_session(LANE, ranks=ranks, batch=BATCH)


def filled(session: EmulatedRounds) -> dict[str, Array]:
    """Random states, and decays that are logarithms of numbers below one."""
    rng = np.random.default_rng(3)
    found = {}
    for key, one in initial_states(scheme_of(LANE, batch=BATCH).graph).items():
        numbers = rng.normal(size=one.shape).astype(np.float32)
        if key.endswith("decay"):
            numbers = -np.abs(numbers)
        found[key] = np.asarray(jnp.asarray(numbers, one.dtype))
        session.set_state(key, found[key])
    return found


@pytest.mark.parametrize("kept", [(3, 0), (0, 8), (1, 7)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_count(ranks: int, kept: tuple[int, ...]) -> None:
    """By sequence; one without such rows keeps every bit, and so do caches and kept rows."""
    session = session_of(ranks)
    before = filled(session)
    commit = LateCommit(lowered=session.lowered, mesh=session.mesh)
    commit(session.operands, np.array(kept, np.int32))
    graph = scheme_of(LANE, batch=BATCH).graph
    wanted = jax.jit(lambda states, kept: committed(graph, states, kept))(before, jnp.asarray(kept))
    for key, old in before.items():
        new = session.state(key)
        kind = graph.states[key].kind
        for sequence, count in enumerate(kept):
            same = new[:, sequence].tobytes() == old[:, sequence].tobytes()
            changes = kind in (StateKind.RECURRENT, StateKind.CONV) and count > 0
            assert same != changes, f"{key}, sequence {sequence}"
        if kind in (StateKind.RECURRENT, StateKind.CONV):
            np.testing.assert_allclose(
                new.astype(np.float32), np.asarray(wanted[key], np.float32), rtol=1e-5, atol=1e-5
            )
