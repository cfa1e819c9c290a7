"""The TPU compiler accepts what mixtures of experts need at the sizes of a rank; code stays small.

Other generations have no product with 4-bit floats, so that only one is asked.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.codegen_pallas.support_aot import mixture_cases
from tests.codegen_pallas.test_support_aot import compile_all

TOPOLOGY = "tpu7x:2x2x1"
# About 1.5 times what the compiler needed, as in `test_support_aot`.
BUNDLES = {
    "channel_delta": 900,
    "channel_delta_head_loop": 550,
    "kept_channel_delta": 1650,
    "latent_attention_row": 1800,
    "latent_attention_rows": 1700,
    "latent_attention_many_heads": 2450,
    "blocks": 1700,
    "mixture_parts": 2100,
    "route_1": 2200,
    "route_8": 2450,
    "experts_8x4_1": 3400,
    "experts_8x4_8": 4800,
    "experts_2x16_1": 1500,
    "experts_1x32_8": 1400,
    "experts_bf16": 1350,
    "markov_walk": 8300,  # seven rows, one after the other
}


@functools.cache
def compiled() -> dict[str, dict[str, Any]]:
    return compile_all(TOPOLOGY, "mixtures")


def test_every_case_has_a_limit() -> None:
    assert {case.name for case in mixture_cases(8)} == set(BUNDLES)


@pytest.mark.parametrize("name", BUNDLES)
def test_compiles_at_full_size(name: str) -> None:
    result = compiled()[name]
    assert result["error"] is None
    assert 0 < result["bundles"] <= BUNDLES[name]
