"""States go to the kernel's layout and come back; each rank holds its heads."""

from __future__ import annotations

import numpy as np
import pytest

from mkc.ir.graph import StateKind
from mkc.passes.pipeline import Lowered
from mkc.runtime.state import StateLayout
from tests.passes.lowering import lower
from tests.passes.lowering import lowered
from tests.passes.stacks import Stack

NAMES = ("qwen38_mini", "qwen38_lane", "dense")


def layout_of(one: Lowered) -> StateLayout:
    return StateLayout(
        program=one.program, sharded=one.steps.sharded, streams=one.residency.streams
    )


def states_of(one: Lowered) -> dict[str, np.ndarray]:
    """A state [instances, batch, ...] per key, of small integers: exact in bf16."""
    rng = np.random.default_rng(1)
    return {
        key: rng.integers(
            -128, 128, (state.instances, one.program.batch, *state.type.shape)
        ).astype(np.float32)
        for key, state in one.steps.sharded.full.states.items()
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 3), (8, 8)])
def test_round_trip(name: str, ranks: int, batch: int) -> None:
    """All ranks' operands together give the state back; their shapes are the planned ones."""
    one = lowered(name, ranks, batch)
    layout = layout_of(one)
    shapes = {operand.name: operand.shape for operand in one.program.operands}
    states = states_of(one)
    for key, state in states.items():
        parts = [layout.to_kernel(key, state, rank) for rank in range(ranks)]
        assert {part.shape for part in parts} == {shapes[layout.operand_of(key)]}
        back = np.asarray(layout.from_kernel(key, parts), np.float32)
        np.testing.assert_array_equal(back, state)
    updated = {operand.name for operand in one.program.operands if operand.updated}
    assert {layout.operand_of(key) for key in states} == updated


def test_layouts() -> None:
    """Convolution: taps first. Recurrent: an item per layer and sequence. Cache: heads as lanes."""
    one = lower(Stack(pattern="dda", heads=8, kv_heads=2, batch=3).graph(), 2)
    layout = layout_of(one)
    for key, state in states_of(one).items():
        part = np.asarray(layout.to_kernel(key, state, 1), np.float32)
        match one.steps.sharded.full.states[key].kind:
            case StateKind.CONV:
                # rank 1 has the second half of the q, k and v channels
                assert part.shape == (2, 3, 8, 3 * 512)
                wanted = state[1, 2, 0].reshape(3, 1024)[:, 512:].ravel()
                np.testing.assert_array_equal(part[1, 0, 2], wanted)
                assert not part[:, :, 3:].any(), "rows without a sequence"
            case StateKind.RECURRENT:
                assert part.shape == (2 * 3, 4 * 128, 128)
                np.testing.assert_array_equal(part[4, 128:256], state[1, 1, 5])
            case StateKind.KV_CACHE:
                assert part.shape == (1, 3, 64, 128)
                np.testing.assert_array_equal(part[0, 2, 7], state[0, 2, 7, 1])


def test_copies_hold_the_same_cache() -> None:
    """Two key heads on eight ranks: ranks 0 to 3 hold head 0."""
    one = lower(Stack(pattern="a", heads=8, kv_heads=2).graph(), 8)
    layout = layout_of(one)
    key, state = next(iter(states_of(one).items()))
    parts = [np.asarray(layout.to_kernel(key, state, rank), np.float32) for rank in range(8)]
    for rank, part in enumerate(parts):
        np.testing.assert_array_equal(part[0, 0], state[0, 0, :, rank // 4])


def test_a_state_that_does_not_exist() -> None:
    with pytest.raises(KeyError, match="nothing"):
        layout_of(lowered("dense", 1)).operand_of("nothing")
