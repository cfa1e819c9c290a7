"""The same events as a trace for Perfetto, in its native protobuf form.

A rank is a process, a lane of the timeline a track, with counters of what is in flight. Arrows lead
from the start of a copy or message to the copy, and from there to the wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import CounterDescriptor
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackDescriptor
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

from mkc.schedule.simulate.events import Event
from mkc.schedule.simulate.events import Kind
from mkc.viz.source import Subject
from mkc.viz.timeline import NS
from mkc.viz.timeline import Lane
from mkc.viz.timeline import lanes_of
from mkc.viz.timeline import visible

SEQUENCE = 1  # all packets are of one writer
MOVED = {Kind.COPY: "memory bytes in flight", Kind.MESSAGE: "link bytes in flight"}


def perfetto_trace(subject: Subject) -> bytes:
    """The trace; its events carry the ids of the timeline's JSON twin."""
    events = visible(subject.events)
    lanes = lanes_of(events)
    trace = Trace()
    numbers = _describe(trace, subject, lanes)
    packets: list[tuple[int, TracePacket]] = []
    arrows = _arrows(events)
    for lane in lanes:
        for event in lane.events:
            packets += _slice(subject, event, numbers[lane.id], arrows.get(event.id))
    for (rank, name), samples in sorted(_counters(subject.events).items()):
        track = numbers[_counter_id(rank, name)]
        packets += [(at, _counter(at, track, value)) for at, value in samples]
    # Sorting keeps the order of what has the same time, so slices of a lane stay in turn.
    for _, packet in sorted(packets, key=lambda one: one[0]):
        trace.packet.append(packet)
    serialized: bytes = trace.SerializeToString(deterministic=True)
    return serialized


def _describe(trace: Trace, subject: Subject, lanes: Sequence[Lane]) -> dict[str, int]:
    """Writes the descriptors of all tracks and returns their numbers by lane or counter."""
    numbers: dict[str, int] = {}
    for rank in sorted({lane.rank for lane in lanes}):
        process = _descriptor(trace, len(numbers) + 1)
        numbers[f"r{rank}"] = process.uuid
        process.process.pid = rank + 1
        process.process.process_name = f"{subject.heading['model']} rank {rank} (predicted)"
    for lane in lanes:
        track = _descriptor(trace, len(numbers) + 1)
        numbers[lane.id] = track.uuid
        track.parent_uuid = numbers[f"r{lane.rank}"]
        track.name = f"{lane.name} {lane.number}" if lane.number else lane.name
    for rank, name in sorted(_counters(subject.events)):
        track = _descriptor(trace, len(numbers) + 1)
        numbers[_counter_id(rank, name)] = track.uuid
        track.parent_uuid = numbers[f"r{rank}"]
        track.name = name
        track.counter.unit = CounterDescriptor.UNIT_SIZE_BYTES
    return numbers


def _counter_id(rank: int, name: str) -> str:
    return f"r{rank} counter {name}"


def _descriptor(trace: Trace, number: int) -> TrackDescriptor:
    packet = trace.packet.add()
    packet.trusted_packet_sequence_id = SEQUENCE
    packet.track_descriptor.uuid = number
    return packet.track_descriptor


def _arrows(events: Iterable[Event]) -> dict[int, tuple[list[int], list[int]]]:
    """Event id -> numbers of the arrows that pass it, and of those that end there.

    An arrow has the number of the copy or message that it is about, counted from 1.
    """
    arrows: dict[int, tuple[list[int], list[int]]] = {}
    known = {one.id: one for one in events}
    for one in known.values():
        if one.kind in MOVED and one.source in known:
            arrows.setdefault(one.source, ([], []))[0].append(one.id + 1)
            arrows.setdefault(one.id, ([], []))[0].append(one.id + 1)
        if one.kind is Kind.WAIT and one.source in known and known[one.source].kind in MOVED:
            arrows.setdefault(one.id, ([], []))[1].append(one.source + 1)
    return arrows


def _slice(
    subject: Subject, event: Event, track: int, arrows: tuple[list[int], list[int]] | None
) -> Iterator[tuple[int, TracePacket]]:
    begin, end = round(event.start_us * NS), round(event.end_us * NS)
    packet = _packet(begin, track, TrackEvent.TYPE_SLICE_BEGIN)
    stall = f"wait: {event.stall}" if event.stall is not None else ""
    packet.track_event.name = stall or f"{event.phase} {event.op}".strip()
    packet.track_event.categories.append(str(event.kind))
    if arrows is not None:
        packet.track_event.flow_ids.extend(arrows[0])
        packet.track_event.terminating_flow_ids.extend(arrows[1])
    for name, value in _annotations(subject, event):
        note = packet.track_event.debug_annotations.add()
        note.name = name
        if isinstance(value, str):
            note.string_value = value
        else:
            note.int_value = value
    yield begin, packet
    yield end, _packet(end, track, TrackEvent.TYPE_SLICE_END)


def _annotations(subject: Subject, event: Event) -> Iterator[tuple[str, str | int]]:
    yield "event", event.id
    yield "phase", event.phase
    yield "op", event.op
    if event.layer >= 0:
        yield "layer", event.layer
    if event.bytes:
        yield "bytes", event.bytes
    if event.slot >= 0:
        yield "slot", event.slot
    if line := subject.kernel_lines.get(event.phase):
        yield "kernel", f"kernel.py:{line}"
    if event.id in subject.critical:
        yield "critical path", "yes"


def _packet(at: int, track: int, kind: TrackEvent.Type) -> TracePacket:
    packet = TracePacket()
    packet.timestamp = at
    packet.trusted_packet_sequence_id = SEQUENCE
    packet.track_event.type = kind
    packet.track_event.track_uuid = track
    return packet


def _counter(at: int, track: int, value: int) -> TracePacket:
    packet = _packet(at, track, TrackEvent.TYPE_COUNTER)
    packet.track_event.counter_value = value
    return packet


def _counters(events: Iterable[Event]) -> dict[tuple[int, str], list[tuple[int, int]]]:
    """(rank, counter) -> (ns, bytes that were started and are not there yet) at each change."""
    known: dict[int, Event] = {}
    changes: dict[tuple[int, str], dict[int, int]] = {}
    for one in events:
        known[one.id] = one
        if one.kind not in MOVED:
            continue
        issue = known.get(one.source)
        begin = round((issue.end_us if issue else one.start_us) * NS)
        end = round(one.done_us * NS)
        steps = changes.setdefault((one.rank, MOVED[one.kind]), {})
        steps[begin] = steps.get(begin, 0) + one.bytes
        steps[end] = steps.get(end, 0) - one.bytes
    counters = {}
    for key, steps in changes.items():
        value = 0
        samples = []
        for at in sorted(steps):
            value += steps[at]
            samples.append((at, value))
        counters[key] = samples
    return counters
