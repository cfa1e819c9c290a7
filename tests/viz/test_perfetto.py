"""The trace, read back with Perfetto's own definitions, says what the timeline says."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from typing import Any

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

from mkc.schedule.simulate.events import Event
from mkc.schedule.simulate.events import Kind
from mkc.viz.perfetto import perfetto_trace
from mkc.viz.source import Subject
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


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """Where an arrow passes, and where it ends: annotations and time."""

    passed: tuple[tuple[dict[str, Any], int], ...]
    ended: tuple[tuple[dict[str, Any], int], ...]

    @property
    def begun(self) -> tuple[int, ...]:
        """Ids of the events that it passes."""
        return tuple(one["event"] for one, _ in self.passed)


@cache
def arrows(*, ranks: int = 8, name: str = "27b", rounds: int = 1) -> dict[int, Arrow]:
    """By number. As Perfetto reads them, an arrow goes from event to event in order of time."""
    trace = Trace()
    trace.ParseFromString(perfetto_trace(subject(name, ranks=ranks, rounds=rounds)))
    passed: dict[int, list[tuple[dict[str, Any], int]]] = defaultdict(list)
    ended: dict[int, list[tuple[dict[str, Any], int]]] = defaultdict(list)
    opened: dict[int, dict[str, Any]] = {}
    for one in trace.packet:
        track = one.track_event.track_uuid
        if one.track_event.type != TrackEvent.TYPE_SLICE_END:
            opened[track] = notes(one)
        for number in one.track_event.flow_ids:
            passed[number].append((opened[track], one.timestamp))
        for number in one.track_event.terminating_flow_ids:
            ended[number].append((opened[track], one.timestamp))
    numbers = sorted({*passed, *ended})
    return {one: Arrow(passed=tuple(passed[one]), ended=tuple(ended[one])) for one in numbers}


def moved_by(subject: Subject) -> list[Event]:
    return [one for one in visible(subject.events) if one.kind in (Kind.COPY, Kind.MESSAGE)]


def test_the_arrow_of_every_copy_ends_at_the_wait_that_takes_its_bytes() -> None:
    """Also at those waits that find the bytes there; they take no time and are instants."""
    taken = {id: one for one in subject().events for id in one.took}
    copies = [one for one in moved_by(subject()) if one.kind is Kind.COPY]
    assert len(copies) > 2500
    for one in copies:
        (end,) = arrows()[2 * one.id + 1].ended
        assert end[0]["event"] == taken[one.id].id
        assert end[0]["semaphore"] == one.semaphore
        assert end[1] == round(taken[one.id].end_us * 1000)


def test_a_message_has_an_arrow_to_its_arrival_and_one_to_its_departure() -> None:
    """Whoever receives in the place of this rank; all ranks are alike."""
    messages = [one for one in moved_by(subject()) if one.kind is Kind.MESSAGE]
    assert len(messages) > 500
    departed = 0
    for one in messages:
        (arrival,) = arrows()[2 * one.id + 1].ended
        assert arrival[0]["semaphore"] == one.semaphore
        if sent := arrows().get(2 * one.id + 2):  # all but the signals of a barrier
            ((note, _),) = sent.ended
            assert note["semaphore"] == one.semaphore.replace("arrived", "sent")
            departed += 1
    assert departed > 0.9 * len(messages)


def test_arrows_begin_where_the_copy_is_started_and_go_forward_in_time() -> None:
    shown = {one.id: one for one in visible(subject().events)}
    for number, arrow in arrows().items():
        copy = shown[(number - 1) // 2]
        assert arrow.begun == (copy.source, copy.id)
        times = [at for _, at in (*arrow.passed, *arrow.ended)]
        assert times == sorted(times)


def test_a_step_from_the_middle_says_where_arrows_are_cut_off() -> None:
    """The copies of the ring that this step starts for the next one, and those it was left."""
    one = subject("qwen38_lane", ranks=1, rounds=4)
    taken = {id for each in one.events for id in each.took}
    shown = {each.id for each in visible(one.events)}
    found = arrows(name="qwen38_lane", ranks=1, rounds=4)
    later = [each for each in moved_by(one) if each.id not in taken]
    earlier = [each for each in moved_by(one) if each.source not in shown]
    assert later and earlier
    for each in later:
        ((note, _),) = found[2 * each.id + 1].ended
        assert (note["event"], note["awaited by"]) == (each.id, "not in this step")
    for each in earlier:
        (note, _) = found[2 * each.id + 1].passed[0]
        assert (note["event"], note["started"]) == (each.id, "before this step")
    # Each arrow is whole, or cut off at the one end or the other.
    for number, arrow in found.items():
        if (number - 1) // 2 in {each.id for each in earlier}:
            assert len(arrow.passed) == 1
        assert len(arrow.ended) == 1


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
