"""The VMEM map: what lies at which address while which phase runs, with its padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from math import log2
from math import prod
from typing import Any

from mkc.passes.p50_residency import Allocation
from mkc.plan.folder import PlanFolder
from mkc.plan.phases import PhaseRow
from mkc.schedule.exchange_plan import exchange_buffers
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import Program
from mkc.viz.colours import PADDING
from mkc.viz.colours import PEAK
from mkc.viz.page import page
from mkc.viz.page import scheme_and_target
from mkc.viz.source import Subject
from mkc.viz.svg import drawing
from mkc.viz.svg import fitted
from mkc.viz.svg import line
from mkc.viz.svg import rect
from mkc.viz.svg import tag
from mkc.viz.svg import text

VERSION = 1
MIB = 1 << 20
KIB = 1 << 10
SCALAR_BYTES = 4
RING, REGION, FIXED = "ring", "region", "fixed"
FILL = {RING: "#76b7a5", REGION: "#7ba3cc", FIXED: "#c9c2dd"}
STROKE = {RING: "#4f9484", REGION: "#4e79a7", FIXED: "#7d6fb3"}


@dataclass(frozen=True, kw_only=True)
class Box:
    """Something that occupies addresses while phases `first` .. `last` run.

    Attributes:
      id: buffer name, or array and slot number.
      offset, bytes: from the start of the plan's VMEM, tile padding included.
      used: bytes that hold values; the rest is padding.
      first, last: positions of steps.
      lane: ring slot, -1 when it is none.
    """

    id: str
    array: str
    purpose: str
    offset: int
    bytes: int
    used: int
    first: int
    last: int
    lane: int = -1


def vmem_document(subject: Subject) -> dict[str, Any]:
    """The map's JSON twin. Offsets are those of the plan; the TPU compiler places the arrays."""
    folder = subject.folder
    steps = [one for one in subject.rows if one.is_step]
    arrays, boxes = _places(folder, len(steps))
    live = [
        sum(one.bytes for one in boxes if one.first <= position <= one.last)
        for position in range(len(steps))
    ]
    peak = max(range(len(steps)), key=live.__getitem__)
    vmem = folder.report["vmem"]
    return {
        "version": VERSION,
        "picture": "vmem",
        **subject.heading,
        "limit_bytes": vmem["limit_bytes"],
        "reserve_bytes": vmem["reserve_bytes"],
        "planned_bytes": sum(one["bytes"] for one in arrays),
        "padding_bytes": live[peak] - _used(boxes, peak),
        "peak": {"phase": steps[peak].id, "position": peak, "live_bytes": live[peak]},
        "steps": [_step(one, live[at]) for at, one in enumerate(steps)],
        "arrays": arrays,
        "boxes": [vars_of(one) for one in boxes],
        "scalars": _scalars(folder.program),
    }


def _scalars(program: Program) -> list[dict[str, Any]]:
    """Arrays of a round in scalar memory; empty for plain steps."""
    carried = {one.source: one.target for one in program.round.carried} if program.round else {}
    return [
        {
            "id": one.name,
            "value": one.value,
            "bytes": one.size * SCALAR_BYTES,
            "becomes": carried.get(one.name, ""),
        }
        for one in program.scalars
    ]


def _used(boxes: list[Box], position: int) -> int:
    return sum(one.used for one in boxes if one.first <= position <= one.last)


def vars_of(box: Box) -> dict[str, Any]:
    """The box for JSON."""
    return {key: getattr(box, key) for key in Box.__dataclass_fields__}


def _step(row: PhaseRow, live: int) -> dict[str, Any]:
    return {
        "id": row.id,
        "title": row.title,
        "kind": row.kind,
        "kernel_line": row.kernel_line,
        "live_bytes": live,
    }


def _places(folder: PlanFolder, steps: int) -> tuple[list[dict[str, Any]], list[Box]]:
    """Arrays one after the other as the plan lists them, and what lies in them."""
    arrays: list[dict[str, Any]] = []
    boxes: list[Box] = []
    offset = 0
    program = folder.program
    rings = dict(_rings(program))
    messages = dict(_messages(program))
    regions = {one.region for one in program.buffers}
    for array in folder.allocations:
        if array.name in regions:
            kind, inside = REGION, list(_buffers(program, array, offset))
        elif array.name in rings:
            kind, inside = RING, list(_slots(array, *rings[array.name], offset, steps))
        else:
            kind, inside = FIXED, [_whole(array, messages.get(array.name), offset, steps)]
        arrays.append(
            {
                "id": array.name,
                "kind": kind,
                "purpose": array.op,
                "offset": offset,
                "bytes": array.bytes,
                "slots": sum(one.lane >= 0 for one in inside),
            }
        )
        boxes += inside
        offset += array.bytes
    return arrays, boxes


def _rings(program: Program) -> Iterator[tuple[str, tuple[int, int]]]:
    """Array name -> number of slots, bytes of values in one."""
    tape = program.tape
    yield "tape_ring", (tape.slots, tape.slot_rows * TAPE_LANES * 2)
    for stream in program.streams:
        yield f"{stream.name}_ring", (stream.slots, prod(stream.item_shape) * stream.dtype.bytes)
    for cache in program.caches:
        yield f"{cache.name}_ring", (cache.slots, cache.tile * sum(cache.widths) * 2)


def _slots(array: Allocation, slots: int, used: int, offset: int, steps: int) -> Iterator[Box]:
    each = array.bytes // slots
    for slot in range(slots):
        yield Box(
            id=f"{array.name}[{slot}]",
            array=array.name,
            purpose=array.op,
            offset=offset + slot * each,
            bytes=each,
            used=min(used, each),
            first=0,
            last=steps - 1,
            lane=slot,
        )


def _buffers(program: Program, array: Allocation, offset: int) -> Iterator[Box]:
    """Buffers of a region begin at its start and take its first lanes."""
    for one in program.buffers:
        if one.region == array.name:
            padded_rows, lanes = one.shape
            yield Box(
                id=one.name,
                array=array.name,
                purpose=one.purpose,
                offset=offset,
                bytes=array.bytes * lanes // one.region_lanes,
                used=program.rows * lanes * one.dtype.bytes,
                first=one.first,
                last=one.last,
            )


def _messages(program: Program) -> Iterator[tuple[str, int]]:
    """Array name of an exchange -> bytes of values in it."""
    for plan in program.exchanges:
        for suffix, shape, dtype in exchange_buffers(plan, program.ranks):
            yield f"{plan.name}_{suffix}", prod(shape) * dtype.bytes


def _whole(array: Allocation, used: int | None, offset: int, steps: int) -> Box:
    """An array that stays; all of it counts as used where nothing else is known."""
    return Box(
        id=array.name,
        array=array.name,
        purpose=array.op,
        offset=offset,
        bytes=array.bytes,
        used=array.bytes if used is None else min(used, array.bytes),
        first=0,
        last=steps - 1,
    )


WIDTH, TOP, BAR, LABEL, MAP = 1320.0, 64.0, 64.0, 132.0, 400.0
RIGHT = WIDTH - 24.0
LIVE_HEIGHT = 90.0


def array_height(array: dict[str, Any]) -> float:
    """Pixels of an array: readable, not to scale; the bar on the left is to scale."""
    slots, count = int(array["slots"]), int(array["bytes"])
    return max(16.0, 9.0 * slots, 6.0 * log2(1 + count / (4 * KIB)))


def vmem_svg(document: dict[str, Any]) -> str:
    """The map as SVG; every box has the id of its JSON twin."""
    heights = [array_height(one) for one in document["arrays"]]
    gap = 4.0
    bottom = TOP + sum(heights) + gap * len(heights)
    parts = [*_axis(document, bottom), *_scale_bar(document, TOP, bottom)]
    y = TOP
    for array, height in zip(document["arrays"], heights, strict=True):
        parts += _array(document, array, y, height)
        y += height + gap
    parts += _live(document, bottom + 34.0)
    parts += _peak(document, bottom + 34.0 + LIVE_HEIGHT)
    label = f"VMEM map of {document['model']}"
    return drawing(WIDTH, bottom + LIVE_HEIGHT + 74.0, parts, label=label)


def _x(document: dict[str, Any], position: float) -> float:
    return MAP + position * (RIGHT - MAP) / len(document["steps"])


def _axis(document: dict[str, Any], bottom: float) -> Iterator[str]:
    steps = document["steps"]
    wide = (RIGHT - MAP) / len(steps)
    every = max(1, round(24 / wide))
    yield text(MAP, 20, "program order: one column per phase", fill="#66707c")
    for at, step in enumerate(steps):
        x = _x(document, at)
        yield line(x, TOP - 6, x, bottom, stroke="#eef0f3")
        if at % every == 0:
            yield text(
                x + wide / 2,
                TOP - 14,
                step["id"],
                anchor="middle",
                fill="#66707c",
                title=step["title"],
            )


def _scale_bar(document: dict[str, Any], top: float, bottom: float) -> Iterator[str]:
    """All of VMEM to scale: arrays, what is free, what is left to the compiler."""
    limit, reserve = document["limit_bytes"], document["reserve_bytes"]
    per_byte = (bottom - top) / limit
    yield text(BAR + 16, top - 30, "to scale", anchor="middle", fill="#66707c")
    yield rect(BAR, top, 32, bottom - top, fill="#ffffff", stroke="#9aa3ad")
    for one in document["arrays"]:
        yield rect(
            BAR,
            top + one["offset"] * per_byte,
            32,
            one["bytes"] * per_byte,
            fill=FILL[one["kind"]],
            title=f"{one['id']}: {size_text(one['bytes'])}",
            stroke="#ffffff",
            stroke_width=0.4,
        )
    start = (limit - reserve) * per_byte
    yield rect(
        BAR,
        top + start,
        32,
        reserve * per_byte,
        fill="#e4e7eb",
        title=f"left to the compiler: {size_text(reserve)}",
    )
    for mib in range(0, limit // MIB + 1, 8):
        y = top + mib * MIB * per_byte
        yield line(BAR - 4, y, BAR, y, stroke="#9aa3ad")
        yield text(BAR - 8, y + 4, f"{mib}", anchor="end", fill="#66707c", font_size=11)
    yield text(BAR - 8, top - 14, "MiB", anchor="end", fill="#66707c", font_size=11)


def _array(document: dict[str, Any], array: dict[str, Any], y: float, height: float) -> list[str]:
    kind = array["kind"]
    name = fitted(array["id"], MAP - LABEL - 66, 12)
    slots = f", {array['slots']} slots" if array["slots"] else ""
    title = f"{array['id']}: {size_text(array['bytes'])} at {array['offset']:#x}{slots}"
    size = size_text(array["bytes"])
    parts = [
        text(LABEL, y + 12, name, fill="#22272e", title=f"{title}: {array['purpose']}"),
        text(MAP - 8, y + 12, size, anchor="end", fill="#66707c", font_size=11),
        rect(MAP, y, RIGHT - MAP, height, fill="#f5f6f8"),
    ]
    for box in document["boxes"]:
        if box["array"] == array["id"]:
            parts.append(_box(document, array, box, y, height, kind))
    return parts


def _box(
    document: dict[str, Any],
    array: dict[str, Any],
    box: dict[str, Any],
    y: float,
    height: float,
    kind: str,
) -> str:
    """A box with its padding below what is used."""
    per_byte = height / array["bytes"]
    left, right = _x(document, box["first"]), _x(document, box["last"] + 1)
    top = y + (box["offset"] - array["offset"]) * per_byte
    tall = box["bytes"] * per_byte
    used = tall * box["used"] / box["bytes"]
    padding = box["bytes"] - box["used"]
    steps = document["steps"]
    title = (
        f"{box['id']}: {size_text(box['bytes'])} at {box['offset']:#x}, "
        f"{size_text(padding)} of it padding\n"
        f"live {steps[box['first']]['id']} to {steps[box['last']]['id']}\n{box['purpose']}"
    )
    inside = rect(left, top, right - left, used, fill=FILL[kind], title=title)
    inside += rect(left, top + used, right - left, tall - used, fill=PADDING, title=title)
    inside += rect(
        left, top, right - left, tall, fill="none", stroke=STROKE[kind], stroke_width=0.7
    )
    words = fitted(f"slot {box['lane']}" if kind == RING else box["id"], right - left - 6)
    if words and tall >= 9 and (kind != FIXED):
        inside += text(
            left + 4, top + tall / 2 + 3.5, words, fill="#22272e", font_size=min(10.5, tall)
        )
    return tag("g", inside, id=box["id"])


def _live(document: dict[str, Any], top: float) -> Iterator[str]:
    """Bytes in use by phase, in activations: the rest is the same all the time."""
    always = sum(one["bytes"] for one in document["arrays"] if one["kind"] != REGION)
    values = [one["live_bytes"] - always for one in document["steps"]]
    most = max(*values, 1)
    yield text(LABEL, top + 12, "live activations", fill="#22272e")
    yield text(
        LABEL, top + 28, f"beside {size_text(always)} that stay", fill="#66707c", font_size=11
    )
    yield text(MAP - 8, top + 12, size_text(most), anchor="end", fill="#66707c", font_size=11)
    yield line(MAP, top + LIVE_HEIGHT, RIGHT, top + LIVE_HEIGHT, stroke="#9aa3ad")
    for at, value in enumerate(values):
        tall = LIVE_HEIGHT * value / most
        step = document["steps"][at]
        yield rect(
            _x(document, at) + 0.5,
            top + LIVE_HEIGHT - tall,
            _x(document, 1) - _x(document, 0) - 1,
            tall,
            fill=FILL[REGION],
            title=f"{step['id']} {step['title']}: {size_text(step['live_bytes'])} in use",
        )


def _peak(document: dict[str, Any], bottom: float) -> list[str]:
    peak = document["peak"]
    x = _x(document, peak["position"] + 0.5)
    label = f"peak in {peak['phase']}: {size_text(peak['live_bytes'])} live"
    anchor = "end" if x > (MAP + RIGHT) / 2 else "start"
    return [
        line(x, TOP - 8, x, bottom, stroke=PEAK, stroke_width=1.4, stroke_dasharray="5 4"),
        text(x - 6 if anchor == "end" else x + 6, bottom + 18, label, anchor=anchor, fill=PEAK),
    ]


def size_text(count: int) -> str:
    """Bytes for people."""
    if count >= MIB:
        return f"{count / MIB:.2f} MiB"
    return f"{count / KIB:.1f} KiB" if count >= KIB else f"{count} bytes"


def vmem_html(document: dict[str, Any]) -> str:
    """The page: works without a script; what the pointer rests on explains itself."""
    title = f"{document['model']}: VMEM by program order"
    shown = ((FILL[REGION], "activations"), (FILL[RING], "ring slots"), (FILL[FIXED], "fixed"))
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{name}</span>'
        for colour, name in (*shown, (PADDING, "padding"), ("#e4e7eb", "left to the compiler"))
    )
    planned, limit = document["planned_bytes"], document["limit_bytes"]
    body = f"""<header><h1>{escape(title)}</h1>
<span class="facts">{escape(scheme_and_target(document))}, batch {document["batch"]};
{size_text(planned)} of {size_text(limit)} planned,
{size_text(document["reserve_bytes"])} left to the compiler;
peak {size_text(document["peak"]["live_bytes"])} live in {document["peak"]["phase"]},
{size_text(document["padding_bytes"])} of it padding</span>
<div class="legend">{legend}</div></header>
<p class="hint" style="margin:8px 16px 0">Heights in the map are readable, not to scale; the bar on
the left is to scale. Offsets are the plan's: the TPU compiler places the arrays. Rest the pointer
on a box.</p>
<div style="padding:6px 16px">{vmem_svg(document)}</div>{_scalar_table(document["scalars"])}"""
    return page(title=title, body=body, document=document, scripts=())


def _scalar_table(scalars: list[dict[str, Any]]) -> str:
    """What a round keeps in scalar memory, and what of it the next round begins with."""
    if not scalars:
        return ""
    rows = "".join(
        f'<tr id="{one["id"]}"><td>{escape(one["id"])}</td><td>{escape(one["value"])}</td>'
        f'<td class="number">{one["bytes"]}</td><td>{escape(one["becomes"])}</td></tr>'
        for one in scalars
    )
    return f"""<div style="padding:0 16px 24px"><h2>Scalar memory of a round</h2>
<table class="scalars"><tr><th>array</th><th>value of the graph</th><th>bytes</th>
<th>becomes, in the next round</th></tr>{rows}</table></div>"""
