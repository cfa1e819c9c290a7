"""The roofline: points are flops and bytes of the plan over predicted times."""

from __future__ import annotations

from functools import cache
from re import findall
from typing import Any
from xml.etree import ElementTree

import pytest

from mkc.viz.roofline import roofline_document
from mkc.viz.roofline import roofline_svg
from tests.viz.subjects import subject


@cache
def document() -> dict[str, Any]:
    return roofline_document(subject())


def test_a_matmul_at_batch_one_does_two_flops_for_each_weight() -> None:
    point = next(one for one in document()["points"] if one["id"] == "p11")
    assert point["flops"] == 2 * 5120 * 4352
    assert point["flops_per_byte"] == pytest.approx(1.0)
    assert point["flops_per_us"] == pytest.approx(point["flops"] / point["us"], rel=1e-3)


def test_the_whole_step_stays_below_the_sustained_rate() -> None:
    whole, roofs = document()["whole"], document()["roofs"]
    assert 0.5 * roofs["sustained_bytes_per_us"] < whole["bytes_per_us"]
    assert whole["bytes_per_us"] < roofs["sustained_bytes_per_us"]


def test_the_drawing_is_xml_with_the_ids_of_its_twin() -> None:
    svg = roofline_svg(document())
    ElementTree.fromstring(svg)
    drawn = set(findall(r'<circle id="([^"]+)"', svg))
    assert drawn == {one["id"] for one in document()["points"]}
    assert "predicted, not measured" in svg


def test_a_model_of_one_kind_of_phase_is_drawn_too() -> None:
    ElementTree.fromstring(roofline_svg(roofline_document(subject("dense", ranks=1))))
