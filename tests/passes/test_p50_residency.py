"""Pass 50: every array has a place, the places fit, and the report adds up."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

from mkc.codegen_pallas.source_memory import scratch
from mkc.driver import lower_graph
from mkc.errors import VmemError
from mkc.ir.types import DType
from mkc.passes.lifetimes import lifetimes
from mkc.passes.lifetimes import pack
from mkc.passes.p30_tile import ROW_BYTES
from mkc.schedule.stream_plans import PageRow
from mkc.targets import load_target
from tests.passes.lowering import CASES
from tests.passes.lowering import TARGET
from tests.passes.lowering import full_size
from tests.passes.lowering import lower
from tests.passes.lowering import lowered
from tests.passes.lowering import report
from tests.passes.stacks import STACKS
from tests.passes.stacks import Stack

MIB = 1 << 20

SPANS = strategies.tuples(
    strategies.sampled_from([DType.BF16, DType.F32]),
    strategies.sampled_from([128, 256, 512, 1024]),
    strategies.integers(0, 20),
    strategies.integers(0, 6),
)


@given(strategies.lists(SPANS, max_size=30))
def test_packing_keeps_lifetimes_apart(spans: list[tuple[DType, int, int, int]]) -> None:
    wanted = {
        f"b{index}": (dtype, lanes, first, first + length)
        for index, (dtype, lanes, first, length) in enumerate(spans)
    }
    placed, regions = pack((name, *span) for name, span in wanted.items())
    assert placed.keys() == wanted.keys()
    sizes = {region.name: (region.dtype, region.lanes) for region in regions}
    for name, (dtype, lanes, first, last) in wanted.items():
        region_dtype, region_lanes = sizes[placed[name]]
        assert region_dtype is dtype
        assert region_lanes >= lanes
        for other, (_, _, other_first, other_last) in wanted.items():
            if other != name and placed[other] == placed[name]:
                assert last < other_first or other_last < first


def test_a_region_is_shared_when_lifetimes_allow() -> None:
    wanted = [("a", DType.F32, 256, 0, 1), ("b", DType.F32, 128, 2, 3), ("c", DType.F32, 128, 3, 4)]
    placed, regions = pack(iter(wanted))
    assert placed["a"] == placed["b"] != placed["c"]
    assert len(regions) == 2


def test_lifetimes_of_a_dense_layer() -> None:
    """The residual stream lives through the loop, what a layer computes for itself does not."""
    one = lowered("dense", 2)
    found = {value: life for life in lifetimes(one.steps) for value in life.values}
    residual = found["embed_tokens"]
    assert {"embed_tokens", "embed_tokens_in", "embed_tokens_out"} & set(residual.values)
    inside = found["mul"]
    assert inside.last == inside.first + 1
    assert residual.first < inside.first < inside.last < residual.last
    table = found["rotary_table"]
    assert table.last >= inside.last, "the loop comes back to whoever reads the table"


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_bf16_buffers_hold_bf16_values(name: str, ranks: int) -> None:
    """A buffer in bf16 must not round what the graph keeps in f32."""
    one = lowered(name, ranks)
    assert_bf16_is_exact(one)


def assert_bf16_is_exact(one: object) -> None:
    from mkc.passes.pipeline import Lowered

    assert isinstance(one, Lowered)
    dtypes = {
        value.name: value.type.dtype
        for node in one.steps.sharded.graph.body.nodes()
        for value in node.results
    }
    checked = 0
    for buffer in one.program.buffers:
        if buffer.dtype is DType.BF16:
            for value in buffer.purpose.split(", "):
                assert dtypes.get(value, DType.BF16) is DType.BF16, value
                checked += 1
    assert checked


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_the_sum_of_all_arrays_fits(name: str, ranks: int) -> None:
    """What the plan adds up is what the kernel allocates, hardware tiles included."""
    one = lowered(name, ranks)
    target = load_target(TARGET)
    sizes = {"bf16": 2, "f32": 4, "i32": 4}
    allocated = sum(
        target.padded_bytes(shape, sizes[kind])
        for _, kind, shape in scratch(one.program)
        if kind in sizes
    )
    assert one.residency.vmem_bytes == allocated <= target.vmem.limit_bytes
    listed = [place.bytes for place in one.residency.allocations]
    assert listed == sorted(listed, reverse=True)


@pytest.mark.parametrize("batch", [1, 8])
def test_vmem_of_the_full_model(batch: int) -> None:
    one = lowered("27b", 8, batch)
    assert one.residency.vmem_bytes <= 58 * MIB
    assert one.program.tape.slots == one.tiles.slots, "nothing has to give way to the ring"


def test_report_of_the_full_model() -> None:
    """Bytes of the report are bytes of the operands; nothing is counted twice or forgotten."""
    one = lowered("27b", 8)
    document = report(one)
    sizes = {
        role: sum(
            prod(operand.shape) * operand.dtype.bytes
            for operand in one.program.operands
            if operand.role == role
        )
        for role in ("tape", "page", "narrow", "state", "cache")
    }
    assert sizes["tape"] == one.program.tape.rows * ROW_BYTES
    assert document["bytes"]["tape"] == sizes["tape"] + sizes["page"] + sizes["narrow"]
    assert document["bytes"]["kv"] == sizes["cache"] == 16 * 2 * 4096 * 256 * 2
    assert document["bytes"]["state"] == 2 * sizes["state"]
    assert 0 <= document["bytes"]["padding"] < 0.002 * document["bytes"]["tape"]
    vmem = document["vmem"]
    assert vmem["peak_bytes"] == one.residency.vmem_bytes
    assert vmem["largest"][0] == ["tape_ring", one.program.tape.slots * one.tiles.slot_rows * 512]
    assert vmem["peak_bytes"] + vmem["reserve_bytes"] <= vmem["limit_bytes"]


@given(STACKS, strategies.sampled_from([1, 8]))
@settings(max_examples=30, deadline=None)
def test_pages_hold_vectors_side_by_side(stack: Stack, ranks: int) -> None:
    """No two vectors of a page overlap, and none leaves it."""
    program = lower(stack.graph(), ranks).program
    for stream in program.streams:
        rows: list[PageRow] = list(program.pages.get(stream.name, ()))
        taken = [lane for one in rows for lane in range(one.row * 128, one.row * 128 + one.length)]
        assert len(taken) == len(set(taken))
        assert max(taken, default=0) < prod(stream.item_shape)


def test_the_ring_gives_way() -> None:
    """A smaller VMEM takes slots from deep rings first, then from the tape, and says so."""
    tight = f"residency{{reserve_bytes={40}MiB}}"
    one = lower(full_size(), 8, tight)
    assert 3 <= one.program.tape.slots < one.tiles.slots
    assert one.residency.vmem_bytes <= load_target(TARGET).vmem.usable_bytes - 40 * MIB
    chosen = {decision.id: decision.chosen for decision in one.log.decisions}
    wanted = f"{one.program.tape.slots} of {one.tiles.slots} wanted slots"
    assert chosen["residency.ring_slots"].startswith(wanted)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(VmemError) as raised:
        lower_graph(full_size(), load_target(TARGET), passes=f"residency{{reserve_bytes={60}MiB}}")
    error = raised.value
    assert sum(one.bytes for one in error.live) == error.needed_bytes > error.limit_bytes
    assert "the default options" in str(error)
