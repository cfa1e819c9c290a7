"""What the passes give up where VMEM is short."""

from __future__ import annotations

import pytest

from mkc.errors import VmemError
from mkc.passes.p10_shard import Shard
from mkc.passes.pipeline import Lowered
from mkc.passes.pipeline import Pipeline
from mkc.schedule.simulate import simulate
from mkc.targets import load_target
from mkc.vmem_trades import lower_within_vmem
from tests.passes.lowering import TARGET
from tests.passes.lowering import full_size
from tests.passes.test_pipeline import small_memory

PIPELINE = Pipeline(shard=Shard(ranks=8))
SHORT, TIGHT = "residency.short_vmem", 24  # MiB that leave the ring a few slots


def lowered(mib: int, passes: str = "") -> Lowered:
    pipeline = PIPELINE.override(passes)
    target = small_memory(mib)
    return lower_within_vmem(pipeline, pipeline.prepare(full_size(), target), target)


def test_nothing_is_given_up_where_there_is_room() -> None:
    target = load_target(TARGET)
    prepared = PIPELINE.prepare(full_size(), target)
    found = lower_within_vmem(PIPELINE, prepared, target)
    assert found.program == PIPELINE.finish(prepared, target).program
    assert not found.is_short
    assert all(one.id != SHORT for one in found.log.decisions)


def test_the_fastest_choice_is_taken() -> None:
    """Found by trying all of them by hand; the decision tells their times."""
    target = small_memory(TIGHT)
    found = lowered(TIGHT)
    (decision,) = [one for one in found.log.decisions if one.id == SHORT]
    times = {}
    for tile in (512, 256):
        usual = target.dma.load_target_bytes
        for load in (0, usual * 3 // 2, usual):
            options = f"tile{{load_bytes={load}}},residency{{largest_tile={tile}}}"
            by_hand = PIPELINE.override(options).run(full_size(), target)
            times[simulate(by_hand.program, target).prediction.round_us] = by_hand
    assert len(times) > 1
    assert found.program == times[min(times)].program
    assert f"predicted {min(times):.0f} us" in decision.chosen
    assert len(decision.rejected) == 5


def test_the_recorded_options_make_the_same_program() -> None:
    found = lowered(TIGHT)
    again = PIPELINE.override(found.pipeline).run(full_size(), small_memory(TIGHT))
    assert again.program == found.program
    assert lowered(TIGHT, found.pipeline).program == found.program


def test_what_was_asked_for_stays() -> None:
    found = lowered(TIGHT, "residency{cache_tile=128},tile{load_bytes=1MiB}")
    assert {one.tile for one in found.program.caches} == {128}
    assert (
        found.tiles.slot_rows
        == PIPELINE.override("tile{load_bytes=1MiB}")
        .run(full_size(), load_target(TARGET))
        .tiles.slot_rows
    )


def test_what_does_not_fit_at_all() -> None:
    with pytest.raises(VmemError):
        lowered(12)
