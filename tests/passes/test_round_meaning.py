"""The program of a speculative round computes what its graph says; see `test_meaning`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from mkc.passes.pipeline import Lowered
from mkc.schedule.program import Loop
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Phase
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.round_phases import TapPhase
from tests.draft_goldens import golden_round
from tests.passes.gathered import gather_everything
from tests.passes.lowering import lower
from tests.passes.meaning import Symbols
from tests.passes.meaning import run_graph
from tests.passes.round_machine import run_round


def lowered(ranks: int, batch: int = 1) -> Lowered:
    return lower(golden_round(batch=batch, sampling=False).graph, ranks)


def differences(one: Lowered) -> list[str]:
    """What the program computes that the graph does not, what it leaves out, wrong outputs."""
    symbols = Symbols()
    wanted = run_graph(one.steps.sharded.graph, symbols)
    done = run_round(one, symbols)
    known = {operation for operation, _ in wanted.operations}
    executed = {operation for operation, _ in done.operations}
    found = [f"{place} is new" for operation, place in done.operations if operation not in known]
    found += [
        f"{place} is left out"
        for operation, place in wanted.operations
        if operation not in executed
    ]
    for name, lanes in wanted.outputs.items():
        if not (done.outputs[name] == lanes).all():
            found.append(f"output {name}")
    return found


@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 1), (8, 1), (1, 2)])
def test_rounds(ranks: int, batch: int) -> None:
    assert differences(lowered(ranks, batch)) == []


def test_gathered_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    gather_everything(monkeypatch)
    one = lowered(2)
    assert any(plan.kind == "gather" for plan in one.program.exchanges)
    assert differences(one) == []


type Change = Callable[[Phase], Phase]


def changed(one: Lowered, kind: type[Phase], change: Change) -> Lowered:
    """The program with every phase of a kind changed."""

    def visit(body: tuple[Phase | Loop, ...]) -> tuple[Phase | Loop, ...]:
        return tuple(
            replace(item, body=visit(item.body))
            if isinstance(item, Loop)
            else (change(item) if type(item) is kind else item)
            for item in body
        )

    return replace(one, program=replace(one.program, body=visit(one.program.body)))


def swapped_products(phase: Phase) -> Phase:
    """Both products of the shared weights go where the other one belongs."""
    assert isinstance(phase, MatmulPhase)
    if not phase.also:
        return phase
    (other,) = phase.also
    return replace(phase, output=other.output, also=(replace(other, output=phase.output),))


def shifted_taps(phase: Phase) -> Phase:
    assert isinstance(phase, TapPhase)
    return replace(phase, places=(phase.places[-1], *phase.places[:-1]))


def own_positions(phase: Phase) -> Phase:
    """The block's rows are taken for those that are remembered."""
    assert isinstance(phase, RowsAttentionPhase)
    if phase.remembered is None:
        return phase
    return replace(phase, remembered=replace(phase.remembered, positions=phase.positions))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (MatmulPhase, swapped_products),
        (TapPhase, shifted_taps),
        (RowsAttentionPhase, own_positions),
    ],
)
def test_another_program_is_seen(kind: type[Phase], change: Change) -> None:
    assert differences(changed(lowered(1), kind, change))
