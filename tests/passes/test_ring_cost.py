"""The closed form of what a ring costs: bounds, and what makes it slower."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mkc.passes.ring_cost import IDLE_SLOTS
from mkc.passes.ring_cost import RingUse
from mkc.passes.ring_cost import exchanges_of
from mkc.passes.ring_cost import ring_us
from mkc.targets import load_target
from tests.passes.lowering import golden_graph
from tests.passes.lowering import lower

MEBIBYTE = 1 << 20
USE = RingUse(bytes=6000 * MEBIBYTE, exchanges=128)
SIZES = st.sampled_from([MEBIBYTE // 4, MEBIBYTE, 4 * MEBIBYTE])


@pytest.mark.parametrize("name", ["tpu7x", "v6e", "v5p", "v5e"])
@given(slots=st.integers(1, 40), size=SIZES)
def test_deeper_rings_are_never_slower_nor_faster_than_the_memory(
    name: str, slots: int, size: int
) -> None:
    target = load_target(name)
    one = ring_us(USE, slots=slots, load_bytes=size, target=target)
    deeper = ring_us(USE, slots=slots + 1, load_bytes=size, target=target)
    assert USE.bytes / target.hbm.sustained_bytes_per_us <= deeper <= one


def test_a_full_ring_hides_an_exchange() -> None:
    """Its bytes arrive while the core waits; a ring that just saturates the memory runs dry."""
    target = load_target("tpu7x")
    gap_us = target.exchange.latency_us + target.exchange.drain_us
    saturated = target.dma.saturation_bytes_in_flight // MEBIBYTE + IDLE_SLOTS
    floor = USE.bytes / target.hbm.sustained_bytes_per_us
    dry = ring_us(USE, slots=saturated, load_bytes=MEBIBYTE, target=target) - floor
    assert 0 < dry < USE.exchanges * gap_us
    assert ring_us(USE, slots=4 * saturated, load_bytes=MEBIBYTE, target=target) == floor


def test_tiny_loads_keep_the_core_busy() -> None:
    target = load_target("tpu7x")
    loads = 1_000_000
    use = RingUse(bytes=loads * 4096, exchanges=0)
    expected = loads * (target.dma.issue_us + target.dma.wait_us)
    assert ring_us(use, slots=10_000, load_bytes=4096, target=target) == pytest.approx(expected)


def test_exchanges_are_counted_with_their_loops() -> None:
    """Two per layer; the golden model has four layers and no other sums."""
    lowered = lower(golden_graph("qwen38_lane"), 2)
    assert exchanges_of(lowered.steps.body) == 8


def test_alternatives_of_the_ring_have_predicted_costs() -> None:
    decisions = {one.id: one for one in lower(golden_graph("qwen38_lane"), 2).log.decisions}
    for name in ("tile.ring", "tile.load_bytes"):
        texts = [decisions[name].chosen, *decisions[name].rejected.values()]
        assert len(texts) > 1
        assert all("predicted" in one for one in texts), name
