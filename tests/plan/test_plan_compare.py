"""`mkc diff`: what changed between two plans, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from mkc.plan.compare import compare
from mkc.schedule.program import MatmulPhase
from tests.plan.plans import plan
from tests.viz.subjects import subject


def test_a_plan_does_not_differ_from_itself() -> None:
    found = compare(plan("27b", ranks=8), plan("27b", ranks=8))
    assert (found.request, found.decisions, found.loads, found.buffers) == ((), (), (), ())
    assert all(one.before == one.after for one in found.predicted)
    assert [one.name for one in found.predicted][0] == "floor"


def test_the_floor_is_that_of_the_predicted_round() -> None:
    """As in the summary and the timeline: with the cache rows that a round reads."""
    folder = plan("qwen38_mini", ranks=2)
    floor = compare(folder, folder).predicted[0]
    assert floor.before == folder.report["predicted"]["floor_us"]
    assert floor.before == round(subject("qwen38_mini", ranks=2).floor_us, 3)


def test_a_larger_batch_changes_exchanges_buffers_and_times_but_no_load() -> None:
    before, after = plan("27b", ranks=8), plan("27b", ranks=8, batch=8)
    found = compare(before, after)
    assert {one.name for one in found.request} == {"batch", "rows"}
    assert found.loads == ()
    exchange = next(one for one in found.decisions if one.name == "collectives.p09")
    assert str(exchange.before).startswith("one_shot")
    assert str(exchange.after).startswith("two_phase")
    sizes = {one.name: one.bytes for one in after.allocations}
    changed = {one.name: one for one in found.buffers}
    assert changed["state_recurrent_ring"].after == sizes["state_recurrent_ring"]
    assert changed["exchange_one_shot_5120_0_receive"].after is None
    floor = found.predicted[0]
    assert isinstance(floor.before, float) and isinstance(floor.after, float)
    assert floor.after > floor.before


def test_fewer_ranks_change_the_loads() -> None:
    found = compare(plan("qwen38_mini", ranks=2), plan("qwen38_mini", ranks=1))
    assert any(one.name.startswith("p") for one in found.loads)
    assert {one.name for one in found.request} == {"ranks"}


def test_phases_that_do_the_same_are_compared_whatever_their_numbers() -> None:
    """A round has phases that the plain step lacks; the matmuls behind them have other numbers."""
    plain, round_ = plan("qwen38_lane", ranks=2), plan("round", ranks=2)
    found = compare(plain, round_)
    titles = [
        {
            one.title: one.id
            for one in reversed(list(folder.program.phases()))
            if isinstance(one, MatmulPhase)
        }
        for folder in (plain, round_)
    ]
    common = [title for title in titles[0] if title in titles[1]]
    moved = {
        title: f"{titles[0][title]} ({titles[1][title]})"
        for title in common
        if titles[0][title] != titles[1][title]
    }
    assert moved
    names = [one.name for one in found.loads]
    assert len(set(names)) == len(names)
    # The drafter reads the head once more; that one has no counterpart.
    for title in common:
        assert sum(one.endswith(f" {title}") and one[0] != "(" for one in names) <= 1, title
    decisions = {one.name: one for one in found.decisions}
    for title, both in moved.items():
        # Neither gone in the one plan nor new in the other; the same choice is no difference.
        assert f"tile.{titles[0][title]}" not in decisions
        assert f"tile.({titles[1][title]})" not in decisions
        if change := decisions.get(f"tile.{both}"):
            assert None not in (change.before, change.after)
    alone = [one for one in found.loads if one.name.startswith("(p")]
    assert alone and all(one.before is None for one in alone)
    assert found == compare(plain, round_)


def test_what_the_predictions_hold_for_is_compared() -> None:
    """Positions, and where the times of phases come from: without that figures do not compare."""
    before = plan("27b", ranks=8)
    predicted = {**before.report["predicted"], "position": 4000}
    predicted["cost_source"] = {"machine code": 0.1, "push rate": 0.9}
    after = replace(before, report={**before.report, "predicted": predicted})
    found = {one.name: (one.before, one.after) for one in compare(before, after).request}
    assert found == {
        "predicted at position": (2048, 4000),
        "predicted with times from": ("target file", "machine code, push rate"),
    }
