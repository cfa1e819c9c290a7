"""Decisions are listed by the part of a step that they govern."""

from __future__ import annotations

import pytest

from mkc.errors import UnknownDecisionError
from mkc.plan.folder import PlanFolder
from mkc.plan.phases import phase_rows
from mkc.plan.weights import Weighed
from mkc.plan.weights import find_decisions
from mkc.plan.weights import weigh
from tests.plan.plans import compiled
from tests.plan.plans import plan


@pytest.fixture
def folder() -> PlanFolder:
    return plan("27b", ranks=8)


def one(folder: PlanFolder, name: str) -> Weighed:
    (found,) = find_decisions(folder, name)
    return found


def test_every_decision_is_listed_once_heaviest_first(folder: PlanFolder) -> None:
    weighed = weigh(folder)
    assert sorted(each.decision.id for each in weighed) == sorted(
        each.id for each in folder.decisions
    )
    weights = [each.weight_us for each in weighed]
    assert weights == sorted(weights, reverse=True)
    assert weights[0] > weights[-1] > 0


def test_a_decision_about_a_phase_weighs_what_the_phase_reads(folder: PlanFolder) -> None:
    row = next(each for each in phase_rows(folder) if each.id == "p11")
    found = one(folder, "tile.p11")
    assert found.phases == ("p11",)
    assert found.bytes == row.bytes * row.executions
    rate = folder.target.hbm.sustained_bytes_per_us
    assert found.weight_us == pytest.approx(found.bytes / rate, abs=1e-3)


def test_a_decision_about_no_phase_weighs_the_whole_step(folder: PlanFolder) -> None:
    found = one(folder, "shard.ranks")
    assert found.phases == ()
    assert found.bytes == sum(each.bytes * each.executions for each in phase_rows(folder))


def test_a_decision_about_a_parameter_weighs_its_phase(folder: PlanFolder) -> None:
    assert one(folder, "self_attn.k_proj").phases == ("p17",)
    assert one(folder, "in_proj_a").phases == ("p04",)


@pytest.mark.parametrize(("family", "ranks"), [("27b", 8), ("kimi", 2)])
def test_a_decision_about_a_parameter_never_weighs_the_whole_step(family: str, ranks: int) -> None:
    """A parameter that several regions have is `name#region` in a decision, or its name alone."""
    params = compiled(family, ranks=ranks).graph.params
    for found in weigh(plan(family, ranks=ranks)):
        subject = found.decision.id.partition(".")[2].removeprefix("whole.").removeprefix("narrow.")
        if subject.partition("#")[0] in params:
            assert found.phases, found.decision.id


def test_a_costed_alternative_gives_what_the_choice_saves(folder: PlanFolder) -> None:
    """The exchange of a recurrent layer: 48 times the difference of the two predictions."""
    found = one(folder, "collectives.p09")
    chosen = float(found.decision.chosen.rpartition("predicted ")[2].removesuffix(" us"))
    (other,) = found.decision.rejected.values()
    difference = float(other.removeprefix("predicted ").removesuffix(" us")) - chosen
    assert difference > 1.0
    assert found.saved_us == pytest.approx(48 * difference)
    assert found.weight_us == found.saved_us


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("tile.ring", ["tile.ring"]),
        ("ring", ["tile.ring"]),
        ("RING_SLOTS", ["residency.ring_slots"]),
        ("p11", ["tile.p11"]),
    ],
)
def test_a_name_may_be_short(folder: PlanFolder, name: str, ids: list[str]) -> None:
    assert [each.decision.id for each in find_decisions(folder, name)] == ids


def test_a_part_of_a_name_may_mean_several(folder: PlanFolder) -> None:
    found = find_decisions(folder, "collectives")
    assert [each.decision.id for each in found][:2] == ["collectives.p09", "collectives.p14"]


def test_an_unknown_name_is_refused(folder: PlanFolder) -> None:
    with pytest.raises(UnknownDecisionError, match="tile.ring"):
        find_decisions(folder, "tile.rign")
