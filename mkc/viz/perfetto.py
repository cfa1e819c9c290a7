"""The same events as a trace for Perfetto, in its native protobuf form.

A rank is a process, a lane of the timeline a track, with counters of what is in flight. Arrows lead
from the start of a copy or message to the copy, and from there to the wait for it (`arrows`). Most
waits find their bytes there and take no time; those are instants on a track of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import CounterDescriptor
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TracePacket
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackDescriptor
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

from mkc.schedule.simulate.events import Event
from mkc.schedule.simulate.events import Kind
from mkc.viz.arrows import MOVED
from mkc.viz.arrows import Arrows
from mkc.viz.arrows import arrows_of
from mkc.viz.source import Subject
from mkc.viz.timeline import NS
from mkc.viz.timeline import Lane
from mkc.viz.timeline import lanes_of
from mkc.viz.timeline import visible

SEQUENCE = 1  # all packets are of one writer
COUNTERS = {Kind.COPY: "memory bytes in flight", Kind.MESSAGE: "link bytes in flight"}
INSTANTS = "waits for what was there"


def perfetto_trace(subject: Subject) -> bytes:
    """The trace; its events carry the ids of the timeline's JSON twin."""
    lanes = lanes_of(visible(subject.events))
    arrows = arrows_of(subject.events)
    trace = Trace()
    numbers = _describe(trace, subject, lanes)
    packets: list[tuple[int, TracePacket]] = []
    for lane in lanes:
        for event in lane.events:
            packets += _slice(subject, event, numbers[lane.id], arrows)
    for event in _instants(subject.events, arrows):
        packets.append(_instant(subject, event, numbers[_instants_id(event.rank)], arrows))
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
    for rank in sorted({lane.rank for lane in lanes}):
        track = _descriptor(trace, len(numbers) + 1)
        numbers[_instants_id(rank)] = track.uuid
        track.parent_uuid = numbers[f"r{rank}"]
        track.name = INSTANTS
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


def _slice(
    subject: Subject, event: Event, track: int, arrows: Mapping[int, Arrows]
) -> Iterator[tuple[int, TracePacket]]:
    begin, end = round(event.start_us * NS), round(event.end_us * NS)
    packet = _packet(begin, track, TrackEvent.TYPE_SLICE_BEGIN)
    stall = f"wait: {event.stall}" if event.stall is not None else ""
    packet.track_event.name = stall or f"{event.phase} {event.op}".strip()
    _describe_event(packet, subject, event, arrows)
    yield begin, packet
    # A wait may begin before the copy that it waits for; an arrow ends when the wait does.
    last = _packet(end, track, TrackEvent.TYPE_SLICE_END)
    last.track_event.terminating_flow_ids.extend(_of(event, arrows).ending)
    yield end, last


def _instants_id(rank: int) -> str:
    return f"r{rank} instants"


def _instants(events: Iterable[Event], arrows: Mapping[int, Arrows]) -> Iterator[Event]:
    """Waits that took no time and at which an arrow ends."""
    for one in events:
        if one.kind is Kind.WAIT and one.end_us <= one.start_us and one.id in arrows:
            yield one


def _instant(
    subject: Subject, event: Event, track: int, arrows: Mapping[int, Arrows]
) -> tuple[int, TracePacket]:
    at = round(event.start_us * NS)
    packet = _packet(at, track, TrackEvent.TYPE_INSTANT)
    packet.track_event.name = f"{event.phase} {event.op}".strip()
    _describe_event(packet, subject, event, arrows)
    packet.track_event.terminating_flow_ids.extend(_of(event, arrows).ending)
    return at, packet


def _of(event: Event, arrows: Mapping[int, Arrows]) -> Arrows:
    return arrows.get(event.id) or Arrows()


def _describe_event(
    packet: TracePacket, subject: Subject, event: Event, arrows: Mapping[int, Arrows]
) -> None:
    """Category, arrows that begin or pass here, and annotations."""
    own = _of(event, arrows)
    packet.track_event.categories.append(str(event.kind))
    packet.track_event.flow_ids.extend(own.passing)
    for name, value in (*_annotations(subject, event), *_ends(subject, event, own)):
        note = packet.track_event.debug_annotations.add()
        note.name = name
        if isinstance(value, str):
            note.string_value = value
        else:
            note.int_value = value


def _ends(subject: Subject, event: Event, own: Arrows) -> Iterator[tuple[str, str | int]]:
    """What stands in for the ends of arrows that the trace does not show."""
    unit = subject.folder.unit
    if event.kind in MOVED:
        if not own.started:
            yield "started", f"before this {unit}"
        yield "awaited by", f"event {own.awaited}" if own.awaited >= 0 else f"not in this {unit}"
    elif own.earlier:
        yield "copies from before", own.earlier


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
    if event.semaphore:
        yield "semaphore", event.semaphore
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
        steps = changes.setdefault((one.rank, COUNTERS[one.kind]), {})
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
