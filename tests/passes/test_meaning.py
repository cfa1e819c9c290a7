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

import mkc
from mkc.ir.token_masks import with_token_masks
from mkc.passes.pipeline import Lowered
from mkc.schedule.program import ArgmaxPhase
from mkc.schedule.program import Buffer
from mkc.schedule.program import mask_lanes
from tests.goldens import golden_case
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_masks_of_tokens(ranks: int) -> None:
    """Applied where the logits lie, between the LM head and the argmax, by every rank."""
    graph = with_token_masks(golden_case("qwen38_lane").graph(batch=2))
    one = lower(graph, ranks)
    assert_same_meaning(one)
    argmax = next(phase for phase in one.program.phases() if isinstance(phase, ArgmaxPhase))
    (operand,) = (one for one in one.program.operands if one.name == argmax.masks)
    assert operand.shape == (8, mask_lanes(argmax.columns))


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


def two_streams(step: mkc.Step) -> mkc.Outputs:
    """Two values go round the loop and change places in every layer, and both are read again."""
    first = mkc.embed(step.tokens, mkc.param("embed.weight", [1024, 256]))
    a, b = first, mkc.silu(first)
    for layer in mkc.layers(4):
        up = mkc.linear(a, layer.param("up.weight", [mkc.axis(512), 256]))
        down = mkc.linear(mkc.silu(up), layer.param("down.weight", [256, mkc.axis(512)]))
        a, b = b + down, a
    return mkc.next_token(a + b + first, mkc.param("head.weight", [1024, 256]))


@pytest.mark.parametrize("ranks", [1, 8])
def test_values_that_change_places_in_a_loop(ranks: int) -> None:
    assert_same_meaning(lower(mkc.trace(two_streams, name="two", batch=1, context=64), ranks))


def projections(step: mkc.Step) -> mkc.Outputs:
    """A projection is carried, and its fused neighbour is not."""
    h = mkc.embed(step.tokens, mkc.param("embed.weight", [1024, 256]))
    for layer in mkc.layers(3):
        x = mkc.linear(h, layer.param("x.weight", [256, 256]))
        y = mkc.linear(h, layer.param("y.weight", [256, 256]))
        h = mkc.linear(mkc.silu(x) * y, layer.param("z.weight", [256, 256]))
        h = mkc.linear(h, layer.param("w.weight", [256, 256]))
    return mkc.next_token(h, mkc.param("head.weight", [1024, 256]))


def test_a_projection_is_never_written_over_its_own_input() -> None:
    """The next tile of columns still reads the input when the first ones are stored."""
    assert_same_meaning(lower(mkc.trace(projections, name="one", batch=1, context=64), 1))


def test_models_need_no_copies() -> None:
    """A residual stream goes round its loop in one buffer."""
    for name, ranks in CASES:
        nodes = lowered(name, ranks).steps.sharded.graph.body.nodes()
        assert not any(node.results[0].name.endswith((".next", ".initial")) for node in nodes)


def overlapping(one: Lowered, kept: Buffer, moved: Buffer) -> Lowered:
    """The same program, but `moved` is placed into the memory of `kept`."""
    wide = max(kept.region_lanes, moved.region_lanes)
    buffers = tuple(
        replace(
            buffer,
            region=kept.region if buffer is moved else buffer.region,
            region_lanes=max(wide, buffer.region_lanes),
        )
        for buffer in one.program.buffers
    )
    return replace(one, program=replace(one.program, buffers=buffers))


@pytest.mark.parametrize(
    ("kept", "moved"),
    [
        ("v_rotary_table", "v_attention"),  # from before the loop into every iteration
        ("v_embed_tokens", "v_o_proj"),  # the residual stream while the layer computes
        ("v_add", "v_gate_proj_up_proj"),
        ("v_rotary", "v_rotary_2"),  # two results of one phase
        ("v_input_layernorm", "v_q_proj_k_proj_v_proj"),  # input and output of one matmul
    ],
)
def test_buffers_that_are_alive_together_are_noticed(kept: str, moved: str) -> None:
    """The check itself: these buffers cannot share a region."""
    one = lowered("dense", 2)
    buffers = {buffer.name: buffer for buffer in one.program.buffers}
    with pytest.raises(AssertionError):
        assert_same_meaning(overlapping(one, buffers[kept], buffers[moved]))


def test_a_read_outside_its_buffer_is_noticed() -> None:
    one = lowered("dense", 2)
    narrow = tuple(replace(buffer, shape=(8, 128)) for buffer in one.program.buffers)
    with pytest.raises(MachineError, match="is outside of"):
        assert_same_meaning(replace(one, program=replace(one.program, buffers=narrow)))
