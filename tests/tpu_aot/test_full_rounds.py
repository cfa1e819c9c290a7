"""Full-size kernels of speculative rounds, compiled by the real TPU compiler: minutes each."""

from __future__ import annotations

from functools import cache

import pytest

from mkc.cli.speculation import scheme_round
from mkc.driver import CompileRequest
from mkc.driver import CompileResult
from mkc.driver import compile_graph

MIB = 1 << 20
LARGEST_VMEM = 60 * MIB  # explicit
DRAFTER_BYTES = 800_000_000  # of a rank and round


@cache
def compiled(batch: int) -> CompileResult:
    scheme = scheme_round("qwen38", "dflash2", None, batch=batch, context=4096, config_path=None)
    return compile_graph(
        CompileRequest(graph=scheme.graph, target="tpu7x:2x2x1", logits=True, rounds_per_launch=16)
    )


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 2, 4])
def test_one_launch_and_nothing_else_within_memory(batch: int) -> None:
    report = compiled(batch).report
    assert report["aot"]["ok"]
    assert report["aot"]["custom_calls"] == 1
    assert report["aot"]["other_ops"] == []
    assert report["vmem"]["peak_bytes"] <= LARGEST_VMEM
    assert 0 < report["bytes"]["draft"] <= DRAFTER_BYTES
