"""A program as text: golden files, and the few rules of the form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import Guard
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Program
from mkc.schedule.program import TileRun
from mkc.schedule.program import phases_of
from mkc.schedule.program_text import print_program
from tests.draft_goldens import golden_round
from tests.golden.fixture import GoldenCheck
from tests.passes.lowering import lower
from tests.passes.lowering import lowered
from tests.passes.lowering import phase_of
from tests.passes.lowering import two_dense_layers


def test_dense_example(golden: GoldenCheck) -> None:
    golden("program/dense.txt", print_program(two_dense_layers().program))


def test_lane_model_on_two_ranks(golden: GoldenCheck) -> None:
    golden("program/qwen38_lane_tp2.txt", print_program(lowered("qwen38_lane", 2).program))


def test_round_on_two_ranks(golden: GoldenCheck) -> None:
    graph = golden_round(sampling=False).graph
    golden("program/round_mini_tp2.txt", print_program(lower(graph, 2).program))


def lines(program: Program) -> list[str]:
    return print_program(program).splitlines()


def test_every_part_has_a_line() -> None:
    """A change of any one part of a program is seen in its text."""
    program = lowered("dense", 2).program
    text = print_program(program)
    assert text.count("\noperand ") == len(program.operands)
    assert text.count("\nbuffer ") == len(program.buffers)
    assert text.count("\nStreamPlan ") == len(program.streams)
    assert text.count("\nCacheStream ") == len(program.caches)
    assert text.count("\nExchangePlan ") == len(program.exchanges)
    for phase in program.phases():
        assert f"{phase.id} {type(phase).__name__} " in text


def test_loops_are_indented() -> None:
    found = lines(lowered("dense", 2).program)
    start = found.index("loop layers x 8 {")
    end = found.index("}")
    assert start < end
    assert all(line.startswith("  ") for line in found[start + 1 : end])
    assert not any(line.startswith(" ") for line in found[end:])


def test_views_are_ranges_of_lanes() -> None:
    """`v_x[0:512]`: the first 512 lanes of a buffer."""
    program = lowered("dense", 2).program
    phase = phase_of(program, AttentionPhase)
    assert isinstance(phase, AttentionPhase)
    (line,) = [line for line in lines(program) if line.strip().startswith(f"{phase.id} ")]
    start = phase.v.start
    assert f" v={phase.v.buffer}[{start}:{start + phase.v.width}] " in line
    assert start > 0


@pytest.mark.parametrize(
    ("guards", "expected"),
    [
        ((Guard(loop=None, ended=(), rows=16),), "(16)"),
        ((Guard(loop=None, ended=(), rows=None),), "(None)"),
        (
            (
                Guard(loop="layers", ended=(), rows=16),
                Guard(loop="blocks", ended=("layers",), rows=32),
                Guard(loop=None, ended=("layers", "blocks"), rows=None),
            ),
            "(16 while layers, 32 after layers while blocks, None after layers after blocks)",
        ),
    ],
)
def test_refills(guards: tuple[Guard, ...], expected: str) -> None:
    program = lowered("dense", 1).program
    phase = phase_of(program, MatmulPhase, "lm_head")
    assert isinstance(phase, MatmulPhase)
    phase = replace(phase, runs=(TileRun(first=2, count=3, refill=(guards,)),))
    (line,) = [one for one in lines(replace(program, body=(phase,))) if one.startswith(phase.id)]
    assert line.endswith(f"runs=(2..5 refill {expected})")


def test_phases_of_a_body_come_in_program_order() -> None:
    program = lowered("27b", 8).program
    numbers = [
        one.id for one in phases_of(program.body) if one.id.startswith("p") and one.id[1:].isdigit()
    ]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == len(numbers)
    loops = [one for one in program.body if isinstance(one, Loop)]
    assert [(one.name, one.count) for one in loops] == [(loops[0].name, 16)]
    assert [one.count for one in loops[0].body if isinstance(one, Loop)] == [3]
