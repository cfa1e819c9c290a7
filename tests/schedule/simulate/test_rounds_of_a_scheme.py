"""Rounds of a scheme are simulated as their kernel runs them."""

from __future__ import annotations

from collections import Counter

import pytest
from pytest import approx

from mkc.codegen_pallas.support import distribution
from mkc.codegen_pallas.support import race
from mkc.codegen_pallas.support import sampled_accept
from mkc.codegen_pallas.support import top_k
from mkc.schedule.program import VECTOR_LANES
from mkc.schedule.program import Program
from mkc.schedule.round_phases import AcceptPhase
from mkc.schedule.round_phases import KeptDeltaRulePhase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import SelectorWalkPhase
from mkc.schedule.round_phases import TopKPhase
from mkc.schedule.simulate import Source
from mkc.schedule.simulate import cost_parts
from mkc.schedule.simulate import simulate
from mkc.schedule.simulate.bundles import PhaseCycles
from mkc.schedule.simulate.cost_parts import PhaseCost
from mkc.schedule.simulate.costs import phase_costs
from mkc.schedule.simulate.machine import Start
from mkc.schedule.simulate.translate_rounds import round_span
from mkc.schedule.verify.arrays import arrays_of
from mkc.schedule.verify.case import Kind
from mkc.schedule.verify.case import following_case
from mkc.schedule.verify.compare import expected_events
from mkc.schedule.verify.events import Start as Copied
from mkc.targets import load_target
from tests.passes.lowering import TARGET
from tests.passes.lowering import phase_of
from tests.schedule.simulate.test_translate import balance
from tests.schedule.simulate.test_translate import instructions
from tests.schedule.verify.round_programs import round_lowered

SMALL_TILES = "residency{cache_tile=16}"
ROWS = 8
CLOCK = 2200  # cycles per us


def program(ranks: int = 1, *, batch: int = 1, rounds: int = 1) -> Program:
    return round_lowered(ranks, batch=batch, rounds=rounds, passes=SMALL_TILES).program


@pytest.mark.parametrize(("ranks", "batch", "rounds"), [(1, 1, 1), (2, 2, 4)])
def test_every_semaphore_ends_at_zero(ranks: int, batch: int, rounds: int) -> None:
    left = balance(program(ranks, batch=batch, rounds=rounds), min(rounds, 3))
    assert len(left) > 5
    assert set(left.values()) == {0}


def test_masks_are_fetched_with_the_round() -> None:
    plan = round_lowered(2, passes=SMALL_TILES, sampling=True, masks=True).program
    (masks,) = (one for one in plan.operands if one.role == "token_masks")
    left = balance(plan, 1)
    assert masks.name in left
    assert set(left.values()) == {0}


@pytest.mark.parametrize("position", [0, 13, 16, 40, 85])
def test_the_memory_moves_what_the_kernel_copies(position: int) -> None:
    """Copies between HBM and VMEM of a round, by size: those that the verifier proves."""
    plan = program(batch=2)
    kind = Kind(positions=(position,) * 2, rows=(ROWS,) * 2, counts=(ROWS,) * 2)
    case = following_case(plan, kind, rounds=1, ran=1)
    arrays = arrays_of(plan)
    proven = Counter(
        one.target.count * arrays[one.target.array].unit_bytes
        for one in expected_events(plan, 0, case)
        if isinstance(one, Copied)
        and not (arrays[one.source.array].on_chip and arrays[one.target.array].on_chip)
    )
    simulated = Counter(
        one.bytes for one in instructions(plan, position=position) if isinstance(one, Start)
    )
    assert simulated == proven


def test_a_window_leaves_out_tiles() -> None:
    (cache,) = [one for one in program().caches if one.window is not None]
    assert round_span(cache, 0) == (0, 1)
    assert round_span(cache, 40) == (0, 3)
    assert round_span(cache, 80) == (3, 5)


def test_a_round_goes_on_by_its_rows() -> None:
    """The middle one of three rounds; its caches are read from eight positions further on."""
    found = simulate(program(rounds=4), load_target(TARGET), position=8)
    assert found.prediction.rounds == 3
    assert len(found.run.round_starts[0]) == 3
    alone = simulate(program(), load_target(TARGET), position=16)
    assert found.prediction.bytes == approx(alone.prediction.bytes, rel=0.01)


def cost(plan: Program, phase: str, code: PhaseCycles) -> PhaseCost:
    return phase_costs(plan, load_target(TARGET), {phase: code})[phase]


def code(cycles: float, *loops: PhaseCycles) -> PhaseCycles:
    return PhaseCycles(bundles=1, cycles=cycles, pushes=0, loops=loops)


def test_attention_has_a_loop_over_sequences_and_one_over_tiles() -> None:
    phase = phase_of(program(), RowsAttentionPhase)
    found = cost(program(), phase.id, code(CLOCK, code(2 * CLOCK, code(3 * CLOCK))))
    assert found.source is Source.MACHINE_CODE
    assert (found.once_us, found.item_us, found.tile_us) == (approx(1), approx(2), (approx(3),))


def test_the_walk_is_charged_its_rows_and_not_its_copies() -> None:
    phase = phase_of(program(), SelectorWalkPhase)
    loops = (code(5 * CLOCK), code(2 * CLOCK, code(7 * CLOCK), code(7 * CLOCK)))
    found = cost(program(), phase.id, code(CLOCK, *loops))
    assert (found.once_us, found.item_us) == (approx(1), approx(2))


def test_the_walk_of_several_sequences_has_a_loop_over_them() -> None:
    """Copies are started and awaited in loops before it."""
    plan = program(batch=2)
    phase = phase_of(plan, SelectorWalkPhase)
    copies = [code(7 * CLOCK)] * 4
    row = code(2 * CLOCK, *copies, code(3 * CLOCK))
    found = cost(plan, phase.id, code(CLOCK, code(5 * CLOCK), code(5 * CLOCK), row))
    assert (found.once_us, found.item_us) == (approx(1), approx(2 / 2 + 3))


def test_loops_have_the_steps_of_the_support_functions() -> None:
    steps = cost_parts.SEARCH_CHUNK, cost_parts.SUM_CHUNK, cost_parts.RACE_CHUNK
    assert steps == (top_k.CHUNK, sampled_accept.STEP, race.BLOCK)
    assert cost_parts.LIST_STEPS == VECTOR_LANES // distribution.TURNS


@pytest.mark.parametrize("batch", [1, 2])
def test_drawing_is_charged_its_loops(batch: int) -> None:
    """The list of the largest logits, the sum of all, the order of the list; then each sequence
    counts, races and emits. Loops of one iteration are none in machine code."""
    plan = round_lowered(1, batch=batch, passes=SMALL_TILES, sampling=True).program
    phase = phase_of(plan, AcceptPhase)
    assert isinstance(phase, AcceptPhase)
    assert phase.sampling is not None
    columns = phase.logits.width
    assert columns == 1024, "a race has one step"
    sequences = [code(CLOCK)] * 3 if batch > 1 else []
    search = code(CLOCK, code(CLOCK), code(CLOCK))
    loops = (search, code(CLOCK), code(CLOCK), *sequences)
    found = cost(plan, phase.id, code(CLOCK, *loops))
    assert found.source is Source.MACHINE_CODE
    expected = 1 + (1 + columns // 256 + phase.sampling.listed) + columns // 512 + 8
    assert found.once_us == approx(expected + len(sequences) * batch)
    other = cost(plan, phase.id, code(CLOCK, *loops, code(CLOCK)))
    assert other.source is Source.TARGET, "other loops than those of the source"


def test_top_k_passes_over_its_columns_once() -> None:
    phase = phase_of(program(), TopKPhase)
    assert isinstance(phase, TopKPhase)
    chunks = phase.logits.width // 256
    assert chunks > 1
    found = cost(program(), phase.id, code(0, code(CLOCK, code(CLOCK), code(2 * CLOCK))))
    assert found.once_us == approx(1 + chunks + 2 * phase.k)


def test_code_with_other_loops_is_not_believed() -> None:
    for kind in (RowsAttentionPhase, SelectorWalkPhase, TopKPhase, KeptDeltaRulePhase):
        phase = phase_of(program(), kind)
        strange = code(1, code(1, code(1, code(1))))
        found = cost(program(), phase.id, strange)
        assert found.source is Source.TARGET, kind
        assert found.once_us + found.item_us > 0
