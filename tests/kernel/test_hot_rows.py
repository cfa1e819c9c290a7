"""Single rows of logits of a kernel that samples hot, beside an evaluation in f32.

The hotter a round the fewer drafts it accepts, so most rounds have one row, and no other rows
average what roundings to bf16 do to it: the reference's own rows are up to 4 % away from f32.
A near tie at the router would add to that, so the evaluations take the experts of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from mkc.codegen_pallas import support
from mkc.codegen_pallas.support.refs import View
from mkc.ir.facets import REFERENCE
from mkc.ir.ops_experts import Route
from mkc.ir.reference import Rounding
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from tests.codegen_pallas.support_run import Mode
from tests.kernel.rounds_harness import Array
from tests.kernel.rounds_harness import Launch
from tests.kernel.rounds_harness import Start
from tests.kernel.rounds_harness import run_kernel
from tests.kernel.spark_harness import Case
from tests.kernel.spark_harness import begun
from tests.kernel.spark_harness import scheme_of
from tests.kernel.spark_harness import session_of
from tests.kernel.spark_harness import weights_of
from tests.kernel.test_spark_rounds import HOT
from tests.spec.rounds import OPTIONS
from tests.spec.rounds import mask_inputs

CASE = Case(models="golden", drafts=7, cut=0.45, sampling=True)
SEEDS, LAUNCHES = 3, 4
AS_NEAR = 1.25  # of medians over 40 rows; means depend on two or three rows
FORCED = 10.0  # above all scores, which are at most 1, and their bias


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """Experts of a kernel's rows, i32 [rows, k] of each layer in turn, since it was cleared."""
    found: list[Array] = []
    choose = support.route

    def keep(ids: Array) -> Array:
        found.append(np.array(ids))
        return found[-1]

    def route(*operands: Any, ids: View, **options: Any) -> None:
        choose(*operands, ids=ids, **options)
        value = ids.load()
        # What is stored comes from the host, so no layer overtakes another one.
        ids.store(io_callback(keep, jax.ShapeDtypeStruct(value.shape, value.dtype), value))

    monkeypatch.setattr(support, "route", route)
    return found


def evaluation(rounding: Rounding) -> Callable[[Start, Sequence[Array]], Array]:
    """(where a round begins, experts of each layer) -> logits f32 [rows, vocab]."""
    scheme = scheme_of(CASE.certain)
    graph = scheme.graph
    weights = stack_params(graph, weights_of(CASE), rounding)
    left: list[Array] = []

    def route(op: Route, operands: Any, *rest: Any) -> Any:
        logits = operands[0]
        shape = jax.ShapeDtypeStruct((graph.rows, op.k), jnp.int32)
        ids = io_callback(lambda _: left.pop(0)[: graph.rows], shape, logits)
        bias = FORCED * jax.nn.one_hot(ids, logits.shape[1]).sum(axis=1)
        return REFERENCE.table[Route](op, (logits, bias), *rest)

    def run(inputs: Any, states: Any) -> Any:
        meanings = {Route: route}
        found, _ = step_outputs(
            graph, weights, inputs, states, rounding=rounding, meanings=meanings
        )
        return found["logits"].astype(jnp.float32)

    compiled = jax.jit(run, compiler_options=OPTIONS)

    def evaluate(start: Start, experts: Sequence[Array]) -> Array:
        left[:] = experts
        states = initial_states(graph, rounding)
        for key, one in start.states.items():
            # Rows of caches that no token has reached.
            states[key] = jnp.nan_to_num(jnp.asarray(one, states[key].dtype))
        logits = np.asarray(compiled(start.carried | mask_inputs(scheme, ()), states))
        assert not left, "the kernel has chosen more often"
        return logits

    return evaluate


@pytest.mark.long
def test_rows_are_as_near_to_f32_as_those_of_the_reference(chosen: list[Array]) -> None:
    session = session_of(CASE, 1, 2, Mode.GENERIC)
    exact, rounded = evaluation("float32"), evaluation("reference")
    mine, theirs = [], []
    for seed in range(SEEDS):
        start = begun(CASE)
        for _ in range(LAUNCHES):
            chosen.clear()
            sampling = (replace(HOT, seed=(seed, 1)),)
            found = run_kernel(session, start, replace(Launch.of(1, 1), sampling=sampling))
            assert found.result.logits is not None
            real = start.carried["positions"] >= 0
            wanted = exact(start, chosen)[real]
            for distances, logits in (
                (mine, found.result.logits.reshape(len(real), -1)),
                (theirs, rounded(start, chosen)),
            ):
                squares = ((logits[real] - wanted) ** 2).mean(axis=1) / wanted.var()
                distances += np.sqrt(squares).tolist()
            start = found.start
    assert np.median(mine) <= AS_NEAR * np.median(theirs)
