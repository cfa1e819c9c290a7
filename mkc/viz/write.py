"""All pictures of a plan as files."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from mkc.viz.graph import graph_document
from mkc.viz.graph import graph_html
from mkc.viz.names import DRAWN
from mkc.viz.names import TRACE
from mkc.viz.names import Format
from mkc.viz.page import compact_json
from mkc.viz.perfetto import perfetto_trace
from mkc.viz.png import timeline_png
from mkc.viz.png import vmem_png
from mkc.viz.roofline import roofline_document
from mkc.viz.roofline import roofline_svg
from mkc.viz.source import Subject
from mkc.viz.timeline import timeline_document
from mkc.viz.timeline import timeline_html
from mkc.viz.vmem import vmem_document
from mkc.viz.vmem import vmem_html

type Document = dict[str, Any]

DOCUMENTS: dict[str, Callable[[Subject], Document]] = {
    "timeline": timeline_document,
    "vmem": vmem_document,
    "graph": graph_document,
    "roofline": roofline_document,
}
DRAW: dict[str, Callable[[Document], str]] = {
    "timeline": timeline_html,
    "vmem": vmem_html,
    "graph": graph_html,
    "roofline": roofline_svg,
}
PNG: dict[str, Callable[[Document], bytes]] = {"timeline": timeline_png, "vmem": vmem_png}


def pictures(subject: Subject, format: Format) -> Iterator[tuple[str, bytes]]:
    """(file name, contents) of every picture in a format.

    Raises:
      MissingPackageError: PNG is asked for and matplotlib is not installed.
    """
    if format is Format.PNG:
        for name, png in PNG.items():
            yield f"{name}.png", png(DOCUMENTS[name](subject))
        return
    for name, draw in DRAW.items():
        document = DOCUMENTS[name](subject)
        yield DRAWN[name], draw(document).encode()
        yield f"{name}.json", f"{compact_json(document)}\n".encode()
    yield TRACE, perfetto_trace(subject)
