"""Which layout of experts a step is fastest with, and what a layout may be."""

from __future__ import annotations

import pytest

from mkc.ir.routing import Routing
from mkc.passes.expert_layout import ExpertLayout
from mkc.passes.expert_layout import ExpertShape
from mkc.passes.expert_layout import expert_slice
from mkc.passes.expert_layout import layout_cost
from mkc.passes.expert_layout import possible_layouts
from mkc.targets import load_target

LARGE = ExpertShape(experts=896, chosen=16, width=3072, inner=3584, is_mxfp4=True)
TARGET = load_target("tpu7x:2x2x4")


def groups_of(shape: ExpertShape, ranks: int) -> list[int]:
    return [one.groups for one in possible_layouts(shape, ranks)]


def test_slices_are_whole_tiles() -> None:
    """32 columns share a scale in MXFP4, 16 rows a tile in bf16; whole experts always fit."""
    assert groups_of(LARGE, 32) == [1, 2, 4, 8, 16, 32]
    small = ExpertShape(experts=32, chosen=4, width=64, inner=128, is_mxfp4=True)
    assert groups_of(small, 8) == [4, 8]
    plain = ExpertShape(experts=32, chosen=4, width=64, inner=128, is_mxfp4=False)
    assert groups_of(plain, 8) == [2, 4, 8]
    odd = ExpertShape(experts=7, chosen=2, width=100, inner=128, is_mxfp4=False)
    assert groups_of(odd, 7) == [7]
    assert groups_of(odd, 4) == []


def test_a_slice_is_padded_to_tiles() -> None:
    """96 columns: gate beside up are 192 of 256 lanes, down has 96 of 128 rows."""
    narrow = expert_slice(LARGE, ExpertLayout(groups=1, slices=32))
    assert narrow.width == 96
    assert narrow.gate_up == (3584 // 2 + 3584 // 32 + 16, 256)
    assert narrow.down == (96, 3584)
    wide = expert_slice(LARGE, ExpertLayout(groups=8, slices=4))
    assert wide.gate_up == (3584 // 2 + 3584 // 32 + 16, 2 * 768)
    assert wide.down == (768 // 2 + 768 // 32 + 8, 3584)


def test_bytes_are_those_of_the_published_table() -> None:
    """MB of a layer on the slowest of 32 devices, where a slice fills its tiles."""
    for rows, expected in ((1, {8: 18.2, 16: 26.9, 32: 40.9}), (8, {8: 89, 16: 107, 32: 138})):
        for groups, megabytes in expected.items():
            layout = ExpertLayout(groups=groups, slices=32 // groups)
            found = layout_cost(LARGE, layout, rows, Routing.UNIFORM, TARGET)
            assert found.bytes / 1e6 == pytest.approx(megabytes, rel=0.03)


def test_padding_and_imbalance_pull_in_opposite_directions() -> None:
    """Whole experts wait for the fullest group, the narrowest slices read padding: between lies
    the best. Rows that are alike read no more than one."""
    for rows in (1, 8):
        costs = {
            one.groups: layout_cost(LARGE, one, rows, Routing.UNIFORM, TARGET).us
            for one in possible_layouts(LARGE, 32)
        }
        assert min(costs, key=lambda one: costs[one]) == 2
        assert costs[32] > 1.5 * costs[2]
        assert costs[1] > costs[2]
    layout = ExpertLayout(groups=2, slices=16)
    one = layout_cost(LARGE, layout, 1, Routing.UNIFORM, TARGET)
    assert layout_cost(LARGE, layout, 8, Routing.ALIKE, TARGET) == one


def test_balance_is_the_mean_over_the_fullest() -> None:
    """One group has everything; the more groups, the more of them wait for the fullest."""
    found = [
        layout_cost(LARGE, one, 1, Routing.UNIFORM, TARGET) for one in possible_layouts(LARGE, 32)
    ]
    assert found[0].balance == 1.0
    assert [one.balance for one in found] == sorted((one.balance for one in found), reverse=True)
    for groups, one in zip((1, 2, 4, 8, 16, 32), found, strict=True):
        assert one.experts * one.balance == pytest.approx(16 / groups)
