"""The program computes what the graph says, whatever shares memory with what.

Every phase of every iteration is executed on memory that holds symbols. If two buffers of a region
were alive at the same time, some phase would read symbols of the wrong value.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

from mkc.passes.pipeline import Lowered
from mkc.schedule.program import Buffer
from tests.passes.lowering import CASES
from tests.passes.lowering import lower
from tests.passes.lowering import lowered
from tests.passes.machine import MachineError
from tests.passes.machine import run_program
from tests.passes.meaning import Symbols
from tests.passes.meaning import run_graph
from tests.passes.stacks import STACKS
from tests.passes.stacks import Stack


def assert_same_meaning(one: Lowered) -> None:
    """The program executes the operations of one rank's graph: no other one, and all of them."""
    symbols = Symbols()
    wanted = run_graph(one.steps.sharded.graph, symbols)
    known = {operation for operation, _ in wanted.operations}
    done = run_program(one, symbols)
    for operation, place in done.operations:
        assert operation in known, f"{place} computes something that the graph does not"
    executed = {operation for operation, _ in done.operations}
    for operation, place in wanted.operations:
        assert operation in executed, f"{place} is never computed"
    assert len(done.operations) == len(wanted.operations)
    assert done.outputs.keys() == wanted.outputs.keys()
    for name, lanes in wanted.outputs.items():
        assert (done.outputs[name] == lanes).all(), name


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_models(name: str, ranks: int) -> None:
    assert_same_meaning(lowered(name, ranks))


@pytest.mark.parametrize("name", ["qwen38_lane", "dense"])
def test_several_sequences(name: str) -> None:
    assert_same_meaning(lowered(name, 2, 8))


@given(STACKS, strategies.sampled_from([1, 2, 8]), strategies.data())
@settings(max_examples=60, deadline=None)
def test_random_stacks(stack: Stack, ranks: int, data: strategies.DataObject) -> None:
    """With taps, values live from the middle of a loop to the end of the graph."""
    layers = strategies.integers(0, len(stack.pattern) - 1)
    taps = data.draw(strategies.sets(layers, max_size=2))
    assert_same_meaning(lower(replace(stack, taps=tuple(sorted(taps))).graph(), ranks))


def overlapping(one: Lowered, kept: Buffer, moved: Buffer) -> Lowered:
    """The same program, but `moved` is placed into the memory of `kept`."""
    wide = max(kept.region_lanes, moved.region_lanes)
    buffers = tuple(
        replace(
            buffer,
            region=kept.region if buffer is moved else buffer.region,
            region_lanes=wide if buffer.region == kept.region or buffer is moved else buffer.region_lanes,
        )
        for buffer in one.program.buffers
    )
    return replace(one, program=replace(one.program, buffers=buffers))


def test_buffers_that_are_alive_together_are_noticed() -> None:
    """The check itself: any two buffers with overlapping lifetimes, put into one region, fail."""
    one = lowered("dense", 2)
    failed = 0
    for kept in one.program.buffers:
        for moved in one.program.buffers:
            together = kept.first <= moved.last and moved.first <= kept.last
            if kept.region == moved.region or kept.name >= moved.name or not together:
                continue
            with pytest.raises(AssertionError):
                assert_same_meaning(overlapping(one, kept, moved))
            failed += 1
    assert failed > 10


def test_a_read_outside_its_buffer_is_noticed() -> None:
    one = lowered("dense", 2)
    narrow = tuple(replace(buffer, shape=(8, 128)) for buffer in one.program.buffers)
    with pytest.raises(MachineError, match="is outside of"):
        assert_same_meaning(replace(one, program=replace(one.program, buffers=narrow)))
