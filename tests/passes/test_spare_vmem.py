"""VMEM that is less than a slot of the tape's ring goes to the other rings."""

from __future__ import annotations

from dataclasses import replace

from mkc.passes.spare_vmem import with_spare_slots
from mkc.passes.streams import FEWEST_CACHE_SLOTS
from mkc.passes.streams import Streams
from mkc.passes.streams import place_streams
from mkc.passes.streams import with_cache_slots
from mkc.targets import load_target
from tests.passes.lowering import TARGET
from tests.passes.lowering import full_size
from tests.passes.lowering import lower

DEVICE = load_target(TARGET)
KIB = 1 << 10


def streams() -> Streams:
    """Of 16 caches and 48 delta layers of eight sequences."""
    steps = lower(full_size(batch=8), 8).steps
    return place_streams(steps, 8, cache_tile=0, largest_tile=0, state_slots=0)


def ring_bytes(found: Streams) -> int:
    caches = sum(
        DEVICE.padded_bytes((one.slots, one.tile, width), 2)
        for one in found.caches
        for width in one.widths
    )
    return caches + sum(
        DEVICE.padded_bytes((one.slots, *one.item_shape), one.dtype.bytes) for one in found.streams
    )


def test_with_room_for_all_every_ring_is_as_deep_as_it_was() -> None:
    deep = streams()
    short = with_cache_slots(deep)
    assert ring_bytes(short) < ring_bytes(deep)
    assert with_spare_slots(short, deep, 64 << 20, DEVICE) == deep


def test_no_more_is_taken_than_there_is() -> None:
    deep = streams()
    short = with_cache_slots(deep)
    for spare in (0, 100 * KIB, 500 * KIB, 900 * KIB, 2000 * KIB):
        found = with_spare_slots(short, deep, spare, DEVICE)
        assert ring_bytes(found) - ring_bytes(short) <= spare


def test_caches_come_first_and_every_ring_gets_one_slot_in_turn() -> None:
    deep = streams()
    short = with_cache_slots(deep)
    (cache,) = short.caches
    tile = sum(DEVICE.padded_bytes((1, cache.tile, width), 2) for width in cache.widths)
    found = with_spare_slots(short, deep, tile, DEVICE)
    assert found == replace(short, caches=(replace(cache, slots=FEWEST_CACHE_SLOTS + 1),))
    found = with_spare_slots(short, deep, 2 * tile, DEVICE)
    (grown,) = found.caches
    assert grown.slots == FEWEST_CACHE_SLOTS + 1, "states get theirs before the second tile"
    assert found.streams != short.streams
