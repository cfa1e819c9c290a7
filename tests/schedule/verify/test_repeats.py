"""What the proof leaves out since it has seen it before does the same when it is executed."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mkc.cli.speculation import scheme_round
from mkc.driver import lower_graph
from mkc.ir.types import DType
from mkc.schedule.program import Program
from mkc.schedule.verify import proof as proofs
from mkc.schedule.verify import prove
from mkc.schedule.verify.arrays import Array
from mkc.schedule.verify.arrays import Semaphores
from mkc.schedule.verify.case import cases_of
from mkc.schedule.verify.compare import Recorder
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.events import Start
from mkc.schedule.verify.events import Wait
from mkc.schedule.verify.memory import Memory
from mkc.schedule.verify.protocol import Kernel
from mkc.schedule.verify.ranks import Ranks
from mkc.schedule.verify.repeats import Iteration
from mkc.schedule.verify.repeats import Repeats
from mkc.schedule.verify.repeats import position_of
from mkc.schedule.verify.states import Moves
from mkc.schedule.verify.states import States
from mkc.targets import load_target
from tests.mutation.mutations import MUTATIONS
from tests.mutation.subjects import subject
from tests.passes.lowering import TARGET
from tests.passes.lowering import lower
from tests.passes.stacks import Stack
from tests.schedule.verify.round_programs import round_lowered

SECONDS, BYTES = 30.0, 4 << 30  # what a proof of the largest program may take
PAIRS = [(one, name) for one in MUTATIONS for name in one.subjects]


def repeating(name: str) -> Program:
    """`nested` loops, a `pair` of ranks that draft; else a program of `tests.mutation.subjects`."""
    if name == "nested":
        return lower(Stack(pattern="mmd" * 6, hidden=128, mlp=128, vocab=256).graph(), 2).program
    return round_lowered(2).program if name == "pair" else subject(name)


@pytest.mark.parametrize("name", ["nested", "draft"])
def test_an_iteration_that_is_left_out_leaves_the_state_that_is_known_of_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is executed, and compared with what would have been put in its place."""
    find, keep = Repeats.find, Repeats.keep
    known: dict[Any, Iteration] = {}
    compared = 0

    def find_nothing(self: Repeats, kernel: Kernel, key: Any) -> Iteration | None:
        found = find(self, kernel, key)
        known.pop(key, None)
        if found is not None:
            known[key] = found
        return None

    def compare(self: Repeats, kernel: Kernel, key: Any, executed: Iteration) -> None:
        nonlocal compared
        keep(self, kernel, key, executed)
        if key in known:
            compared += 1
            assert effect(known[key]) == effect(executed)

    monkeypatch.setattr(Repeats, "find", find_nothing)
    monkeypatch.setattr(Repeats, "keep", compare)
    program = repeating(name)
    assert prove([program] * program.ranks, load_target(TARGET)).ok
    assert compared > 0


def effect(iteration: Iteration) -> tuple[Any, ...]:
    """What an iteration changes, under names that do not depend on where it began."""
    before, after = iteration.before, iteration.after
    state = frozenset(iteration.parts.values())
    return iteration.step(), after.row - before.row, after.tiles, state, iteration.asked


@pytest.mark.parametrize("name", ["nested", "experts", "rounds", "draft"])
def test_the_state_is_that_of_the_whole_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is missing in what is said to be touched."""
    state = States.state

    def compare(self: States, memory: Memory, moves: Moves) -> frozenset[int]:
        found = state(self, memory, moves)
        memory.touched = {*memory.held, *memory.started}
        assert state(States(numbers=self.numbers), memory, moves) == found
        return found

    monkeypatch.setattr(States, "state", compare)
    program = repeating(name)
    proof = prove([program] * program.ranks, load_target(TARGET))
    assert proof.ok
    assert proof.repeated > 0 or proof.periods


def test_a_changed_operand_is_seen_where_it_has_been_fetched() -> None:
    """Nothing touches the ring itself when what it holds is overwritten in HBM."""
    memory = cache_in_a_ring()
    states = States()
    states.state(memory, {})
    memory.outdate(Place(array="cache", index=(0,), first=8, count=8))
    assert states.state(memory, {}) == States(numbers=states.numbers).state(whole(memory), {})


def cache_in_a_ring() -> Memory:
    """Sixteen rows of an operand have arrived in a slot."""
    shapes = {"cache": (1, 16, 128), "ring": (1, 16, 128)}
    arrays = {
        name: Array(
            name=name,
            shape=shape,
            dtype=DType.BF16,
            blocks=(1,),
            units=16,
            axis=1,
            on_chip=name == "ring",
        )
        for name, shape in shapes.items()
    }
    memory = Memory(
        arrays=arrays,
        semaphores={"sems": Semaphores(name="sems", shape=(1,))},
        elsewhere=frozenset(),
        report=lambda code, phase, message: pytest.fail(f"{code} {message}"),
    )
    source, target = (Place(array=one, index=(0,), count=16) for one in ("cache", "ring"))
    semaphore = ("sems", (0,))
    memory.event(Start(phase="", routine="", source=source, target=target, semaphore=semaphore))
    memory.event(Wait(phase="", routine="", semaphore=semaphore, size=memory.size(target)))
    return memory


def whole(memory: Memory) -> Memory:
    """The same, and everything may have been touched."""
    memory.touched = {*memory.held, *memory.started}
    return memory


def test_an_iteration_at_the_end_of_the_tape_is_no_other_one() -> None:
    kernel, repeats = a_kernel(), Repeats()
    rows = kernel.program.tape.rows
    repeats.keep(kernel, "key", iteration(kernel, rows=10))
    for row, found in ((0, True), (rows - 10, True), (rows - 9, False)):
        kernel.tape.row = row
        assert (repeats.find(kernel, "key") is not None) == found


def test_an_iteration_that_asks_how_many_rows_are_accepted_depends_on_it() -> None:
    kernel, repeats = a_kernel(), Repeats()
    repeats.keep(kernel, "never", iteration(kernel))
    assert kernel.accepted == (3,)
    assert kernel.asked
    repeats.keep(kernel, "asked", iteration(kernel))
    assert repeats.find(kernel, "asked") is not None
    kernel.counts = (4,)
    assert repeats.find(kernel, "asked") is None
    assert repeats.find(kernel, "never") is not None


def a_kernel() -> Kernel:
    program = subject("draft")
    kernel = Kernel(program=program, rank=0, case=cases_of(program)[0], sink=Recorder())
    kernel.counts = (3,)
    return kernel


def iteration(kernel: Kernel, rows: int = 0) -> Iteration:
    """One that has begun where the kernel is and used up nothing but the tape."""
    before = position_of(kernel)
    after = replace(before, row=before.row + rows)
    return Iteration(
        before=before, after=after, memory=cache_in_a_ring(), parts={}, asked=kernel.asked
    )


def test_what_a_launch_has_executed_is_not_executed_by_the_next() -> None:
    program = repeating("draft")
    short = prove([program], load_target(TARGET))
    whole = prove([program], load_target(TARGET), shorten=False)
    assert short.ok
    assert whole.ok
    assert short.repeated > 0
    assert short.events < whole.events
    assert whole.repeated == 0


@pytest.mark.parametrize("name", ["nested", "levels", "pair"])
def test_phases_that_exchange_nothing_can_be_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit may make anything of an event, so with one every phase is executed."""
    played: list[Sequence[Sequence[Event]]] = []

    class Listener(Ranks):
        def __init__(self, events: Sequence[Sequence[Event]], *others: Any) -> None:
            played.append(events)
            super().__init__(events, *others)

    monkeypatch.setattr(proofs, "Ranks", Listener)
    program = repeating(name)
    for edit in (None, lambda rank, event: (event,)):
        assert prove([program] * program.ranks, load_target(TARGET), edit=edit).ok
    short, whole = played
    assert short == whole
    assert all(short)


def test_a_loop_over_experts_repeats_itself() -> None:
    program = subject("experts")
    proof = prove([program] * program.ranks, load_target(TARGET))
    assert any(one.loop.startswith("experts of") and one.left_out for one in proof.periods)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted({name for _, name in PAIRS}))
def test_no_mutant_gains_from_what_is_left_out(name: str) -> None:
    """The same checks find it when everything is executed."""
    for mutation in (one for one, subject_of in PAIRS if subject_of == name):
        mutant = mutation.make(subject(name))
        found, expected = (
            prove(mutant.programs, load_target(TARGET), edit=mutant.edit, shorten=shorten)
            for shorten in (True, False)
        )
        assert codes(found.issues) == codes(expected.issues), mutation.name


def codes(issues: Sequence[Any]) -> set[str]:
    return {one.code for one in issues}


@pytest.mark.long
def test_a_full_size_round_of_a_mixture_is_proven_quickly() -> None:
    """Kimi K3 with DSpark for 32 ranks, whose layers repeat in no simple way; processor time."""
    target = load_target("tpu7x:2x2x4")
    graph = scheme_round("kimi_k3", "dspark", None, batch=1, context=4096, config_path=None).graph
    program = lower_graph(graph, target).program
    start = time.process_time()
    proof = prove([program] * program.ranks, target)
    assert proof.issues == ()
    assert time.process_time() - start < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < BYTES
