"""The roofline: what phases are predicted to reach, beneath what memory and matrix units allow."""

from __future__ import annotations

from collections.abc import Iterator
from math import atan2
from math import ceil
from math import degrees
from math import floor
from math import log10
from typing import Any

from mkc.viz.colours import FLOOR
from mkc.viz.colours import work_colour
from mkc.viz.source import Subject
from mkc.viz.svg import drawing
from mkc.viz.svg import line
from mkc.viz.svg import tag
from mkc.viz.svg import text

VERSION = 1
WIDTH, HEIGHT = 1280.0, 520.0
LEFT, RIGHT, TOP, BOTTOM = 86.0, 836.0, 74.0, 462.0
TERA = 1e6  # flops per us in a Tflop/s
SOFT = "#66707c"
NOTE = "A phase above the memory's roof works on weights that were loaded during earlier phases."


def roofline_document(subject: Subject) -> dict[str, Any]:
    """The roofline's JSON twin: roofs, and a point per phase that reads weights or states."""
    target = subject.folder.target
    points = []
    for row in subject.rows:
        step_us = subject.phase_us.get(row.id, 0.0)
        if not (row.flops and row.bytes and step_us):
            continue
        points.append(
            {
                "id": row.id,
                "title": row.title,
                "kind": row.kind,
                **_rates(row.flops, row.bytes, step_us, row.executions),
            }
        )
    return {
        "version": VERSION,
        "picture": "roofline",
        "predicted": True,
        **subject.heading,
        "roofs": {
            "peak_bytes_per_us": target.hbm.peak_bytes_per_us,
            "sustained_bytes_per_us": target.hbm.sustained_bytes_per_us,
            "flops_per_us": target.mxu.bf16_flops_per_us,
        },
        "whole": _rates(
            sum(one.flops * one.executions for one in subject.rows),
            sum(one.bytes * one.executions for one in subject.rows),
            subject.round_us,
            1,
        ),
        "points": points,
    }


def _rates(flops: int, moved: int, step_us: float, executions: int) -> dict[str, Any]:
    """Of one execution; `step_us` is the time of all of them."""
    us = step_us / executions
    return {
        "flops": flops,
        "bytes": moved,
        "us": round(us, 3),
        "step_us": round(step_us, 3),
        "flops_per_byte": round(flops / moved, 4),
        "flops_per_us": round(flops / us, 1),
        "bytes_per_us": round(moved / us, 1),
    }


class _Axes:
    """Both axes are logarithmic: flops per byte to the right, flops per us upwards."""

    def __init__(self, document: dict[str, Any]) -> None:
        roofs, points = document["roofs"], document["points"]
        ridge = roofs["flops_per_us"] / roofs["sustained_bytes_per_us"]
        every = [*points, document["whole"]]
        across = [one["flops_per_byte"] for one in every]
        up = [one["flops_per_us"] for one in every]
        self.left = floor(log10(min(across)) - 0.2)
        self.right = ceil(log10(ridge * 3))
        self.low = floor(log10(min(up)) - 0.2)
        self.high = ceil(log10(roofs["flops_per_us"] * 1.5))

    def x(self, value: float) -> float:
        return LEFT + (log10(value) - self.left) / (self.right - self.left) * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        return BOTTOM - (log10(value) - self.low) / (self.high - self.low) * (BOTTOM - TOP)


def roofline_svg(document: dict[str, Any]) -> str:
    """The picture; every point has the id of its phase."""
    axes = _Axes(document)
    title = f"{document['model']}: roofline of one {document['unit']}"
    facts = f"{document['target']}, {document['ranks']} ranks, batch {document['batch']}, "
    facts += f"position {document['position']:,}"
    parts = [
        tag("rect", x=0, y=0, width=WIDTH, height=HEIGHT, fill="#ffffff"),
        text(LEFT, 24, title, font_size=15, font_weight="600", fill="#22272e"),
        text(LEFT, 42, f"{facts}; points are predicted, not measured", fill=SOFT),
        text(LEFT, 56, NOTE, fill=SOFT, font_size=11),
        *_grid(axes),
        *_roofs(document, axes),
        *_points(document, axes),
    ]
    return drawing(WIDTH, HEIGHT, parts, label=title) + "\n"


def _grid(axes: _Axes) -> Iterator[str]:
    for power in range(axes.left, axes.right + 1):
        x = axes.x(10.0**power)
        yield line(x, TOP, x, BOTTOM, stroke="#eef0f3")
        yield text(x, BOTTOM + 18, _power(power), anchor="middle", fill=SOFT)
    for power in range(axes.low, axes.high + 1):
        y = axes.y(10.0**power)
        yield line(LEFT, y, RIGHT, y, stroke="#eef0f3")
        yield text(LEFT - 8, y + 4, _power(power - 6), anchor="end", fill=SOFT)
    yield text((LEFT + RIGHT) / 2, HEIGHT - 16, "flops per byte of HBM", anchor="middle", fill=SOFT)
    middle = (TOP + BOTTOM) / 2
    yield text(
        22, middle, "Tflop/s of one rank", anchor="middle", fill=SOFT,
        transform=f"rotate(-90 22 {middle:g})",
    )  # fmt: skip


def _power(power: int) -> str:
    return f"{10.0**power:g}"


def _roofs(document: dict[str, Any], axes: _Axes) -> Iterator[str]:
    roofs = document["roofs"]
    peak = roofs["flops_per_us"]
    for key, name, dash, shift in (
        ("sustained_bytes_per_us", "sustained", "", 16),
        ("peak_bytes_per_us", "data sheet", "5 4", -8),
    ):
        rate = roofs[key]
        start = max(10.0**axes.left, 10.0**axes.low / rate)
        yield line(
            axes.x(start), axes.y(start * rate), axes.x(peak / rate), axes.y(peak),
            stroke=FLOOR, stroke_width=1.6, stroke_dasharray=dash or "none",
        )  # fmt: skip
        if key.startswith("sustained"):
            yield line(axes.x(peak / rate), axes.y(peak), RIGHT, axes.y(peak), stroke="#4e79a7",
                       stroke_width=1.6)  # fmt: skip
        at = 10 ** (log10(start) + 0.62 * (log10(peak / rate) - log10(start)))
        x, y = axes.x(at), axes.y(at * rate)
        slope = axes.y(at * rate * 10) - axes.y(at * rate)
        angle = _angle(slope, axes.x(at * 10) - axes.x(at))
        yield text(
            x, y + shift, f"HBM {rate / TERA:.2f} TB/s, {name}", anchor="middle", fill=FLOOR,
            font_size=11, transform=f"rotate({angle:.1f} {x:.1f} {y:.1f})",
        )  # fmt: skip
    yield text(
        RIGHT - 4, axes.y(peak) - 8, f"matrix units {peak / TERA:,.0f} Tflop/s of bf16",
        anchor="end", fill="#4e79a7", font_size=11,
    )  # fmt: skip


def _angle(rise: float, run: float) -> float:
    return degrees(atan2(rise, run))


LISTED = 13  # the phases that take longest
STEP = "step"  # id of the whole step's point


def _points(document: dict[str, Any], axes: _Axes) -> Iterator[str]:
    """Circles whose area follows the time a phase takes per step, and a diamond for the step."""
    points = sorted(document["points"], key=lambda one: (-one["step_us"], one["id"]))
    total = sum(one["step_us"] for one in points) or 1.0
    named: list[tuple[float, float]] = []
    for one in points:
        x, y = axes.x(one["flops_per_byte"]), axes.y(one["flops_per_us"])
        radius = 4.0 + 20.0 * (one["step_us"] / total) ** 0.5
        tip = f"<title>{one['id']}: {one['us']} us predicted per run</title>"
        yield tag(
            "circle", tip, id=one["id"], cx=x, cy=y, r=radius, fill=work_colour(one["kind"]),
            fill_opacity=0.7, stroke="#ffffff",
        )  # fmt: skip
        if all(abs(x - a) > 40 or abs(y - b) > 13 for a, b in named):
            named.append((x, y))
            yield text(x - radius - 4, y + 4, one["id"], anchor="end", fill="#22272e", font_size=11)
    whole = document["whole"]
    x, y = axes.x(whole["flops_per_byte"]), axes.y(whole["flops_per_us"])
    yield tag(
        "path", id=STEP, d=f"M{x:.1f} {y - 9:.1f}l7 9l-7 9l-7 -9z", fill="#d1495b",
        stroke="#ffffff",
    )  # fmt: skip
    yield from _list(points, whole)


def _list(points: list[dict[str, Any]], whole: dict[str, Any]) -> Iterator[str]:
    """The phases in words, right of the axes."""
    x, y = 960.0, 90.0
    columns = ((x + 118, "us in all"), (x + 212, "flops/byte"), (x + 292, "TB/s"))
    for at, words in columns:
        yield text(at, y, words, anchor="end", fill=SOFT, font_size=11)
    rows = [(STEP, "all phases", "#d1495b", whole)]
    rows += [(one["id"], one["kind"], work_colour(one["kind"]), one) for one in points[:LISTED]]
    for id, kind, colour, one in rows:
        y += 16
        yield tag("rect", x=x - 84, y=y - 9, width=9, height=9, rx=2, fill=colour)
        words = kind if id == STEP else f"{id} {kind}"
        yield text(x - 70, y, words, fill="#22272e", font_size=11)
        values = (
            f"{one['step_us']:,.1f}", f"{one['flops_per_byte']:.2f}",
            f"{one['bytes_per_us'] / TERA:.2f}",
        )  # fmt: skip
        for (at, _), value in zip(columns, values, strict=True):
            yield text(at, y, value, anchor="end", fill="#22272e", font_size=11)
    if len(points) > LISTED:
        yield text(x - 70, y + 16, f"and {len(points) - LISTED} more", fill=SOFT, font_size=11)
