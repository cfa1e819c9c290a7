"""The VMEM map: boxes are the plan's buffers and ring slots, at the plan's addresses."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from re import findall
from typing import Any

import pytest

from mkc.viz.vmem import vmem_document
from mkc.viz.vmem import vmem_html
from mkc.viz.vmem import vmem_svg
from tests.viz.subjects import subject


@cache
def document() -> dict[str, Any]:
    return vmem_document(subject())


def boxes(array: str) -> list[dict[str, Any]]:
    return [one for one in document()["boxes"] if one["array"] == array]


def test_arrays_follow_each_other_and_add_up_to_the_plan() -> None:
    arrays = document()["arrays"]
    assert arrays[0]["offset"] == 0
    for one, following in pairwise(arrays):
        assert following["offset"] == one["offset"] + one["bytes"]
    assert document()["planned_bytes"] == subject().folder.report["vmem"]["peak_bytes"]


def test_every_buffer_has_a_box_for_its_lifetime() -> None:
    shown = {one["id"]: one for one in document()["boxes"]}
    for buffer in subject().folder.program.buffers:
        box = shown[buffer.name]
        assert (box["array"], box["first"], box["last"]) == (
            buffer.region, buffer.first, buffer.last,
        )  # fmt: skip


def test_no_two_boxes_share_bytes_at_the_same_time() -> None:
    every = document()["boxes"]
    for index, one in enumerate(every):
        for other in every[index + 1 :]:
            together = one["first"] <= other["last"] and other["first"] <= one["last"]
            apart = (
                one["offset"] + one["bytes"] <= other["offset"]
                or other["offset"] + other["bytes"] <= one["offset"]
            )
            assert apart or not together, (one["id"], other["id"])


def test_ring_slots_are_lanes() -> None:
    tape = subject().folder.program.tape
    assert [one["lane"] for one in boxes("tape_ring")] == list(range(tape.slots))
    assert {one["bytes"] for one in boxes("tape_ring")} == {tape.slot_rows * 512}
    (cache,) = subject().folder.program.caches
    assert [one["lane"] for one in boxes("cache_kv_ring")] == list(range(cache.slots))
    keys_and_values = 2 * cache.tile * cache.width * 2
    assert {one["bytes"] for one in boxes("cache_kv_ring")} == {keys_and_values}


def test_padding_is_what_hardware_tiles_add() -> None:
    """One row of eight is used at batch 1; whole tiles of a ring slot are all used."""
    (logits,) = [one for one in document()["boxes"] if one["id"] == "v_lm_head"]
    assert logits["bytes"] == 8 * 31232 * 4
    assert logits["used"] == 31232 * 4
    assert all(one["used"] == one["bytes"] for one in boxes("tape_ring"))


def test_the_peak_is_where_most_bytes_are_live() -> None:
    peak, steps = document()["peak"], document()["steps"]
    live = [
        sum(one["bytes"] for one in document()["boxes"] if one["first"] <= at <= one["last"])
        for at in range(len(steps))
    ]
    assert peak["live_bytes"] == max(live) == live[peak["position"]]
    assert steps[peak["position"]]["id"] == peak["phase"] == "p30"  # the logits
    assert peak["live_bytes"] <= document()["planned_bytes"] <= document()["limit_bytes"]


def test_the_drawing_has_the_ids_of_its_twin() -> None:
    drawn = findall(r'<g id="([^"]+)"', vmem_svg(document()))
    assert drawn == [box["id"] for array in document()["arrays"] for box in boxes(array["id"])]
    assert "peak in p30" in vmem_svg(document())


@pytest.mark.parametrize(("name", "ranks"), [("dense", 1), ("qwen38_mini", 2)])
def test_other_plans_are_drawn_too(name: str, ranks: int) -> None:
    html = vmem_html(vmem_document(subject(name, ranks=ranks)))
    assert findall(r'(?:src|href)="(?!#)', html) == []
    assert html.count("<svg") == 1
