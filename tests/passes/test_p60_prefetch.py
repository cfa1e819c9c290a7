"""Pass 60: every load of the tape is started once, in order, `slots` loads ahead of its use."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

from mkc.schedule.program import Guard
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.program import TileRun
from tests.passes.lowering import CASES
from tests.passes.lowering import dense_graph
from tests.passes.lowering import full_size
from tests.passes.lowering import golden_graph
from tests.passes.lowering import lower
from tests.passes.lowering import lowered
from tests.passes.stacks import STACKS
from tests.passes.stacks import Stack
from tests.passes.tape_player import Player
from tests.passes.tape_player import TapeError


def play(program: Program) -> None:
    Player(program=program).play()


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_models(name: str, ranks: int) -> None:
    play(lowered(name, ranks).program)


@given(
    STACKS,
    strategies.sampled_from([1, 2, 8]),
    strategies.sampled_from([0, 16, 64, 512]),
    strategies.sampled_from([0, 128, 1024]),
)
@settings(max_examples=80, deadline=None)
def test_random_stacks(stack: Stack, ranks: int, load_kib: int, ring_kib: int) -> None:
    """Loops in loops, layers of unequal widths, small and large loads, shallow and deep rings."""
    passes = f"tile{{load_bytes={load_kib}KiB,ring_bytes={ring_kib}KiB}}"
    play(lower(stack.graph(), ranks, passes).program)


ROUNDS = 4


@pytest.mark.parametrize(("name", "ranks"), CASES)
@pytest.mark.parametrize(("rounds", "stop_after"), [(4, None), (1, None), (4, 1), (3, 2)])
def test_rounds_of_one_launch(name: str, ranks: int, rounds: int, stop_after: int | None) -> None:
    """The tape never stops between rounds; a stop token leaves the next round's first loads."""
    if name in ("27b", "dense"):
        graph = full_size() if name == "27b" else dense_graph()
    else:
        graph = golden_graph(name)
    program = lower(graph, ranks, f"lower{{rounds={ROUNDS}}}").program
    Player(program=program, rounds=rounds).play(stop_after)


@given(STACKS, strategies.sampled_from([1, 8]), strategies.integers(1, ROUNDS), strategies.data())
@settings(max_examples=40, deadline=None)
def test_rounds_of_random_stacks(
    stack: Stack, ranks: int, rounds: int, data: strategies.DataObject
) -> None:
    program = lower(stack.graph(), ranks, f"lower{{rounds={ROUNDS}}}").program
    Player(program=program, rounds=rounds).play(data.draw(strategies.integers(1, rounds)))


def test_the_ring_is_full_from_the_start() -> None:
    program = lowered("27b", 8).program
    assert len(program.tape.prologue) == program.tape.slots > 3


def test_a_ring_is_never_deeper_than_a_loop_body_has_loads() -> None:
    """Otherwise a refill would have to look across two loop borders."""
    program = lower(Stack(pattern="mmm").graph(), 8, "tile{load_bytes=64KiB}").program
    body = next(one for one in program.body if isinstance(one, Loop)).body
    loads = sum(len(one.loads()) for one in body if isinstance(one, MatmulPhase))
    assert program.tape.slots <= loads


def test_a_guard_stands_where_a_loop_may_end() -> None:
    """Behind the recurrent layers comes another layer, with loads of other sizes."""
    program = lowered("qwen38_lane", 8).program
    found = [
        guards
        for phase in program.phases()
        if isinstance(phase, MatmulPhase)
        for run in phase.runs
        for guards in run.refill
    ]
    guarded = [guards for guards in found if len(guards) > 1]
    assert 0 < len(guarded) < len(found) // 2
    for again, ended in guarded:
        assert (again.loop, again.ended) == ("layers", ())
        assert (ended.loop, ended.ended) == (None, ("layers",))
        assert again.rows != ended.rows


def mutations(program: Program) -> list[Program]:
    """The program with one refill changed: another size, nothing, or guards exchanged."""
    changed = []

    def rebuild(
        body: tuple[Phase | Loop, ...], old: TileRun, new: TileRun
    ) -> tuple[Phase | Loop, ...]:
        out: list[Phase | Loop] = []
        for item in body:
            if isinstance(item, Loop):
                out.append(replace(item, body=rebuild(item.body, old, new)))
            elif isinstance(item, MatmulPhase):
                runs = tuple(new if run is old else run for run in item.runs)
                out.append(replace(item, runs=runs))
            else:
                out.append(item)
        return tuple(out)

    def variants(guards: tuple[Guard, ...]) -> list[tuple[Guard, ...]]:
        first = guards[0]
        found = [
            (replace(first, rows=None if first.rows else 16), *guards[1:]),
            (replace(first, rows=(first.rows or 0) + 16), *guards[1:]),
        ]
        if len(guards) > 1:
            found.append((replace(first, rows=guards[1].rows), replace(guards[1], rows=first.rows)))
        return found

    for phase in program.phases():
        for run in phase.runs if isinstance(phase, MatmulPhase) else ():
            for at, guards in enumerate(run.refill):
                for variant in variants(guards):
                    refill = (*run.refill[:at], variant, *run.refill[at + 1 :])
                    new = replace(run, refill=refill)
                    changed.append(replace(program, body=rebuild(program.body, run, new)))
    return changed


@pytest.mark.parametrize("name", ["dense", "qwen38_mini"])
def test_every_wrong_refill_is_noticed(name: str) -> None:
    """The check itself: no refill of these programs can be changed without the player seeing it."""
    found = mutations(lowered(name, 2).program)
    assert len(found) > 10
    for program in found:
        with pytest.raises(TapeError):
            play(program)


def test_a_prologue_that_is_too_short_is_noticed() -> None:
    program = lowered("dense", 2).program
    tape = replace(program.tape, prologue=program.tape.prologue[:-1])
    with pytest.raises(TapeError):
        play(replace(program, tape=tape))
