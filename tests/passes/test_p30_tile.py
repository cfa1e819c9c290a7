"""Pass 30: how weight matrices are cut into loads, and how deep the ring is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example
from hypothesis import given
from hypothesis import settings
from hypothesis import strategies

import mkc
from mkc.errors import TileError
from mkc.passes.p20_fuse import Fuse
from mkc.passes.p30_tile import LARGEST_RATIO
from mkc.passes.p30_tile import ROW_BYTES
from mkc.passes.p30_tile import ROW_TILE
from mkc.passes.p30_tile import Tile
from mkc.passes.p30_tile import Tiles
from mkc.passes.p30_tile import choose_tiling
from mkc.passes.p30_tile import wanted_ring_bytes
from mkc.passes.steps import StepGraph
from mkc.schedule.decisions import DecisionLog
from mkc.targets import load_target
from tests.passes.lowering import TARGET
from tests.passes.lowering import dense_graph
from tests.passes.lowering import full_size
from tests.passes.lowering import lowered
from tests.passes.test_p10_shard import shard

MIB = 1 << 20


def one_matrix(K: int, N: int) -> Callable[[mkc.Step], mkc.Outputs]:
    """A model whose only matrix is [K, N]: its LM head."""

    def function(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [64, K]))
        return mkc.next_token(h, mkc.param("head.weight", [N, K]))

    return function


def steps_of_matrix(K: int, N: int) -> StepGraph:
    graph = mkc.trace(one_matrix(K, N), name="matrix", batch=1, context=64)
    return Fuse().apply(shard(graph, 1), DecisionLog())


def tile(graph: StepGraph, **options: int) -> Tiles:
    return Tile(**options).apply(graph, load_target(TARGET), DecisionLog())


def loads_by_name(graph: StepGraph, tiles: Tiles) -> dict[str, tuple[int, int, int]]:
    """First weight of every matrix -> (K, loads, rows of the first load)."""
    found = {}
    for step in graph.steps():
        if step.id in tiles.tilings:
            tiling = tiles.tilings[step.id]
            loads = tiling.loads()
            name = step.nodes[0].operands[1].split(".")[-2]
            found.setdefault(name, (tiling.K, len(loads), loads[0]))
    return found


def test_loads_of_the_full_model() -> None:
    """At tp 8 every load is between 1.4 and 2.7 MB, whatever the shape of its matrix."""
    graph = Fuse().apply(shard(full_size(), 8), DecisionLog())
    tiles = tile(graph)
    assert loads_by_name(graph, tiles) == {
        "in_proj_qkv": (5120, 8, 5120),  # a block of 256 columns per load
        "out_proj": (768, 4, 5 * 768),  # five blocks per load
        "gate_proj": (5120, 17, 5120),
        "down_proj": (2176, 10, 2 * 2176),  # two blocks per load
        "q_proj": (5120, 8, 5120),
        "o_proj": (768, 4, 5 * 768),
        "lm_head": (5120, 122, 5120),
    }
    sizes = {rows * ROW_BYTES for one in tiles.tilings.values() for rows in one.loads()}
    assert min(sizes) >= load_target(TARGET).dma.minimum_load_bytes
    assert max(sizes) <= LARGEST_RATIO * load_target(TARGET).dma.load_target_bytes
    assert tiles.slot_rows * ROW_BYTES == max(sizes)


def test_the_tape_of_the_full_model_is_hardly_padded() -> None:
    """At most 0.5 % above the 6.447 GB of unpadded weights of a rank."""
    tape = lowered("27b", 8).program.tape
    assert 6.40e9 < tape.rows * ROW_BYTES < 1.005 * 6.447e9


@pytest.mark.parametrize(
    ("K", "N", "blocks_per_step", "loads_per_step", "last"),
    [
        (4096, 4096, 1, 1, 4096),  # 2 MiB exactly
        (1024, 4096, 4, 1, 4096),  # several blocks per load
        (16384, 1024, 1, 4, 4096),  # a quarter of a block per load
        (1024, 1280, 5, 1, 5120),  # five blocks are nearer to 2 MiB than one
        (1024, 7 * 256, 4, 1, 3072),  # seven blocks: four and three
        (1024, 13 * 256, 4, 1, 1024),  # 13 blocks: three loads of four and a shorter last one
    ],
)
def test_loads_of_one_matrix(
    K: int, N: int, blocks_per_step: int, loads_per_step: int, last: int
) -> None:
    graph = steps_of_matrix(K, N)
    (step,) = [one for one in graph.steps() if one.kind == "matmul"]
    tiling = choose_tiling(graph, step, 2 * MIB // ROW_BYTES)
    assert (tiling.blocks_per_step, tiling.loads_per_step) == (blocks_per_step, loads_per_step)
    assert tiling.loads()[-1] == last


SIZES = strategies.integers(1, 2048).map(lambda tiles: tiles * ROW_TILE)


@given(SIZES, strategies.integers(65, 40_000), strategies.sampled_from([256, 1024, 4096]))
@example(16 * 2039, 256, 4096)  # a prime number of memory tiles: no even share exists
@settings(max_examples=150, deadline=None)
def test_loads_cover_a_matrix(K: int, N: int, wanted: int) -> None:
    """Loads hold exactly the rows of all blocks, start on memory tiles, and are of good size."""
    graph = steps_of_matrix(K, N)
    (step,) = [one for one in graph.steps() if one.kind == "matmul"]
    tiling = choose_tiling(graph, step, wanted)
    blocks = -(-N // 256)
    loads = tiling.loads()
    assert sum(loads) == K * blocks
    assert all(rows % ROW_TILE == 0 and rows > 0 for rows in loads)
    assert len(set(loads[:-1])) <= 1, "all loads but the last one are alike"
    assert len(loads) == tiling.steps * tiling.loads_per_step
    if K * blocks >= 2 * wanted and has_even_share(K, wanted):
        ratio = loads[0] / wanted
        assert 1 / LARGEST_RATIO <= ratio <= LARGEST_RATIO


def has_even_share(K: int, wanted: int) -> bool:
    """Whether K itself, a few of it, or an equal share of it is near the wanted rows."""
    tiles = K // ROW_TILE
    shares = (K // pieces for pieces in range(1, tiles + 1) if tiles % pieces == 0)
    if wanted * LARGEST_RATIO < K:
        return any(1 / LARGEST_RATIO <= share / wanted <= LARGEST_RATIO for share in shares)
    return True


@pytest.mark.parametrize("K", [8, 24, 1000])
def test_a_contracted_size_that_fills_no_tiles(K: int) -> None:
    graph = steps_of_matrix(K, 256)
    with pytest.raises(TileError) as raised:
        tile(graph)
    assert f"'head.weight' has {K} input columns on each rank" in str(raised.value)
    assert "a multiple of 16" in str(raised.value)
    assert "test_p30_tile.py:" in str(raised.value)


def test_ring_of_the_full_model() -> None:
    """Deep enough for the bytes in flight that saturate the memory and for one exchange."""
    target = load_target(TARGET)
    tiles = tile(Fuse().apply(shard(full_size(), 8), DecisionLog()))
    ring = tiles.slots * tiles.slot_rows * ROW_BYTES
    in_flight = (tiles.slots - 2) * tiles.slot_rows * ROW_BYTES
    assert in_flight >= wanted_ring_bytes(target) > target.dma.saturation_bytes_in_flight
    assert ring < 32 * MIB


def test_the_ring_is_no_deeper_than_the_shortest_loop_body() -> None:
    """The dense example is small: its loads shrink, so that a layer still has several of them."""
    graph = Fuse().apply(shard(dense_graph(), 8), DecisionLog())
    tiles = tile(graph)
    body = [step for step in graph.steps() if step.id in tiles.tilings][:-1]
    loads = [rows for step in body for rows in tiles.tilings[step.id].loads()]
    assert 4 <= tiles.slots <= len(loads)
    assert max(loads) * ROW_BYTES < load_target(TARGET).dma.load_target_bytes


def test_options_override_the_target() -> None:
    graph = Fuse().apply(shard(full_size(), 8), DecisionLog())
    small = tile(graph, load_bytes=MIB, ring_bytes=4 * MIB)
    assert {rows for one in small.tilings.values() for rows in one.loads()} <= set(range(3073))
    assert small.slots * small.slot_rows * ROW_BYTES <= 4 * MIB + 3 * small.slot_rows * ROW_BYTES


def test_why_the_loads_are_so_large() -> None:
    log = DecisionLog()
    graph = Fuse().apply(shard(full_size(), 8), DecisionLog())
    Tile().apply(graph, load_target(TARGET), log)
    chosen = {one.id: one.chosen for one in log.decisions}
    assert chosen["tile.load_bytes"] == str(2 * MIB)
    (down,) = [
        step.id
        for step in graph.steps()
        if "down_proj" in str(step.nodes[0].operands)
        and step.kind == "matmul"
        and "{index}" in step.nodes[0].operands[1]
    ][:1]
    assert chosen[f"tile.{down}"] == "10 loads of 4352 rows"
