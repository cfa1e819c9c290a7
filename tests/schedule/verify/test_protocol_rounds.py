"""The events of rounds of a scheme are those of their kernels; see `test_protocol`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mkc.cli.speculation import scheme_round
from mkc.codegen_pallas.source_memory import scratch
from mkc.passes.pipeline import Lowered
from mkc.schedule.lint.program import lint_program
from mkc.schedule.program import RESTING
from mkc.schedule.verify import verify_program
from mkc.schedule.verify.arrays import arrays_of
from mkc.schedule.verify.arrays import scalars_of
from mkc.schedule.verify.arrays import semaphores_of
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.case import Kind
from mkc.schedule.verify.case import cases_of
from mkc.schedule.verify.case import following_case
from mkc.schedule.verify.case import launches_of
from mkc.schedule.verify.compare import difference
from mkc.schedule.verify.compare import expected_events
from mkc.schedule.verify.trace import reference_names
from mkc.schedule.verify.trace import tracer_of
from mkc.targets import load_target
from tests.draft_goldens import golden_plain
from tests.passes.lowering import TARGET
from tests.passes.lowering import lower
from tests.schedule.verify.round_programs import CONTEXT
from tests.schedule.verify.round_programs import round_lowered
from tests.schedule.verify.traced import module_of
from tests.schedule.verify.traced import trace

SMALL_TILES = "residency{cache_tile=16}"
ROUNDS = 4
ROWS = 8
RESULTS = {"emitted", "counts", "drafts", "ran", "tokens_out", "positions_out", "kept_out"}


def compare(lowered: Lowered, ranks: Sequence[int], cases: Sequence[Case]) -> None:
    module = module_of(lowered)
    kernel, names = trace(module), reference_names(module.SPEC)
    for rank in ranks:
        for case in cases:
            tracer = tracer_of(lowered.program, rank, case)
            found = tracer.run(kernel, names)
            expected = expected_events(lowered.program, rank, case)
            assert difference(expected, found) is None, case.name
            assert tracer.hints == []


@pytest.mark.parametrize(
    ("ranks", "batch", "passes"), [(1, 1, SMALL_TILES), (2, 3, SMALL_TILES), (2, 1, "")]
)
def test_launches_of_one_round(ranks: int, batch: int, passes: str) -> None:
    """Every kind of positions and of acceptance: rows in one block and in two, of one tile and of
    two, at the end of the context, without drafts, beside sequences that rest."""
    lowered = round_lowered(ranks, batch=batch, passes=passes)
    cases = cases_of(lowered.program)
    assert len(cases) > 10
    compare(lowered, [ranks - 1], cases)


@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 2)])
def test_rounds_that_sample(ranks: int, batch: int) -> None:
    """Two exchanges, and rows that are fetched and saved around the rounds.

    What they draw is not known, so the kernel is told what to emit.
    """
    lowered = round_lowered(ranks, batch=batch, passes=SMALL_TILES, sampling=True)
    cases = cases_of(lowered.program)[:: 1 if batch == 1 else 3]
    compare(lowered, [ranks - 1], cases)
    assert not verify_program(lowered.program, load_target(TARGET))


@pytest.mark.parametrize("sampling", [True, False])
def test_rounds_with_masks(sampling: bool) -> None:
    """As they are served: masks are fetched with the round and waited for before acceptance."""
    lowered = round_lowered(2, passes=SMALL_TILES, sampling=sampling, masks=True)
    compare(lowered, [1], cases_of(lowered.program)[::6])
    assert not verify_program(lowered.program, load_target(TARGET))
    assert not [
        one for one in lint_program(lowered.program, load_target(TARGET)) if one.code == "L106"
    ]


@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 2)])
def test_rounds_without_drafts(ranks: int, batch: int) -> None:
    graph = golden_plain(batch=batch, context=CONTEXT).graph
    lowered = lower(graph, ranks, f"{SMALL_TILES},lower{{rounds={ROUNDS}}}")
    compare(lowered, [ranks - 1], launches_of(lowered.program))
    assert not verify_program(lowered.program, load_target(TARGET))


def test_gathered_columns() -> None:
    lowered = round_lowered(2, gathers=True)
    assert any(one.kind == "gather" for one in lowered.program.exchanges)
    compare(lowered, [1], cases_of(lowered.program)[:1])


def test_launches_of_several_rounds() -> None:
    """One sequence accepts six of eight rows, the other is near the end of the context and rests
    when it has reached it."""
    lowered = round_lowered(1, batch=2, rounds=ROUNDS, passes=SMALL_TILES)
    program = lowered.program
    first = Kind(positions=(13, CONTEXT - ROWS - 2), rows=(ROWS, ROWS), counts=(6, 3))
    cases = [
        following_case(program, first, rounds=ROUNDS, ran=ROUNDS),
        following_case(program, first, rounds=2, ran=2),
        following_case(program, first, rounds=ROUNDS, ran=1),  # both emit a stop id
    ]
    assert cases[0].positions[1:] == (
        (19, CONTEXT - ROWS + 1),
        (27, RESTING),
        (35, RESTING),
    )
    compare(lowered, [0], cases)


@pytest.mark.parametrize("sampling", [False, True])
def test_launches_that_follow_from_their_scalars(sampling: bool) -> None:
    """What an edited kernel is traced for: every kind of round, and several rounds.

    When it samples, nothing is known of what the second round draws: it emits nothing, and ends.
    """
    lowered = round_lowered(2, batch=2, rounds=ROUNDS, passes=SMALL_TILES, sampling=sampling)
    launches = launches_of(lowered.program)
    most = 2 if sampling else 3
    assert {(one.rounds, one.ran) for one in launches} == {(1, 1), (1, 0), (most, most), (most, 1)}
    compare(lowered, [1], launches)


def test_a_round_that_accepts_less_is_told_from_one_that_accepts_all() -> None:
    """What differs is how many rows enter the drafter's cache."""
    lowered = round_lowered(1)
    kind = Kind(positions=(13,), rows=(ROWS,), counts=(ROWS,))
    case = following_case(lowered.program, kind, rounds=1, ran=1)
    fewer = replace(case, counts=((3,),))
    events = [expected_events(lowered.program, 0, one) for one in (case, fewer)]
    assert difference(events[0], events[1]) is not None


@pytest.mark.parametrize(
    ("ranks", "batch", "rounds", "sampling"),
    [(2, 2, 1, False), (1, 1, ROUNDS, False), (2, 2, ROUNDS, True)],
)
def test_arrays_are_those_of_the_kernel(
    ranks: int, batch: int, rounds: int, sampling: bool
) -> None:
    """Names, shapes and element types of everything that the kernel allocates."""
    program = round_lowered(ranks, batch=batch, rounds=rounds, sampling=sampling).program
    arrays = arrays_of(program).values()
    expected = {
        (one.name, one.dtype.value, one.shape) for one in arrays if one.on_chip and not one.scalar
    }
    expected |= {(one.name, "scalars", one.shape) for one in arrays if one.scalar}
    expected |= {(one.name, "dma", one.shape) for one in semaphores_of(program).values()}
    known = RESULTS | {one.name for one in program.operands} | {one.name for one in arrays}
    counts = scalars_of(program)
    expected |= {(name, "scalars", (n,)) for name, n in counts.items() if name not in known}
    assert set(scratch(program)) == expected


@pytest.mark.long
def test_the_full_size_kernel() -> None:
    graph = scheme_round("qwen38", "dflash2", None, batch=1, context=4096, config_path=None).graph
    lowered = lower(graph, 8)
    kind = Kind(positions=(2059,), rows=(ROWS,), counts=(5,))
    compare(lowered, [0, 7], [following_case(lowered.program, kind, rounds=1, ran=1)])
