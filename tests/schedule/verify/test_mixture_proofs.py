"""Programs of mixtures of experts, latent attention and residual blocks: proved, and spoiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.schedule.expert_phases import ExpertsPhase
from mkc.schedule.expert_phases import RoutePhase
from mkc.schedule.mixing_phases import ClearBlocksPhase
from mkc.schedule.mixing_phases import LatentAttentionPhase
from mkc.schedule.mixing_phases import StoreBlockPhase
from mkc.schedule.program import Loop
from mkc.schedule.program import Phase
from mkc.schedule.program import Program
from mkc.schedule.simulate import predict
from mkc.schedule.verify import prove
from mkc.schedule.verify.experts import ExpertCursor
from mkc.schedule.verify.experts import Experts
from mkc.targets import load_target
from tests.passes.kimi import small_kimi

TARGET = load_target("tpu7x:2x2x1")


@cache
def program_of(ranks: int, mxfp4: bool = False) -> Program:
    """Five layers: a dense one and experts, two of them with latent attention."""
    graph = small_kimi(layers=5, latent=[3, 5], dense=1, mxfp4=mxfp4)
    pipeline = Pipeline(shard=Shard(ranks=ranks), lower=Lower(logits=True))
    return pipeline.run(graph, TARGET).program


def codes(program: Program) -> set[str]:
    return {one.code for one in prove([program] * program.ranks, TARGET).issues}


def without(program: Program, kind: type[Phase]) -> Program:
    """The program without the first phase of a kind."""
    first = next(one for one in program.phases() if isinstance(one, kind))

    def body(items: tuple[Phase | Loop, ...]) -> tuple[Phase | Loop, ...]:
        kept = (one for one in items if one is not first)
        return tuple(
            replace(one, body=body(one.body)) if isinstance(one, Loop) else one for one in kept
        )

    return replace(program, body=body(program.body))


@pytest.mark.parametrize(("ranks", "mxfp4"), [(1, True), (4, False), (8, True)])
def test_programs_are_proved_and_priced(ranks: int, mxfp4: bool) -> None:
    program = program_of(ranks, mxfp4)
    assert codes(program) == set()
    predicted = predict(program, TARGET)
    assert predicted.round_us > predicted.floor_us > 0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ExpertsPhase, "V501"),  # loads that nobody waits for
        (RoutePhase, "V203"),  # ids that nobody has written
        (LatentAttentionPhase, "V501"),
        (ClearBlocksPhase, "V203"),
    ],
)
def test_a_phase_that_is_missing_is_found(kind: type[Phase], expected: str) -> None:
    assert expected in codes(without(program_of(1), kind))


def test_blocks_have_room_for_the_stream() -> None:
    program = program_of(1)
    first = next(one for one in program.phases() if isinstance(one, StoreBlockPhase))

    def changed(phase: Phase | Loop) -> Phase | Loop:
        if isinstance(phase, Loop):
            return replace(phase, body=tuple(map(changed, phase.body)))
        return replace(first, slots=first.slots + 1) if phase is first else phase

    assert "V803" in codes(replace(program, body=tuple(map(changed, program.body))))


def spoiled_start(change: Callable[[int], int]) -> Callable[..., None]:
    """Loads of experts that begin with another one, or go to another slot."""
    right = Experts.start

    def start(self: Experts, routine: str, cursor: ExpertCursor, entry: int, slot: int) -> None:
        first = cursor.layer * cursor.plan.local
        right(self, routine, cursor, first + change(entry - first), slot)

    return start


def test_an_expert_in_the_wrong_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first two change places: byte counts and semaphores are right, the weights are not."""
    swapped = {0: 1, 1: 0}
    monkeypatch.setattr(Experts, "start", spoiled_start(lambda one: swapped.get(one, one)))
    assert codes(program_of(1)) == {"V202"}


def test_an_expert_that_no_row_chose_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last load brings the expert behind the last one that was chosen."""
    last = program_of(1).expert_rings[0].chosen - 1
    monkeypatch.setattr(Experts, "start", spoiled_start(lambda one: one + (one == last)))
    assert codes(program_of(1)) == {"V202"}
