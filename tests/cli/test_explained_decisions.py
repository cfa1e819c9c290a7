"""Every decision of a plan has alternatives with a predicted cost, or a reason why it has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from mkc.cli.explain import explained
from mkc.cli.lookup import model_graph
from mkc.cli.output import GRAPH
from mkc.cli.speculation import scheme_round
from mkc.cli.what_if import Options
from mkc.cli.what_if import WhatIf
from mkc.driver import lower_graph
from mkc.ir.graph import Graph
from mkc.ir.text import print_graph
from mkc.plan.folder import PlanFolder
from mkc.plan.weights import weigh
from mkc.report import plan_document
from mkc.schedule.program import MatmulPhase
from mkc.schedule.verify import prove
from mkc.targets import load_target
from tests.passes.lowering import TARGET
from tests.passes.lowering import full_size

TINY = Path(__file__).parents[2] / "models" / "tiny" / "config.json"


def round_of_the_27b_model() -> Graph:
    return scheme_round("qwen38", "dflash2", None, batch=1, context=4096, config_path=None).graph


def tiny() -> Graph:
    return model_graph("qwen38", batch=1, context=256, config_path=TINY)


PLANS: dict[str, tuple[Callable[[], Graph], int]] = {
    "27b": (full_size, 8),
    "27b with drafts": (round_of_the_27b_model, 8),
    "tiny": (tiny, 2),
}
CASES = [pytest.param("27b with drafts", marks=pytest.mark.long), "27b", "tiny"]
SIMULATED = ("tile.", "residency.", "collectives.", "prefetch.", "shard.ranks", "shard.copies.")


@cache
def plan(name: str) -> PlanFolder:
    """What explanations need of a plan folder."""
    graph_of, ranks = PLANS[name]
    graph, target = graph_of(), load_target(TARGET)
    lowered = lower_graph(graph, target, tp=ranks)
    folder = Path(mkdtemp())
    (folder / GRAPH).write_text(print_graph(graph), encoding="utf-8")
    document = json.loads(json.dumps(plan_document(lowered, target, cycles={})))
    return PlanFolder(path=folder, plan=document, report={}, kernel_source="")


@cache
def documents(name: str) -> dict[str, dict[str, Any]]:
    """What `mkc explain --json` says of every decision, by id."""
    answers = WhatIf(plan(name))
    return {
        one.decision.id: explained(one, answers.alternatives(one.decision))
        for one in weigh(plan(name))
    }


@pytest.mark.parametrize("name", CASES)
def test_every_decision_has_a_costed_alternative_or_a_reason(name: str) -> None:
    found = documents(name)
    assert set(found) == {one.id for one in plan(name).decisions}
    for id, document in found.items():
        others = [one for one in document["alternatives"] if one["choice"] != "as chosen"]
        costed = [one for one in others if one["predicted_us"] is not None]
        reasons = [one for one in others if one["predicted_us"] is None and one["why"]]
        assert costed or reasons, id
        assert len(costed) + len(reasons) == len(others), id
        assert all(one["basis"] in ("simulated", "estimated") for one in costed), id


@pytest.mark.parametrize("name", CASES)
def test_whatever_an_option_decides_is_simulated(name: str) -> None:
    """Also options that cannot be had, with what stands against them."""
    for id, document in documents(name).items():
        simulated = [one for one in document["alternatives"] if one["basis"] == "simulated"]
        if id.startswith(SIMULATED):
            chosen, *others = simulated
            assert chosen["options"] == [] and chosen["predicted_us"] > 0, id
            assert others, id
            assert all(one["options"] for one in others), id


def test_loads_of_one_matmul_are_simulated_alone() -> None:
    """The option of a decision about one phase leaves the loads of all others as they are."""
    folder = plan("27b")
    loads = {one.id: one.loads() for one in folder.program.phases() if isinstance(one, MatmulPhase)}
    (largest,) = [id for id, rows in loads.items() if len(rows) == max(map(len, loads.values()))]
    options = [
        one["options"][1]
        for one in documents("27b")[f"tile.{largest}"]["alternatives"]
        if one["basis"] == "simulated" and one["options"]
    ]
    assert len(options) == 2
    for passes in options:
        program = WhatIf(folder).lowered(Options(passes=passes)).program
        other = {one.id: one.loads() for one in program.phases() if isinstance(one, MatmulPhase)}
        assert [id for id in loads if loads[id] != other[id]] == [largest]
        assert sum(other[largest]) == sum(loads[largest])


@pytest.mark.parametrize(
    "passes", ["residency{state_slots=2}", "tile{step=p03,step_load_bytes=64KiB}"]
)
def test_plans_with_these_options_are_proven(passes: str) -> None:
    folder = plan("tiny")
    program = WhatIf(folder).lowered(Options(passes=passes)).program
    assert program != folder.program
    assert prove([program] * program.ranks, folder.target).issues == ()
