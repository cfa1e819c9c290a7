"""The timeline: every event of a prediction on the track where it happened.

The document is columnar: a page with a hundred thousand events opens at once, and the browser draws
from arrays. Events of a lane do not overlap and are sorted by time.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mkc.plan.phases import PhaseRow
from mkc.schedule.simulate.events import CORE
from mkc.schedule.simulate.events import Event
from mkc.schedule.simulate.events import Kind
from mkc.viz.colours import WORK
from mkc.viz.colours import stall_colour
from mkc.viz.colours import work_colour
from mkc.viz.page import page
from mkc.viz.page import scheme_and_target
from mkc.viz.source import Subject

VERSION = 1
NS = 1000.0
STALLED = "stalled"
ISSUE = "issue"
STALL_PREFIX = "stall: "
TAPE_COPY, OTHER_COPY = "copy of weights", "other copy"
# Tracks in the order of the page; what is not here follows in the order of its name.
ORDER = ("matrix", "vector", "control", ISSUE, STALLED, "hbm")


@dataclass(frozen=True, kw_only=True)
class Lane:
    """Events of one track of one rank that do not overlap, by time."""

    rank: int
    name: str
    number: int
    events: tuple[Event, ...]

    @property
    def id(self) -> str:
        return f"r{self.rank}.{self.name}.{self.number}"


def track_name(event: Event) -> str:
    """The engine that works, `stalled`, the memory queue, or the link to a peer."""
    if event.track != CORE:
        return f"{event.track} to {event.peer}" if event.peer >= 0 else event.track
    if event.kind is Kind.WAIT:
        return STALLED
    return str(event.engine) if event.engine is not None else ISSUE


def event_class(event: Event, kinds: dict[str, str]) -> str:
    """What decides an event's colour: the reason of a stall, the phase of work, else its kind."""
    if event.stall is not None:
        return f"{STALL_PREFIX}{event.stall}"
    match event.kind:
        case Kind.WORK:
            return kinds.get(event.phase, "other")
        case Kind.COPY:
            return TAPE_COPY if event.semaphore.partition(" ")[0] == "tape" else OTHER_COPY
        case _:
            return str(event.kind)


def visible(events: Iterable[Event]) -> list[Event]:
    """Events that take time. A wait for what is already there takes none."""
    return [one for one in events if one.end_us > one.start_us]


def lanes_of(events: Sequence[Event]) -> tuple[Lane, ...]:
    """Cuts visible events into lanes: as many per track as overlap at once."""
    tracks: dict[tuple[int, str], list[list[Event]]] = {}
    for one in sorted(events, key=lambda one: (one.start_us, one.id)):
        lanes = tracks.setdefault((one.rank, track_name(one)), [])
        free = next((lane for lane in lanes if lane[-1].end_us <= one.start_us), None)
        if free is None:
            lanes.append([one])
        else:
            free.append(one)
    return tuple(
        Lane(rank=rank, name=name, number=number, events=tuple(lane))
        for (rank, name), lanes in sorted(tracks.items(), key=lambda one: _order(*one[0]))
        for number, lane in enumerate(lanes)
    )


def _order(rank: int, name: str) -> tuple[int, int, str]:
    return rank, ORDER.index(name) if name in ORDER else len(ORDER), name


def timeline_document(subject: Subject) -> dict[str, Any]:
    """The timeline's JSON twin. Times of the columns are whole ns, all others us; all predicted."""
    rows = _phases(subject)
    kinds = {one["id"]: one["kind"] for one in rows}
    lanes = lanes_of(visible(subject.events))
    ordered = [event for lane in lanes for event in lane.events]
    classes = _classes(ordered, kinds)
    names: dict[str, list[str]] = {
        "kinds": _distinct(ordered, lambda one: str(one.kind)),
        "stalls": ["", *filter(None, _distinct(ordered, lambda one: str(one.stall or "")))],
        "ops": _distinct(ordered, lambda one: one.op),
    }
    return {
        "version": VERSION,
        "picture": "timeline",
        "predicted": True,
        **subject.heading,
        "round_us": round(subject.round_us, 3),
        "floor_us": round(subject.floor_us, 3),
        "phases": rows,
        "parts": _parts(subject, ordered),
        "layers": _layers(subject, ordered),
        "classes": [{"name": one, "colour": _colour(one)} for one in classes],
        "totals": _totals(subject, ordered, kinds),
        **names,
        "tracks": _tracks(lanes),
        "events": _columns(subject, lanes, names, classes, kinds, [one["id"] for one in rows]),
    }


def _distinct(events: Sequence[Event], text: Callable[[Event], str]) -> list[str]:
    return sorted({text(one) for one in events})


def _phases(subject: Subject) -> list[dict[str, Any]]:
    """Phases of the program, then words such as `prologue` that events carry outside phases."""
    known = {one.id: one for one in subject.rows}
    outside = sorted({one.phase for one in subject.events} - known.keys())
    return [_phase(one) for one in subject.rows] + [
        {"id": one, "title": one, "kind": one, "part": "", "location": "", "kernel_line": 0}
        for one in outside
    ]


def _phase(row: PhaseRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "title": row.title,
        "kind": row.kind,
        "part": row.part,
        "location": row.location,
        "kernel_line": row.kernel_line,
    }


def _colour(name: str) -> str:
    return stall_colour(name.removeprefix(STALL_PREFIX)) if _stall(name) else work_colour(name)


def _stall(name: str) -> bool:
    return name.startswith(STALL_PREFIX)


def _classes(events: Sequence[Event], kinds: dict[str, str]) -> list[str]:
    """Classes of all events in the order of the legend: work, copies and messages, stalls."""
    order = list(WORK)
    names = {event_class(one, kinds) for one in events}
    return sorted(
        names, key=lambda one: (_stall(one), order.index(one) if one in order else len(order), one)
    )


def _totals(subject: Subject, events: Sequence[Event], kinds: dict[str, str]) -> list[list[Any]]:
    """[class, us a step] of the core, longest first."""
    times: dict[str, float] = {}
    for one in events:
        if one.rank == subject.rank and one.track == CORE:
            name = event_class(one, kinds)
            times[name] = times.get(name, 0.0) + one.us
    ordered = sorted(times.items(), key=lambda one: (-one[1], one[0]))
    return [[name, round(us, 3)] for name, us in ordered]


def _parts(subject: Subject, events: Sequence[Event]) -> list[dict[str, Any]]:
    """When the core is in each part of a round; empty for plain steps."""
    part_of = {one.id: one.part for one in subject.rows}
    spans: dict[str, tuple[float, float]] = {}
    for one in events:
        part = part_of.get(one.phase, "")
        if part and one.track == CORE and one.rank == subject.rank:
            start, end = spans.get(part, (one.start_us, one.end_us))
            spans[part] = (min(start, one.start_us), max(end, one.end_us))
    return [
        {"part": part, "start_us": round(start, 3), "end_us": round(end, 3)}
        for part, (start, end) in sorted(spans.items(), key=lambda one: one[1])
    ]


def _layers(subject: Subject, events: Sequence[Event]) -> list[dict[str, Any]]:
    """When the core is in each layer of each round."""
    spans: dict[tuple[int, int], tuple[float, float]] = {}
    for one in events:
        if one.layer < 0 or one.track != CORE or one.rank != subject.rank:
            continue
        start, end = spans.get((one.round, one.layer), (one.start_us, one.end_us))
        spans[one.round, one.layer] = (min(start, one.start_us), max(end, one.end_us))
    return [
        {"layer": layer, "start_us": round(start, 3), "end_us": round(end, 3)}
        for (_, layer), (start, end) in sorted(spans.items(), key=lambda one: one[1])
    ]


def _tracks(lanes: Sequence[Lane]) -> list[dict[str, Any]]:
    tracks = []
    first = 0
    for lane in lanes:
        last = first + len(lane.events)
        group = "core" if lane.name in ORDER[:-1] else lane.name.partition(":")[0]
        tracks.append(
            {
                "id": lane.id, "rank": lane.rank, "name": lane.name, "group": group,
                "first": first, "last": last,
            }
        )  # fmt: skip
        first = last
    return tracks


def _columns(
    subject: Subject,
    lanes: Sequence[Lane],
    names: dict[str, list[str]],
    classes: Sequence[str],
    kinds: dict[str, str],
    phases: Sequence[str],
) -> dict[str, list[int]]:
    """One list per field, in the order of the lanes; texts are numbers of their tables."""
    number = {key: {text: at for at, text in enumerate(table)} for key, table in names.items()}
    phase_number = {text: at for at, text in enumerate(phases)}
    class_number = {text: at for at, text in enumerate(classes)}
    fields = (
        "id", "track", "start_ns", "duration_ns", "phase", "op", "kind", "class", "stall", "layer",
        "round", "bytes", "slot", "after", "source", "critical",
    )  # fmt: skip
    columns: dict[str, list[int]] = {name: [] for name in fields}
    for track, lane in enumerate(lanes):
        for one in lane.events:
            start = round(one.start_us * NS)
            values = (
                one.id, track, start, round(one.end_us * NS) - start, phase_number[one.phase],
                number["ops"][one.op], number["kinds"][str(one.kind)],
                class_number[event_class(one, kinds)], number["stalls"][str(one.stall or "")],
                one.layer, one.round, one.bytes, one.slot, one.after, one.source,
                int(one.id in subject.critical),
            )  # fmt: skip
            for name, value in zip(fields, values, strict=True):
                columns[name].append(value)
    return columns


def timeline_html(document: dict[str, Any]) -> str:
    """The page."""
    title = f"{document['model']}: timeline of one {document['unit']}"
    ranks = f"{document['ranks']} ranks"
    alike = len({one["rank"] for one in document["tracks"]}) == 1 < document["ranks"]
    ranks += ", all alike" if alike else ""
    body = f"""<header>
<h1>{escape(title)}</h1><span class="badge">predicted, not measured</span>
<span class="facts">{escape(scheme_and_target(document))}, {ranks}, batch {document["batch"]},
position {document["position"]:,}: {document["unit"]} {document["round_us"]:,.1f} &micro;s,
floor {document["floor_us"]:,.1f} &micro;s</span>
<div class="controls">
<input type="search" id="search" placeholder="Search: p09, mlp, layer 12, tape">
<span id="found" class="hint"></span><select id="rank" aria-label="rank"></select>
<button id="fit">Whole {document["unit"]}</button>
<span class="hint"><kbd>&larr;</kbd> <kbd>&rarr;</kbd> pan, <kbd>+</kbd> <kbd>-</kbd> or wheel zoom,
<kbd>n</kbd> <kbd>p</kbd> neighbours, <kbd>/</kbd> search, <kbd>0</kbd> whole
{document["unit"]}</span></div>
<div class="legend"></div>
</header>
<div class="split"><div class="stage"><canvas tabindex="0"></canvas><div class="tip"></div></div>
<aside><div id="whole"><h2>Where the core's time goes</h2><table id="totals"></table>
<p class="hint">Click an event to see what it is.</p></div><dl></dl></aside></div>"""
    html = page(title=title, body=body, document=document, scripts=("canvas.js", "timeline.js"))
    return html.replace("<body>", '<body class="fixed">', 1)
