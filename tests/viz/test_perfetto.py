"""The trace, read back with Perfetto's own definitions, says what the timeline says."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

from mkc.schedule.simulate.events import Kind
from mkc.viz.perfetto import perfetto_trace
from mkc.viz.timeline import timeline_document
from mkc.viz.timeline import visible
from tests.viz.subjects import subject


@cache
def packets() -> list[Any]:
    trace = Trace()
    trace.ParseFromString(perfetto_trace(subject()))
    return list(trace.packet)


def tracks() -> dict[int, Any]:
    """Track descriptors by number."""
    found = [one.track_descriptor for one in packets() if one.HasField("track_descriptor")]
    return {one.uuid: one for one in found}


def events(kind: int) -> list[Any]:
    return [one for one in packets() if one.track_event.type == kind]


def notes(packet: Any) -> dict[str, Any]:
    return {
        one.name: one.string_value or one.int_value for one in packet.track_event.debug_annotations
    }


def test_every_event_is_a_slice_with_the_id_of_the_json_twin() -> None:
    columns = timeline_document(subject())["events"]
    slices = {notes(one)["event"]: one for one in events(TrackEvent.TYPE_SLICE_BEGIN)}
    assert sorted(slices) == sorted(columns["id"])
    for id, start in zip(columns["id"], columns["start_ns"], strict=True):
        assert slices[id].timestamp == start


def test_slices_of_a_track_open_and_close_in_turn() -> None:
    """No slice nests in another: each track shows one thing at a time."""
    depth: dict[int, int] = defaultdict(int)
    before: dict[int, int] = {}
    for one in packets():
        step = {TrackEvent.TYPE_SLICE_BEGIN: 1, TrackEvent.TYPE_SLICE_END: -1}.get(
            one.track_event.type, 0
        )
        if not step:
            continue
        track = one.track_event.track_uuid
        assert one.timestamp >= before.get(track, 0)
        before[track] = one.timestamp
        depth[track] += step
        assert depth[track] in (0, 1)
    assert set(depth.values()) == {0}


def test_tracks_belong_to_the_process_of_their_rank() -> None:
    found = tracks()
    processes = {one.uuid for one in found.values() if one.HasField("process")}
    assert len(processes) == 1
    assert all(one.parent_uuid in processes for one in found.values() if one.uuid not in processes)
    names = {one.name for one in found.values()}
    assert {"matrix", "vector", "stalled", "hbm", "memory bytes in flight"} <= names


def test_arrows_lead_from_a_start_over_the_copy_to_its_wait() -> None:
    slices = {notes(one)["event"]: one for one in events(TrackEvent.TYPE_SLICE_BEGIN)}
    shown = {one.id: one for one in visible(subject().events)}
    waits = [
        one
        for one in shown.values()
        if one.kind is Kind.WAIT and one.source in shown and shown[one.source].kind is Kind.COPY
    ]
    assert len(waits) > 100
    for wait in waits:
        copy = shown[wait.source]
        arrow = copy.id + 1
        assert arrow in slices[wait.id].track_event.terminating_flow_ids
        assert arrow in slices[copy.id].track_event.flow_ids
        if copy.source in shown:
            assert arrow in slices[copy.source].track_event.flow_ids
            assert slices[copy.source].timestamp <= slices[copy.id].timestamp


def test_the_counter_of_bytes_in_flight_never_is_negative_and_ends_empty() -> None:
    track = next(one.uuid for one in tracks().values() if one.name == "memory bytes in flight")
    values = [
        one.track_event.counter_value
        for one in events(TrackEvent.TYPE_COUNTER)
        if one.track_event.track_uuid == track
    ]
    assert min(values) >= 0
    assert values[-1] == 0
    ring = subject().folder.program.tape
    assert 0.5 * ring.slots * ring.slot_rows * 512 < max(values)


def test_a_slice_names_its_line_of_the_kernel() -> None:
    lines = subject().folder.kernel_source.splitlines()
    named = [notes(one) for one in events(TrackEvent.TYPE_SLICE_BEGIN)]
    matmul = next(one for one in named if one["phase"] == "p11" and "layer" in one)
    line = int(str(matmul["kernel"]).removeprefix("kernel.py:"))
    assert lines[line - 1].startswith("def p11_")
