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
from tests.runtime.rounds_backends import LANE
from tests.runtime.rounds_backends import MINI
from tests.runtime.rounds_backends import lowered_round

NAMES = ("qwen38_mini", "qwen38_lane", "dense")


def states_of(one: Lowered) -> dict[str, np.ndarray]:
    """A state [instances, batch, ...] per key, of small integers: exact in bf16."""
    rng = np.random.default_rng(1)
    return {
        key: rng.integers(
            -128, 128, (state.instances, one.program.batch, *state.type.shape)
        ).astype(np.float32)
        for key, state in one.steps.sharded.full.states.items()
        if state.kind is not StateKind.TAP
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 3), (8, 8)])
def test_round_trip(name: str, ranks: int, batch: int) -> None:
    """All ranks' operands together give the state back; their shapes are the planned ones."""
    check_round_trip(lowered(name, ranks, batch), ranks)


@pytest.mark.parametrize("name", [MINI, LANE])
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (2, 2)])
def test_round_trip_of_rounds(name: str, ranks: int, batch: int) -> None:
    """Kept rows too, whose lanes may be padded."""
    check_round_trip(lowered_round(name, ranks=ranks, batch=batch), ranks)


def check_round_trip(one: Lowered, ranks: int) -> None:
    layout = StateLayout.of(one)
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
    layout = StateLayout.of(one)
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


def test_layouts_of_kept_rows() -> None:
    """Inputs of a convolution: all sequences of a layer. The delta rule: a layer and sequence."""
    one = lowered_round(LANE, ranks=2, batch=2)
    layout = StateLayout.of(one)
    parts = {
        key.rpartition(".")[2]: (state, np.asarray(layout.to_kernel(key, state, 1), np.float32))
        for key, state in states_of(one).items()
        if one.steps.sharded.full.states[key].kind is StateKind.KEPT
    }
    state, part = parts["kept_k"]  # [layers, sequences, rows, key heads, key dim]
    assert part.shape == (3 * 2, 8, 128)
    np.testing.assert_array_equal(part[2 * 2 + 1, 5], state[2, 1, 5, 1])
    state, part = parts["kept_u"]
    np.testing.assert_array_equal(part[3, 4].reshape(3, 128), state[1, 1, 4, 3:])
    state, part = parts["kept_decay"]
    assert part.shape == (3 * 2, 8, 128)
    np.testing.assert_array_equal(part[1, 6, :3], state[0, 1, 6, 3:])
    assert not part[..., 3:].any(), "lanes without a head"
    state, part = parts["kept_inputs"]  # [layers, sequences, rows, q, k and v channels]
    assert part.shape == (3, 2 * 8, 128 + 128 + 384)
    np.testing.assert_array_equal(part[2, 8 + 3, :128], state[2, 1, 3, 128:256])


def test_copies_hold_the_same_cache() -> None:
    """Two key heads on eight ranks: ranks 0 to 3 hold head 0."""
    one = lower(Stack(pattern="a", heads=8, kv_heads=2).graph(), 8)
    layout = StateLayout.of(one)
    key, state = next(iter(states_of(one).items()))
    parts = [np.asarray(layout.to_kernel(key, state, rank), np.float32) for rank in range(8)]
    for rank, part in enumerate(parts):
        np.testing.assert_array_equal(part[0, 0], state[0, 0, :, rank // 4])


def test_a_state_that_does_not_exist() -> None:
    with pytest.raises(KeyError, match="nothing"):
        StateLayout.of(lowered("dense", 1)).operand_of("nothing")
