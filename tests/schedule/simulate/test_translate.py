"""Machine programs of real programs: what is started is waited for, in the right order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from mkc.ir.token_masks import with_token_masks
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import AllReducePhase
from mkc.schedule.program import AttentionPhase
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Program
from mkc.schedule.simulate.costs import phase_costs
from mkc.schedule.simulate.machine import Instruction
from mkc.schedule.simulate.machine import RoundStart
from mkc.schedule.simulate.machine import Send
from mkc.schedule.simulate.machine import Stall
from mkc.schedule.simulate.machine import Start
from mkc.schedule.simulate.machine import Wait
from mkc.schedule.simulate.translate import machine_program
from mkc.targets import load_target
from tests.passes.lowering import TARGET
from tests.passes.lowering import full_size
from tests.passes.lowering import golden_graph
from tests.passes.lowering import lower
from tests.passes.lowering import lowered
from tests.schedule.simulate.programs import several_rounds

ROW_BYTES = TAPE_LANES * 2


def instructions(
    program: Program, *, rank: int = 0, position: int = 5, rounds: int = 1
) -> Iterator[Instruction]:
    target = load_target(TARGET)
    costs = phase_costs(program, target, {})
    machine = machine_program(program, costs, position=position, rounds=rounds)
    return machine.instructions(rank)


def balance(program: Program, rounds: int) -> Counter[str]:
    """Bytes that arrive at every semaphore of a rank less the bytes that it waits for."""
    left: Counter[str] = Counter()
    for rank in range(program.ranks):
        for one in instructions(program, rank=rank, rounds=rounds):
            if isinstance(one, Wait) and rank == 0:
                left[one.semaphore] -= one.bytes
            elif isinstance(one, Start) and rank == 0:
                left[one.semaphore] += one.bytes
            elif isinstance(one, Send):
                left[one.semaphore] += one.bytes * (one.peer == 0)
                left[one.sent] += one.bytes * (rank == 0 and bool(one.sent))
    return left


CASES = [("dense", 1, 1), ("dense", 2, 3), ("qwen38_lane", 2, 1), ("qwen38_mini", 8, 2)]


@pytest.mark.parametrize(("name", "ranks", "batch"), CASES)
def test_every_semaphore_ends_at_zero(name: str, ranks: int, batch: int) -> None:
    left = balance(lowered(name, ranks, batch).program, 1)
    assert len(left) > 5
    assert set(left.values()) == {0}


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_every_semaphore_ends_at_zero_after_several_rounds(rounds: int) -> None:
    assert set(balance(several_rounds("qwen38_lane", 2, 3), rounds).values()) == {0}


def test_token_masks_are_fetched_and_waited_for() -> None:
    graph = with_token_masks(golden_graph("qwen38_lane"))
    program = lower(graph, 2).program
    masks = [one for one in program.operands if one.role == "token_masks"]
    assert len(masks) == 1
    assert set(balance(program, 1).values()) == {0}
    assert masks[0].name in balance(program, 1)


def test_a_forgotten_refill_is_seen() -> None:
    """The test above can fail: without one guard's load a slot is waited for in vain."""
    program = lowered("dense", 1).program
    tape = replace(program.tape, prologue=program.tape.prologue[:-1])
    assert set(balance(replace(program, tape=tape), 1).values()) != {0}


def test_the_tape_is_played_once_per_round() -> None:
    program = several_rounds("qwen38_lane", 2, 3)
    loads = [
        one
        for one in instructions(program, rounds=3)
        if isinstance(one, Start) and one.semaphore.startswith("tape")
    ]
    assert sum(one.bytes for one in loads) == 3 * program.tape.rows * ROW_BYTES
    slots = [one.slot for one in loads]
    assert slots == [index % program.tape.slots for index in range(len(slots))]


def test_loads_are_waited_for_with_their_own_bytes_in_order() -> None:
    program = lowered("qwen38_lane", 2).program
    started: list[tuple[int, int]] = []
    waited: list[tuple[int, int]] = []
    for one in instructions(program):
        if isinstance(one, Start | Wait) and one.semaphore.startswith("tape"):
            (started if isinstance(one, Start) else waited).append((one.slot, one.bytes))
            assert len(started) >= len(waited), "a load is waited for before it is started"
    assert started == waited


def test_loads_of_the_program_are_the_waits_of_its_phases() -> None:
    program = lowered("qwen38_lane", 2).program
    waits = Counter(
        one.mark.phase
        for one in instructions(program)
        if isinstance(one, Wait) and one.stall is Stall.TAPE
    )
    executions = Counter(
        one.mark.phase for one in instructions(program) if isinstance(one, Wait | Start)
    )
    for phase in program.phases():
        if isinstance(phase, MatmulPhase):
            assert waits[phase.id] % len(phase.loads()) == 0
            assert executions[phase.id] >= waits[phase.id]


@pytest.mark.parametrize(("position", "tiles"), [(0, 1), (511, 1), (512, 2), (4000, 8)])
def test_cache_tiles_up_to_the_position(position: int, tiles: int) -> None:
    program = lower(full_size(), 8).program
    (cache,) = program.caches
    assert cache.tile == 512
    fetched = [
        one
        for one in instructions(program, position=position)
        if isinstance(one, Start) and one.semaphore.startswith(f"{cache.name} arrived")
    ]
    assert len(fetched) == 2 * tiles * cache.layers
    attention = next(one for one in program.phases() if isinstance(one, AttentionPhase))
    waits = [
        one
        for one in instructions(program, position=position)
        if isinstance(one, Wait) and one.mark.phase == attention.id and "arrived" in one.semaphore
    ]
    assert len(waits) == tiles * cache.layers


def test_layers_are_numbered_in_order_of_execution() -> None:
    """64 layers of the 27B model: three of one kind, one of the other, 16 times."""
    program = lower(full_size(), 8).program
    layers: dict[int, set[str]] = {}
    for one in instructions(program):
        if isinstance(one, Wait) and one.stall is Stall.TAPE:
            layers.setdefault(one.mark.layer, set()).add(one.mark.phase)
    assert list(layers) == [*range(64), -1]  # the head is in no layer
    assert layers[0] == layers[1] == layers[2] != layers[3]
    assert layers[3] == layers[63]


def test_every_exchange_goes_to_every_peer() -> None:
    program = lower(full_size(), 8).program
    reduces = [one for one in program.phases() if isinstance(one, AllReducePhase)]
    sends = [
        one
        for one in instructions(program, rank=5)
        if isinstance(one, Send) and one.mark.phase == reduces[0].id
    ]
    assert [one.peer for one in sends[:7]] == [5 ^ distance for distance in range(7, 0, -1)]
    assert len(sends) == 7 * 48
    assert {one.bytes for one in sends} == {5120 * 4}


def test_rounds_are_marked() -> None:
    program = several_rounds("qwen38_lane", 2, 3)
    marks = [one.mark for one in instructions(program, rounds=3) if isinstance(one, RoundStart)]
    assert [one.round for one in marks] == [0, 1, 2]
    with pytest.raises(AssertionError, match="more rounds"):
        next(instructions(program, rounds=4))
    with pytest.raises(AssertionError, match="beyond the context"):
        next(instructions(program, position=program.context))
