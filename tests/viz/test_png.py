"""PNGs for documents: drawn from the JSON twins, the same bytes every time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread

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
