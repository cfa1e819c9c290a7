"""The timeline says of every event what the simulation said, in a form that draws fast."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from json import loads
from re import findall
from re import search
from typing import Any

import pytest

from mkc.schedule.simulate.events import CORE
from mkc.schedule.simulate.events import Event
from mkc.schedule.simulate.events import Kind
from mkc.schedule.simulate.machine import Stall
from mkc.viz.page import compact_json
from mkc.viz.timeline import lanes_of
from mkc.viz.timeline import timeline_document
from mkc.viz.timeline import timeline_html
from mkc.viz.timeline import visible
from tests.viz.subjects import subject


@cache
def document() -> dict[str, Any]:
    return timeline_document(subject())


def rows(picture: dict[str, Any]) -> Iterator[dict[str, int]]:
    """The columns as one record per event."""
    columns = picture["events"]
    for values in zip(*columns.values(), strict=True):
        yield dict(zip(columns, values, strict=True))


def event(number: int, start: float, end: float, **more: Any) -> Event:
    fields: dict[str, Any] = {
        "rank": 0, "track": CORE, "kind": Kind.WORK, "done_us": end, "phase": "p00", "op": "add",
        "layer": 0, "round": 0,
    }  # fmt: skip
    return Event(id=number, start_us=start, end_us=end, **{**fields, **more})


def test_every_event_that_takes_time_is_there_with_its_facts() -> None:
    picture, seen = document(), subject()
    events = {one.id: one for one in visible(seen.events)}
    shown = {one["id"]: one for one in rows(picture)}
    assert shown.keys() == events.keys()
    for id, one in shown.items():
        simulated = events[id]
        assert one["start_ns"] == pytest.approx(simulated.start_us * 1000, abs=0.51)
        assert one["duration_ns"] == pytest.approx(simulated.us * 1000, abs=1.01)
        assert picture["phases"][one["phase"]]["id"] == simulated.phase
        assert picture["ops"][one["op"]] == simulated.op
        assert picture["kinds"][one["kind"]] == simulated.kind
        assert picture["stalls"][one["stall"]] == (simulated.stall or "")
        assert (one["layer"], one["bytes"], one["slot"]) == (
            simulated.layer, simulated.bytes, simulated.slot,
        )  # fmt: skip
        assert (one["after"], one["source"]) == (simulated.after, simulated.source)
        assert one["critical"] == (id in seen.critical)


def test_events_of_a_lane_are_sorted_and_do_not_overlap() -> None:
    picture = document()
    ends: dict[int, int] = {}
    for one in rows(picture):
        assert one["start_ns"] >= ends.get(one["track"], 0) - 1, one  # rounded to whole ns
        ends[one["track"]] = one["start_ns"] + one["duration_ns"]
    for number, track in enumerate(picture["tracks"]):
        tracks = picture["events"]["track"][track["first"] : track["last"]]
        assert set(tracks) == {number}


def test_events_that_overlap_get_lanes() -> None:
    """Two copies at once are seen side by side; a third fits behind the first."""
    overlapping = [event(0, 0.0, 2.0), event(1, 1.0, 3.0), event(2, 2.0, 4.0)]
    lanes = lanes_of([*overlapping, event(3, 0.0, 1.0, kind=Kind.WAIT, stall=Stall.TAPE)])
    assert [(lane.name, [one.id for one in lane.events]) for lane in lanes] == [
        ("issue", [0, 2]), ("issue", [1]), ("stalled", [3]),
    ]  # fmt: skip


def test_tracks_are_the_engines_the_memory_and_the_links() -> None:
    names = [one["name"] for one in document()["tracks"]]
    assert names[:4] == ["matrix", "vector", "issue", "stalled"]
    assert "hbm" in names
    assert {f"link:chip to {peer}" for peer in range(2, 8)} <= set(names)
    assert "link:sibling to 1" in names


def test_all_layers_are_marked_in_order() -> None:
    layers = document()["layers"]
    assert [one["layer"] for one in layers] == list(range(64))
    for one, following in zip(layers, layers[1:], strict=False):
        assert one["start_us"] < one["end_us"] <= following["start_us"] + 1e-3


def test_the_core_is_busy_or_waits_all_the_time() -> None:
    """What the side panel lists adds up to the step."""
    picture = document()
    total = sum(us for _, us in picture["totals"])
    assert total == pytest.approx(picture["round_us"], rel=1e-3)
    assert {"matmul", "stall: exchange"} <= {name for name, _ in picture["totals"]}


def test_stalls_and_work_have_their_own_colours() -> None:
    colours = {one["name"]: one["colour"] for one in document()["classes"]}
    stalls = {name: colour for name, colour in colours.items() if name.startswith("stall: ")}
    assert len(stalls) >= 3
    assert len(set(stalls.values())) == len(stalls)
    work = [colour for name, colour in colours.items() if name not in stalls]
    assert set(work).isdisjoint(stalls.values())


def test_the_critical_path_explains_the_step() -> None:
    """Its events take nearly all of it; the rest is latency after a copy or message."""
    critical = sum(one["duration_ns"] for one in rows(document()) if one["critical"]) / 1000
    assert 0.9 * document()["round_us"] < critical <= document()["round_us"] + 1.0


def test_the_page_is_one_file_that_fetches_nothing() -> None:
    html = timeline_html(document())
    assert findall(r'(?:src|href)="(?!#)', html) == []
    assert findall(r"https?://(?!www\.w3\.org/)", html) == []
    assert "predicted, not measured" in html


def test_the_page_holds_its_json_twin() -> None:
    html = timeline_html(document())
    data = search(r'<script id="data" type="application/json">(.*?)</script>', html)
    assert data is not None
    assert loads(data[1]) == loads(compact_json(document()))


def test_names_cannot_break_out_of_the_page() -> None:
    evil = {**document(), "model": "</script><script>alert(1)</script>"}
    assert "<script>alert(1)" not in timeline_html(evil)


def test_a_launch_of_many_rounds_shows_one_round() -> None:
    """The second of three; its events start at zero."""
    many, one = subject("dense", ranks=2, rounds=8), subject("dense", ranks=2)
    assert {each.round for each in many.events if each.track == CORE and each.us > 0} == {1}
    assert min(each.start_us for each in many.events) == 0.0
    assert max(each.end_us for each in many.events) == pytest.approx(many.round_us)
    assert many.round_us < one.round_us  # a launch alone also fills the ring
