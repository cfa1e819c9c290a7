"""`mkc diff`: what changed between two plans, and nothing else."""

from __future__ import annotations

from mkc.plan.compare import compare
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
