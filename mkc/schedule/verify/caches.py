"""What attention does with its caches, as events; part of `protocol`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mkc.schedule.program import AttentionPhase
from mkc.schedule.stream_plans import CacheStream
from mkc.schedule.verify.arrays import BLOCK_ROWS
from mkc.schedule.verify.events import Place

if TYPE_CHECKING:
    from mkc.schedule.verify.protocol import Kernel


@dataclass(kw_only=True)
class CacheCursor:
    """Where a cache stands; `layer`, `turn` and `tile` are those of the next tile to fetch."""

    plan: CacheStream
    awake: tuple[int, ...] = ()
    slot: int = 0
    layer: int = 0
    turn: int = 0
    tile: int = 0
    calls: int = 0


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tiles of caches on their way through their rings, on one rank."""

    kernel: Kernel

    def span(self, plan: CacheStream, sequence: int) -> tuple[int, int]:
        """The first tile of a sequence, and the one behind its last."""
        return 0, self.kernel.positions[sequence] // plan.tile + 1

    def prologue(self, name: str) -> None:
        plan = self.kernel.caches[name].plan
        awake = tuple(one for one, position in enumerate(self.kernel.positions) if position >= 0)
        cursor = CacheCursor(plan=plan, awake=awake, layer=0 if awake else plan.layers)
        if awake:
            cursor.tile = self.span(plan, awake[0])[0]
        self.kernel.caches[name] = cursor
        for _ in range(plan.slots):
            self.fetch("kv_prologue", cursor)

    def fetch(self, routine: str, cursor: CacheCursor) -> None:
        """Fetches the next tile, if any is left, into the slot at the cursor."""
        plan, slot = cursor.plan, cursor.slot
        cursor.slot = (slot + 1) % plan.slots
        if cursor.layer >= plan.layers:
            return
        sequence = cursor.awake[cursor.turn]
        first = cursor.tile * plan.tile
        for part, array in enumerate((plan.key_array, plan.value_array)):
            ring = f"{plan.name}_{'value' if part else 'key'}_ring"
            self.kernel.start(
                routine,
                Place(array=array, index=(cursor.layer, sequence), first=first, count=plan.tile),
                Place(array=ring, index=(slot,), count=plan.tile),
                (f"{plan.name}_arrived", (part, slot)),
            )
        cursor.tile += 1
        if cursor.tile == self.span(plan, sequence)[1]:
            cursor.turn += 1
            if cursor.turn == len(cursor.awake):
                cursor.turn = 0
                cursor.layer += 1
            cursor.tile = self.span(plan, cursor.awake[cursor.turn])[0]

    def wait(self, routine: str, cursor: CacheCursor) -> tuple[Place, Place]:
        """Waits for the tile to consume; returns where its keys and values are."""
        plan, slot = cursor.plan, cursor.slot
        rings = [
            Place(array=f"{plan.name}_{part}_ring", index=(slot,), count=plan.tile)
            for part in ("key", "value")
        ]
        for part, ring in enumerate(rings):
            semaphore = (f"{plan.name}_arrived", (part, slot))
            self.kernel.wait(routine, semaphore, self.kernel.size(ring))
        return rings[0], rings[1]

    def read(
        self,
        routine: str,
        cursor: CacheCursor,
        sequence: int,
        tile: int,
        rings: tuple[Place, Place],
    ) -> None:
        """Keys and values of a tile are used."""
        plan = cursor.plan
        for array, ring in zip((plan.key_array, plan.value_array), rings, strict=True):
            data = Place(
                array=array,
                index=(cursor.calls, sequence),
                first=tile * plan.tile,
                count=plan.tile,
            )
            self.kernel.read(routine, ring, data)


@dataclass(frozen=True, kw_only=True)
class Attention(Tiles):
    """Attention of one row for each sequence."""

    def phase(self, phase: AttentionPhase) -> None:
        cursor = self.kernel.caches[phase.cache]
        for sequence in cursor.awake:
            for view in (phase.q, phase.k, phase.v):
                self.kernel.load("attention", view)
            first, end = self.span(cursor.plan, sequence)
            for tile in range(first, end):
                rings = self.wait("attention", cursor)
                if tile == end - 1:
                    self.patch(cursor, sequence)
                self.read("attention", cursor, sequence, tile, rings)
                self.fetch("attention", cursor)
            self.kernel.store_row("attention", phase.output)
        if not cursor.awake:
            self.kernel.rest("attention", phase.output)
        cursor.calls += 1

    def patch(self, cursor: CacheCursor, sequence: int) -> None:
        """The new row goes into the tile, and with its block of rows to the cache."""
        plan, slot = cursor.plan, cursor.slot
        if cursor.calls > 0:
            self.written(plan, sequence)
        first = self.kernel.positions[sequence] & -BLOCK_ROWS
        parts = (("key", plan.key_array), ("value", plan.value_array))
        blocks = []
        for part, array in parts:
            rows = Place(
                array=f"{plan.name}_{part}_ring",
                index=(slot,),
                first=first % plan.tile,
                count=BLOCK_ROWS,
            )
            data = Place(array=array, index=(cursor.calls, sequence), first=first, count=BLOCK_ROWS)
            new = Place(array=f"{plan.name}_{part}_new", index=(sequence,), count=BLOCK_ROWS)
            self.kernel.read("kv_patch", rows, data)
            self.kernel.write("kv_patch", rows)
            self.kernel.write("kv_patch", new, data, saved=True)
            blocks.append((new, data))
        for number, (new, data) in enumerate(blocks):
            self.kernel.start("kv_patch", new, data, (f"{plan.name}_written", (number, sequence)))
        values = Place(array=f"{plan.name}_value_ring", index=(slot,), count=plan.tile)
        self.kernel.write("kv_patch", values)

    def written(self, plan: CacheStream, sequence: int) -> None:
        for part in range(2):
            name = f"{plan.name}_{'value' if part else 'key'}_new"
            size = self.kernel.size(Place(array=name, index=(sequence,), count=BLOCK_ROWS))
            self.kernel.wait("kv_written", (f"{plan.name}_written", (part, sequence)), size)

    def drain(self, cursor: CacheCursor) -> None:
        for sequence, position in enumerate(self.kernel.positions):
            if position >= 0:
                self.written(cursor.plan, sequence)
