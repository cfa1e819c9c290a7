"""The graph page: loops, bytes, predicted times, and who reads from whom."""

from __future__ import annotations

from functools import cache
from re import findall
from typing import Any

import pytest

from mkc.viz.graph import graph_document
from mkc.viz.graph import graph_html
from tests.viz.subjects import subject


@cache
def document() -> dict[str, Any]:
    return graph_document(subject())


def phase(id: str) -> dict[str, Any]:
    return next(one for one in document()["phases"] if one["id"] == id)


def test_loops_hold_their_phases() -> None:
    loops = [one for one in document()["body"] if isinstance(one, dict)]
    assert [(one["loop"], one["count"], one["executions"]) for one in loops] == [("layers", 16, 16)]
    (inner,) = [one for one in loops[0]["body"] if isinstance(one, dict)]
    assert (inner["loop"], inner["count"], inner["executions"]) == ("layers_2", 3, 48)
    assert "p03" in inner["body"] and "p17" in loops[0]["body"]


def test_bytes_and_times_are_per_run_and_per_step() -> None:
    matmul = phase("p11")
    assert matmul["executions"] == 48
    assert matmul["step_bytes"] == 48 * matmul["bytes"] == 48 * 5120 * 17 * 512
    assert matmul["step_us"] == pytest.approx(48 * matmul["us"], rel=1e-3)
    assert 0 < matmul["step_us"] < document()["round_us"]


def test_edges_lead_from_the_last_writer_also_round_a_loop() -> None:
    edges = {(one["from"], one["to"]): one for one in document()["edges"]}
    assert edges["p02", "p03"]["buffer"] == "v_input_layernorm"
    assert not edges["p02", "p03"]["next_iteration"]
    # The residual stream: from the embedding at first, then from the end of the layer before.
    assert not edges["p01", "p02"]["next_iteration"]
    assert edges["p15", "p02"]["next_iteration"]
    assert edges["p28", "p02"]["next_iteration"]
    assert not edges["p15", "p16"]["next_iteration"]


def test_no_edge_comes_from_a_phase_that_does_not_write_it() -> None:
    for edge in document()["edges"]:
        assert edge["buffer"] in phase(edge["from"])["writes"]
        assert edge["buffer"] in phase(edge["to"])["reads"]


def test_ops_of_a_vector_phase_are_listed() -> None:
    assert phase("p12")["ops"][0].startswith("%silu_2 = unary(gate_proj)")


def test_the_page_folds_without_a_script_and_links_the_kernel() -> None:
    html = graph_html(document())
    assert html.count("<details open") == 2
    assert f'<a href="../kernel.py#L{phase("p11")["kernel_line"]}">' in html
    assert set(findall(r'<div class="row[^"]*" id="([^"]+)"', html)) == {
        one["id"] for one in document()["phases"]
    }
    assert findall(r"https?://(?!www\.w3\.org/)", html) == []
    assert "predicted, not measured" in html
