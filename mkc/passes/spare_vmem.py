"""Slots of rings that gave way to the tape's come back where VMEM is left after all.

The ring of the tape takes whole slots of some MiB; what is left beside it is less than one of them,
but several tiles of a cache, or states.
"""

from __future__ import annotations

from dataclasses import replace

from mkc.passes.streams import Streams
from mkc.targets import Target


def with_spare_slots(streams: Streams, wanted: Streams, spare: int, target: Target) -> Streams:
    """The streams with more slots, none with more than it has in `wanted`.

    Every ring gets one slot in turn, caches before states and those of many layers first: there
    most is waited for.

    Args:
      spare: bytes of VMEM that nothing else takes.
    """
    sizes = {
        one.name: sum(target.padded_bytes((1, one.tile, width), 2) for width in one.widths)
        for one in sorted(streams.caches, key=lambda one: (-one.layers, one.name))
    }
    sizes |= {
        one.name: target.padded_bytes((1, *one.item_shape), one.dtype.bytes)
        for one in sorted(streams.streams, key=lambda one: (-one.items, one.name))
    }
    slots, limits = _slots(streams), _slots(wanted)
    grown = True
    while grown:
        grown = False
        for name, size in sizes.items():
            if slots[name] < limits[name] and size <= spare:
                slots[name] += 1
                spare, grown = spare - size, True
    return replace(
        streams,
        caches=tuple(replace(one, slots=slots[one.name]) for one in streams.caches),
        streams=tuple(replace(one, slots=slots[one.name]) for one in streams.streams),
    )


def _slots(streams: Streams) -> dict[str, int]:
    """Of every ring."""
    caches = {one.name: one.slots for one in streams.caches}
    return caches | {one.name: one.slots for one in streams.streams}
