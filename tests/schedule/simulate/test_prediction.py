"""Predictions of whole programs, the 27B model above all."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import prod

import pytest
from pytest import approx

from mkc.schedule.simulate import RankSkew
from mkc.schedule.simulate import Simulation
from mkc.schedule.simulate import predict
from mkc.schedule.simulate import simulate
from mkc.schedule.simulate.events import Kind
from mkc.targets import Target
from mkc.targets import load_target
from tests.passes.lowering import TARGET
from tests.passes.lowering import lowered
from tests.schedule.simulate.programs import several_rounds

ROUNDS = 16


@cache
def target() -> Target:
    return load_target(TARGET)


@cache
def full() -> Simulation:
    """A launch of the 27B model at position 100, as the published kernels were measured."""
    return simulate(several_rounds("27b", 8, ROUNDS), target(), position=100)


def test_a_full_size_round_is_simulated_in_seconds() -> None:
    program = several_rounds("27b", 8, ROUNDS)
    start = time.process_time()
    predict(program, target())
    assert time.process_time() - start < 10.0


def test_the_27b_round_plays_its_tape_without_a_stop() -> None:
    """The stream bounds it, as the design wants: within 3 % of the time of its bytes."""
    found = full().prediction
    assert found.floor_us == approx(1971, abs=2)
    assert found.floor_us <= found.round_us < 1.03 * found.floor_us
    assert found.core_us < found.round_us
    assert found.bytes / 1e6 == approx(6507, abs=3)  # tape, states both ways, one cache tile


def test_the_time_of_a_round_is_the_floor_and_what_is_exposed() -> None:
    for found in (full(), simulate(lowered("qwen38_lane", 2).program, target())):
        prediction = found.prediction
        total = prediction.floor_us + prediction.exposed.total
        assert total == approx(prediction.round_us)
        assert sum(prediction.critical_path.values()) == approx(prediction.round_us)
        assert prediction.utilization == approx(prediction.floor_us / prediction.round_us)
        assert sum(prediction.cost_source.values()) == approx(1.0)


def test_the_parts_of_the_floor_are_its_bytes() -> None:
    """Each part is what the plan moves of it."""
    program = several_rounds("27b", 8, ROUNDS)
    found = full().prediction
    rate = target().hbm.sustained_bytes_per_us
    parts = {part: us * rate for part, us in found.floor_parts.items()}
    assert sum(found.floor_parts.values()) == approx(found.floor_us)
    assert parts["tape"] == approx(program.tape.rows * 512)
    sizes = {one.name: prod(one.item_shape) * one.dtype.bytes for one in program.streams}
    once = sum(sizes[one.name] * one.items for one in program.streams if not one.writes_back)
    both = sum(2 * sizes[one.name] * one.items for one in program.streams if one.writes_back)
    assert parts["small weights"] == approx(once)
    assert parts["states"] == approx(both)
    assert parts["rows"] == approx(16 * 5120 * 2)  # a block of rows of the embedding
    (cache,) = program.caches
    tile, row = cache.tile * cache.width * 2, 16 * cache.width * 2
    assert parts["caches"] == approx(cache.layers * 2 * (tile + row))


def test_the_floor_follows_the_rate_of_the_memory() -> None:
    """A memory twice as fast halves it; then the core is the bound, and shows."""
    hbm = replace(target().hbm, sustained_bytes_per_us=2 * target().hbm.sustained_bytes_per_us)
    fast = predict(several_rounds("27b", 8, ROUNDS), replace(target(), hbm=hbm), position=100)
    found = full().prediction
    assert fast.floor_us == approx(found.floor_us / 2)
    assert fast.core_us == approx(found.core_us, rel=0.01)
    assert 0.99 * found.core_us < fast.round_us < 1.1 * found.core_us
    assert fast.exposed.total > 0.8 * (found.core_us - fast.floor_us)


def test_the_critical_path_has_no_gaps() -> None:
    found = full()
    assert found.path[0].start_us == approx(found.window.start_us)
    assert found.path[-1].end_us == approx(found.window.end_us)
    assert all(one.end_us == approx(other.start_us) for one, other in pairwise(found.path))


def test_the_core_is_never_idle_without_a_reason() -> None:
    """Core events adjoin: whatever is not work is a wait that names its cause."""
    core = [one for one in full().events if one.track == "core"]
    assert all(one.end_us == approx(other.start_us) for one, other in pairwise(core))
    assert all(one.source >= 0 for one in core if one.kind is Kind.WAIT)


def test_a_short_ring_starves() -> None:
    rounds = [
        predict(
            several_rounds("27b", 8, ROUNDS, f"tile{{ring_bytes={size}MiB}}"), target()
        ).round_us
        for size in (8, 16, 40)
    ]
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[0] > 1.05 * rounds[2]


def test_slower_exchanges_show_as_exposed() -> None:
    slow = replace(target().links, chip_latency_us=target().links.chip_latency_us + 2.0)
    program = several_rounds("27b", 8, ROUNDS)
    found = predict(program, replace(target(), links=slow), position=100)
    assert found.exposed.collective > full().prediction.exposed.collective + 20.0


def test_one_slow_rank_slows_all() -> None:
    """Every rank ends when the slow one does; without skew one rank stands for all."""
    program = several_rounds("qwen38_lane", 2, 3)
    alike = simulate(program, target())
    skewed = simulate(program, target(), skew=(RankSkew(), RankSkew(memory_scale=0.5)))
    assert alike.run.symmetric
    assert len(skewed.run.end_us) == 2
    assert max(skewed.run.end_us) - min(skewed.run.end_us) < 5.0
    assert min(skewed.run.end_us) > alike.run.end_us[0]


def test_all_ranks_simulated_agree_with_the_one_that_stands_for_them() -> None:
    program = several_rounds("qwen38_mini", 8, 2)
    one = simulate(program, target())
    all_ranks = simulate(program, target(), skew=(RankSkew(start_us=1e-9),) * 8)
    assert len(all_ranks.run.end_us) == 8
    assert all_ranks.run.end_us == approx((one.run.end_us[0],) * 8)


def test_a_launch_of_one_round_includes_filling_the_ring() -> None:
    whole = simulate(lowered("qwen38_lane", 2).program, target())
    assert (whole.window.start_us, whole.prediction.rounds) == (0.0, 1)
    assert whole.window.end_us == whole.run.end_us[0]


def test_a_later_position_reads_more_of_the_cache() -> None:
    program = several_rounds("27b", 8, ROUNDS)
    late = predict(program, target(), position=4000)
    (cache,) = program.caches
    tiles = 4000 // cache.tile - 100 // cache.tile
    tile_bytes = 2 * cache.tile * cache.width * 2  # keys and values
    assert late.bytes - full().prediction.bytes == approx(tiles * 16 * tile_bytes, rel=0.01)
    assert late.round_us > full().prediction.round_us


@pytest.mark.parametrize("ranks", [1, 2])
def test_documents_are_json_and_the_same_every_time(ranks: int) -> None:
    program = lowered("dense", ranks).program
    first, second = (
        json.dumps(simulate(program, target(), position=5).document(), allow_nan=False)
        for _ in range(2)
    )
    assert first == second
    events = json.loads(first)["events"]
    assert len({one["id"] for one in events}) == len(events)
    assert set(json.loads(first)["predicted"]) >= {
        "round_us",
        "floor_us",
        "floor_parts",
        "utilization",
        "by_engine",
        "exposed",
        "cost_source",
    }
