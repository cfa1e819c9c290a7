"""The timeline and the VMEM map as PNG for documents, drawn by matplotlib from the JSON twins."""

from __future__ import annotations

import io
from typing import Any

from mkc.errors import MissingPackageError
from mkc.viz.colours import CRITICAL
from mkc.viz.colours import FLOOR
from mkc.viz.colours import PADDING
from mkc.viz.colours import PEAK
from mkc.viz.vmem import FILL
from mkc.viz.vmem import RING
from mkc.viz.vmem import STROKE
from mkc.viz.vmem import array_height
from mkc.viz.vmem import size_text

NS = 1000.0
DOTS_PER_INCH = 110
SOFT = "#66707c"
TRACK_HEIGHT = 0.8


def _matplotlib() -> tuple[Any, Any]:
    """The figure class and the polygons. Raises `MissingPackageError`."""
    try:
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            feature="mkc viz --format png", package="matplotlib", extra="png"
        ) from error
    return Figure, PolyCollection


def timeline_png(document: dict[str, Any]) -> bytes:
    """The whole step of the first rank.

    What is narrower than a dot is drawn one dot wide; where events share a dot, the longest is
    seen.
    """
    figure_class, polygons = _matplotlib()
    tracks = [one for one in document["tracks"] if one["rank"] == document["tracks"][0]["rank"]]
    figure = figure_class(
        figsize=(12, 1.9 + 0.27 * len(tracks)), layout="constrained", dpi=DOTS_PER_INCH
    )
    axes = figure.subplots()
    _timeline_frame(figure, axes, document, tracks)
    dot = _dot_width(figure, axes)
    boxes: list[tuple[int, list[tuple[float, float]], str]] = []  # ns, shape, colour
    critical: list[list[tuple[float, float]]] = []
    events = document["events"]
    for row, track in enumerate(tracks):
        bottom = len(tracks) - row - TRACK_HEIGHT
        for at in range(track["first"], track["last"]):
            left = events["start_ns"][at] / NS
            duration = events["duration_ns"][at]
            right = left + max(duration / NS, dot)
            colour = document["classes"][events["class"][at]]["colour"]
            boxes.append((duration, _box(left, right, bottom, bottom + TRACK_HEIGHT), colour))
            if events["critical"][at]:
                critical.append(_box(left, right, bottom, bottom + TRACK_HEIGHT / 8))
    boxes.sort(key=lambda one: one[0])
    shapes, colours = [one[1] for one in boxes], [one[2] for one in boxes]
    axes.add_collection(polygons(shapes, facecolors=colours, linewidths=0))
    axes.add_collection(polygons(critical, facecolors=CRITICAL, linewidths=0))
    return _png(figure)


def _timeline_frame(
    figure: Any, axes: Any, document: dict[str, Any], tracks: list[dict[str, Any]]
) -> None:
    """Everything but the events."""
    axes.set_yticks(
        [len(tracks) - row - TRACK_HEIGHT / 2 for row in range(len(tracks))],
        [one["name"] for one in tracks],
    )
    axes.set_xlim(0, document["round_us"] * 1.01)
    axes.set_ylim(-0.3, len(tracks) + 0.2)
    axes.axvline(document["floor_us"], color=FLOOR, linestyle="--", linewidth=1)
    axes.set_xlabel("predicted time in us")
    _title(
        axes,
        f"{document['model']}: timeline of one {document['unit']} (predicted, not measured)",
        f"{document['target']}, {document['ranks']} ranks, batch {document['batch']}: "
        f"{document['unit']} {document['round_us']:,.1f} us, "
        f"floor {document['floor_us']:,.1f} us (dashed)",
    )
    handles = [
        axes.plot([], [], "s", color=one["colour"], label=one["name"])[0]
        for one in document["classes"]
    ]
    handles.append(axes.plot([], [], "-", color=CRITICAL, label="critical path")[0])
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)


def _dot_width(figure: Any, axes: Any) -> float:
    """Width of a dot of the finished picture, in the unit of the horizontal axis."""
    figure.draw_without_rendering()  # the layout says how wide the axes are
    first, last = axes.get_xlim()
    return float((last - first) / axes.get_window_extent().width)


def vmem_png(document: dict[str, Any]) -> bytes:
    """The map: heights are readable, not to scale, as in the page."""
    figure_class, polygons = _matplotlib()
    arrays, steps = document["arrays"], document["steps"]
    heights = [array_height(one) for one in arrays]
    figure = figure_class(figsize=(12, 1.6 + sum(heights) / 95), layout="constrained")
    axes = figure.subplots()
    top = 0.0
    ticks = []
    for array, height in zip(arrays, heights, strict=True):
        ticks.append((top + height / 2, f"{array['id']}  {size_text(array['bytes'])}"))
        for box in document["boxes"]:
            if box["array"] == array["id"]:
                _vmem_box(axes, polygons, array, box, top, height)
        top += height + 4.0
    peak = document["peak"]
    axes.axvline(peak["position"] + 0.5, color=PEAK, linestyle="--", linewidth=1)
    axes.set_xlim(0, len(steps))
    axes.set_ylim(top, -4.0)
    axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=7)
    axes.set_xticks(
        [at + 0.5 for at in range(len(steps))],
        [one["id"] for one in steps],
        rotation=90,
        fontsize=7,
    )
    axes.set_xlabel("program order")
    _title(
        axes,
        f"{document['model']}: VMEM by program order",
        f"{document['target']}, batch {document['batch']}: "
        f"{size_text(document['planned_bytes'])} of {size_text(document['limit_bytes'])} planned; "
        f"peak in {peak['phase']}, {size_text(peak['live_bytes'])} live (dashed); heights are not "
        f"to scale",
    )
    shown = [*FILL.items(), ("padding", PADDING)]
    handles = [axes.plot([], [], "s", color=colour, label=name)[0] for name, colour in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return _png(figure)


def _vmem_box(
    axes: Any, polygons: Any, array: dict[str, Any], box: dict[str, Any], top: float, height: float
) -> None:
    per_byte = height / array["bytes"]
    start = top + (box["offset"] - array["offset"]) * per_byte
    middle = start + box["used"] * per_byte
    end = start + box["bytes"] * per_byte
    left, right = box["first"], box["last"] + 1
    shapes = [_box(left, right, start, middle), _box(left, right, middle, end)]
    axes.add_collection(polygons(shapes, facecolors=[FILL[array["kind"]], PADDING], linewidths=0))
    outline = [_box(left, right, start, end)]
    axes.add_collection(
        polygons(outline, facecolors="none", edgecolors=STROKE[array["kind"]], linewidths=0.4)
    )
    if array["kind"] != RING and end - start > 9 and right - left > 2:
        axes.text(left + 0.1, (start + end) / 2, box["id"], fontsize=6, va="center", clip_on=True)


def _box(left: float, right: float, bottom: float, top: float) -> list[tuple[float, float]]:
    return [(left, bottom), (right, bottom), (right, top), (left, top)]


def _title(axes: Any, title: str, facts: str) -> None:
    axes.figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    axes.set_title(facts, loc="left", fontsize=9, color=SOFT)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    # Without the version of the library in it, the same plan gives the same bytes.
    figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH, metadata={"Software": None})
    return buffer.getvalue()
