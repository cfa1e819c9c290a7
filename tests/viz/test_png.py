"""PNGs for documents: drawn from the JSON twins, the same bytes every time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.typing import NDArray

from mkc.errors import MissingPackageError
from mkc.viz.png import timeline_png
from mkc.viz.png import vmem_png
from mkc.viz.timeline import timeline_document
from mkc.viz.vmem import vmem_document
from mkc.viz.write import DOCUMENTS
from mkc.viz.write import PNG
from tests.viz.subjects import subject


@pytest.mark.parametrize("name", PNG)
def test_an_image_shows_the_colours_of_what_it_draws(name: str) -> None:
    document = DOCUMENTS[name](subject("dense", ranks=1))
    image = imread(BytesIO(PNG[name](document)), format="png")
    height, width, _ = image.shape
    assert width == 1320 and height > 200
    dots = (np.round(image[:, :, :3] * 255)).astype(int)
    colour = "#4e79a7" if name == "timeline" else "#76b7a5"  # matmuls, ring slots
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    assert (np.abs(dots - wanted).max(axis=2) <= 1).sum() > 200


def one_track(document: dict[str, Any], name: str) -> dict[str, Any]:
    """The timeline with one of its tracks."""
    return {**document, "tracks": [one for one in document["tracks"] if one["name"] == name]}


def dots_inside(png: bytes) -> NDArray[np.int64]:
    """Colours `[height, width, 3]` above the time axis, from its start to its end."""
    dots = np.round(imread(BytesIO(png), format="png")[:, :, :3] * 255).astype(int)
    dark = dots.max(axis=2) < 100
    axis = int(dark.sum(axis=1).argmax())  # the only line across the whole image
    columns = np.flatnonzero(dark[axis])
    return dots[:axis, columns[0] : columns[-1] + 1]


@pytest.mark.parametrize("name", ["matrix", "vector", "issue", "stalled", "hbm", "link:chip to 2"])
def test_events_narrower_than_a_dot_are_seen_where_they_are(name: str) -> None:
    """The 27B model's 64 layers: each of these tracks has events in every tenth of the step."""
    document = one_track(timeline_document(subject()), name)
    inside = dots_inside(timeline_png(document))
    (track,), events = document["tracks"], document["events"]
    whole = slice(track["first"], track["last"])
    dot_ns = document["round_us"] * 1000 / inside.shape[1]
    assert np.median(events["duration_ns"][whole]) < dot_ns, "most are narrower than a dot"
    colours = {document["classes"][one]["colour"] for one in events["class"][whole]}
    wanted = [[int(one[at : at + 2], 16) for at in (1, 3, 5)] for one in sorted(colours)]
    marked = np.any([(np.abs(inside - one).max(axis=2) <= 1).any(axis=0) for one in wanted], axis=0)
    starts = np.array(events["start_ns"][whole]) / dot_ns / 1.01  # the axis is a hundredth longer
    expected = len(set(np.floor(starts).astype(int)))
    assert 0.9 * expected < marked.sum()
    tenths = np.array_split(marked[: round(len(marked) / 1.01)], 10)
    assert all(tenth.any() for tenth in tenths)


@pytest.mark.parametrize("name", PNG)
def test_an_image_is_the_same_every_time(name: str) -> None:
    document = DOCUMENTS[name](subject("dense", ranks=1))
    assert PNG[name](document) == PNG[name](document)


@pytest.mark.parametrize(
    ("draw", "document_of"), [(timeline_png, timeline_document), (vmem_png, vmem_document)]
)
def test_without_matplotlib_the_extra_is_named(
    draw: Callable[[Any], bytes],
    document_of: Callable[[Any], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'mkc-tpu\[png\]'"):
        draw(document_of(subject("dense", ranks=1)))
