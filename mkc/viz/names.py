"""Names of the files that `mkc viz` writes."""

from __future__ import annotations

from enum import StrEnum


class Format(StrEnum):
    """What `mkc viz` writes."""

    HTML = "html"  # pages to explore, the roofline, the trace, and a JSON twin of each picture
    PNG = "png"  # the timeline and the VMEM map, for documents


TRACE = "trace.pftrace"
DRAWN = {
    "timeline": "timeline.html",
    "vmem": "vmem.html",
    "graph": "graph.html",
    "roofline": "roofline.svg",
}
IMAGES = ("timeline.png", "vmem.png")
FILES = frozenset([*DRAWN.values(), *(f"{name}.json" for name in DRAWN), TRACE, *IMAGES])
