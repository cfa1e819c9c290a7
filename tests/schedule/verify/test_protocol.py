"""The verifier's events are those of the generated kernel.

Real kernels are traced by Pallas and executed without arithmetic (`mkc.schedule.verify.trace`). The
copies, waits, sends, signals and meetings are compared one by one; between two of them the kernel
writes what the verifier says, and reads nothing else. A proof about these events is one about the
kernel.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence

import pytest

import mkc
from mkc.codegen_pallas.source_memory import scratch
from mkc.ir.graph import Graph
from mkc.ir.token_masks import with_token_masks
from mkc.passes.pipeline import Lowered
from mkc.schedule.program import Program
from mkc.schedule.verify.arrays import arrays_of
from mkc.schedule.verify.arrays import scalars_of
from mkc.schedule.verify.arrays import semaphores_of
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.case import cases_of
from mkc.schedule.verify.case import launches_of
from mkc.schedule.verify.compare import difference
from mkc.schedule.verify.compare import expected_events
from mkc.schedule.verify.events import Wait
from mkc.schedule.verify.events import Write
from mkc.schedule.verify.trace import reference_names
from mkc.schedule.verify.trace import tracer_of
from tests.passes.lowering import dense_graph
from tests.passes.lowering import full_size
from tests.passes.lowering import golden_graph
from tests.passes.lowering import lower
from tests.schedule.verify.traced import module_of
from tests.schedule.verify.traced import trace

ROUNDS = 4
TWO_PHASE = "collectives{algorithm=two_phase}"


def learned_positions(*, batch: int) -> Graph:
    """Vectors are looked up by position, too."""

    def decoder(step: mkc.Step) -> mkc.Outputs:
        tokens = mkc.embed(step.tokens, mkc.param("embed.weight", [512, 256]))
        positions = mkc.embed(step.positions, mkc.param("positions.weight", [64, 256]))
        return mkc.next_token(tokens + positions, mkc.param("head.weight", [512, 256]))

    return mkc.trace(decoder, name="positions", batch=batch, context=64)


def graph_of(name: str, batch: int) -> Graph:
    named = {"27b": full_size, "dense": dense_graph, "positions": learned_positions}
    return named[name](batch=batch) if name in named else golden_graph(name, batch=batch)


def compare(lowered: Lowered, ranks: Sequence[int], cases: Sequence[Case]) -> None:
    module = module_of(lowered)
    kernel, names = trace(module), reference_names(module.SPEC)
    for rank in ranks:
        for case in cases:
            expected = expected_events(lowered.program, rank, case)
            tracer = tracer_of(lowered.program, rank, case)
            found = tracer.run(kernel, names)
            assert difference(expected, found) is None, case.name
            assert tracer.hints == []


@pytest.mark.parametrize(
    ("name", "ranks", "batch", "passes"),
    [
        ("qwen38_mini", 2, 3, ""),
        ("qwen38_lane", 8, 1, ""),
        ("qwen38_lane", 2, 1, TWO_PHASE),
        ("dense", 2, 8, TWO_PHASE),
        ("dense", 2, 1, "residency{cache_tile=16}"),
        ("positions", 1, 3, ""),
    ],
)
def test_kernels_of_one_step(name: str, ranks: int, batch: int, passes: str) -> None:
    lowered = lower(graph_of(name, batch), ranks, passes)
    compare(lowered, sorted({0, ranks - 1}), cases_of(lowered.program))


@pytest.mark.parametrize(("name", "ranks"), [("qwen38_lane", 1), ("dense", 2)])
def test_kernels_of_several_rounds(name: str, ranks: int) -> None:
    """Positions move on from round to round; token 0 is what the tracer lets the model choose."""
    lowered = lower(graph_of(name, 2), ranks, f"lower{{rounds={ROUNDS}}}")
    moving = tuple((14 + index, index) for index in range(ROUNDS))
    cases = [
        Case(name="all", positions=moving, rounds=ROUNDS, ran=ROUNDS),
        Case(name="two", positions=moving, rounds=2, ran=2),
        Case(name="stopped", positions=moving, rounds=ROUNDS, ran=1),
        Case(name="all rest", positions=((-1, -1),), rounds=1, ran=0),
    ]
    compare(lowered, [0], cases)


def test_launches_that_follow_from_their_scalars() -> None:
    """What an edited kernel is traced for: every kind of round, and several rounds."""
    lowered = lower(graph_of("dense", 2), 2, f"lower{{rounds={ROUNDS}}}")
    launches = launches_of(lowered.program)
    assert {(one.rounds, one.ran) for one in launches} == {(1, 1), (1, 0), (3, 3), (3, 1)}
    compare(lowered, [0], launches)


def test_token_masks() -> None:
    """Masks are fetched at the beginning of a round and change the logits in place."""
    lowered = lower(with_token_masks(golden_graph("qwen38_lane")), 2)
    compare(lowered, [0], cases_of(lowered.program)[:1])


@pytest.mark.parametrize("change", ["wait", "write"])
def test_a_changed_kernel_is_noticed(change: str) -> None:
    """The comparison fails when a wait or a store of the kernel is missing."""
    lowered = lower(golden_graph("qwen38_lane"), 1)
    case = cases_of(lowered.program)[0]
    expected = expected_events(lowered.program, 0, case)
    kinds = {"wait": Wait, "write": Write}
    at = next(n for n, one in enumerate(expected) if isinstance(one, kinds[change]))
    assert difference(expected, [*expected[:at], *expected[at + 1 :]]) is not None


@pytest.mark.long
def test_the_full_size_kernel() -> None:
    lowered = lower(full_size(), 8)
    compare(lowered, [0, 7], cases_of(lowered.program)[:1])


@pytest.mark.parametrize(("name", "ranks", "rounds"), [("qwen38_mini", 2, 1), ("dense", 1, ROUNDS)])
def test_arrays_are_those_of_the_kernel(name: str, ranks: int, rounds: int) -> None:
    """Names, shapes and element types of everything that the kernel allocates."""
    program = lower(graph_of(name, 2), ranks, f"lower{{rounds={rounds}}}").program
    allocated = {(one, kind, shape) for one, kind, shape in scratch(program)}
    assert allocated == set(expected_scratch(program))


def expected_scratch(program: Program) -> Iterable[tuple[str, str, tuple[int, ...]]]:
    for array in arrays_of(program).values():
        if array.on_chip:
            yield array.name, array.dtype.value, array.shape
    for semaphores in semaphores_of(program).values():
        yield semaphores.name, "dma", semaphores.shape
    arguments = {one.name for one in program.operands} | {"emitted", "count", "next_token"}
    for name, count in scalars_of(program).items():
        if name not in arguments:
            yield name, "scalars", (count,)
