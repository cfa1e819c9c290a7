"""What attention of several rows does with its caches, as events; part of `protocol`."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace

from mkc.schedule.program import View
from mkc.schedule.round_phases import RowsAttentionPhase
from mkc.schedule.stream_plans import CacheStream
from mkc.schedule.verify.arrays import BLOCK_ROWS
from mkc.schedule.verify.arrays import NEW_BLOCKS
from mkc.schedule.verify.caches import CacheCursor
from mkc.schedule.verify.caches import Tiles
from mkc.schedule.verify.events import Place

ROUTINE = "rows_attention"


@dataclass(frozen=True, kw_only=True)
class Entering:
    """Rows of a sequence on their way into a cache: `count` from position `first`."""

    sequence: int
    first: int
    count: int

    def blocks(self) -> list[int]:
        """First rows of the aligned blocks that hold them; none where nothing enters."""
        if not self.count:
            return []
        aligned = self.first & -BLOCK_ROWS
        starts = [aligned + block * BLOCK_ROWS for block in range(NEW_BLOCKS)]
        return [start for start in starts if start < self.first + self.count]


@dataclass(frozen=True, kw_only=True)
class RowsAttention(Tiles):
    """Attention of the rows of a round. Tiles hold what lies before its first position."""

    def span(self, plan: CacheStream, sequence: int) -> tuple[int, int]:
        position = self.kernel.positions[sequence]
        end = max(position - 1, 0) // plan.tile + 1
        if plan.window is None:
            return 0, end
        return max(position + 1 - plan.window, 0) // plan.tile, end

    def phase(self, phase: RowsAttentionPhase) -> None:
        kernel = self.kernel
        cursor = kernel.caches[phase.cache]
        remembered = phase.remembered
        new_k, new_v = (remembered.k, remembered.v) if remembered else (phase.k, phase.v)
        for sequence in cursor.awake:
            entering = self.entering(phase, sequence)
            for view in (new_k, new_v, phase.q):
                kernel.load(ROUTINE, view)
            first, end = self.span(cursor.plan, sequence)
            for tile in range(first, end):
                rings = self.wait(ROUTINE, cursor)
                if tile == end - 1:
                    self.append(cursor, entering)
                    kernel.write(ROUTINE, rings[1])  # what lies behind the round becomes zero
                self.read_seen(cursor, sequence, tile, rings)
                self.fetch(ROUTINE, cursor)
            for view in (phase.k, phase.v) if remembered else ():
                kernel.load(ROUTINE, view)
            self.store_heads(phase)
        if not cursor.awake:
            kernel.rest(ROUTINE, phase.output)
        cursor.calls += 1

    def read_seen(
        self, cursor: CacheCursor, sequence: int, tile: int, rings: tuple[Place, Place]
    ) -> None:
        """All of a tile is read, and what lies before the round is seen."""
        plan, kernel = cursor.plan, self.kernel
        seen = min(plan.tile, kernel.positions[sequence] - tile * plan.tile)
        for array, ring in zip((plan.key_array, plan.value_array), rings, strict=True):
            kernel.read(ROUTINE, ring)
            if seen > 0:
                data = Place(
                    array=array,
                    index=(cursor.calls, sequence),
                    first=tile * plan.tile,
                    count=seen,
                )
                kernel.read(ROUTINE, replace(ring, count=seen), data)

    def store_heads(self, phase: RowsAttentionPhase) -> None:
        """Rows of one sequence, head by head; those of others are kept."""
        for head in range(phase.heads):
            start = phase.output.start + head * phase.head_dim
            view = View(buffer=phase.output.buffer, start=start, width=phase.head_dim)
            self.kernel.store_row(ROUTINE, view)

    def entering(self, phase: RowsAttentionPhase, sequence: int) -> Entering:
        """The rows that enter the cache. They must follow those that it has, and be the accepted
        ones where others are known not to be."""
        kernel = self.kernel
        size = kernel.rounds.size
        firsts = kernel.rounds.scalars[phase.first]
        source = phase.remembered.positions if phase.remembered else phase.positions
        wanted = (kernel.accepted if phase.remembered else kernel.real)[sequence]
        mine = kernel.rounds.scalars[source][sequence * size : (sequence + 1) * size]
        real = [one for one in mine if one >= 0]
        first = firsts[sequence * size]
        expected = list(range(kernel.positions[sequence], kernel.positions[sequence] + wanted))
        if first != kernel.positions[sequence] or real != expected:
            message = (
                f"rows of positions {real} enter {phase.cache} from {first} on; "
                f"{expected} are those that the next round goes on from"
            )
            kernel.sink.problem("V505", phase.id, message)
        return Entering(sequence=sequence, first=first, count=len(real))

    def append(self, cursor: CacheCursor, entering: Entering) -> None:
        """The rows that lie before the new ones in their block come from the last tile."""
        kernel, plan, sequence = self.kernel, cursor.plan, entering.sequence
        if cursor.calls > 0:
            self.written("rows_append", plan, entering)
        arrays = (("key", plan.key_array), ("value", plan.value_array))
        for part, array in arrays:
            self.fill_blocks(cursor, entering, part, array)
        for block, first in enumerate(entering.blocks()):
            for number, (part, array) in enumerate(arrays):
                new = self.new_block(plan, part, sequence, block)
                index = (cursor.calls, sequence)
                rows = Place(array=array, index=index, first=first, count=BLOCK_ROWS)
                kernel.start("rows_append", new, rows, (f"{plan.name}_written", (number, sequence)))

    def fill_blocks(self, cursor: CacheCursor, entering: Entering, part: str, array: str) -> None:
        kernel, plan, sequence = self.kernel, cursor.plan, entering.sequence
        aligned = entering.first & -BLOCK_ROWS
        old = entering.first - aligned
        ring = Place(
            array=f"{plan.name}_{part}_ring",
            index=(cursor.slot,),
            first=aligned % plan.tile,
            count=BLOCK_ROWS,
        )

        def rows(first: int, count: int) -> Place:
            return Place(array=array, index=(cursor.calls, sequence), first=first, count=count)

        kernel.read("rows_append", ring)
        if old:
            kernel.read("rows_append", replace(ring, count=old), rows(aligned, old))
        for number in range(NEW_BLOCKS):
            new = self.new_block(plan, part, sequence, number)
            first = aligned + number * BLOCK_ROWS
            saved, kept = first in entering.blocks(), old if number == 0 else 0
            if kept:
                place = replace(new, count=kept)
                kernel.write("rows_append", place, rows(first, kept), saved=saved, same=True)
            place = replace(new, first=new.first + kept, count=BLOCK_ROWS - kept)
            data = rows(first + kept, BLOCK_ROWS - kept)
            kernel.write("rows_append", place, data, saved=saved)

    def new_block(self, plan: CacheStream, part: str, sequence: int, number: int) -> Place:
        name = f"{plan.name}_{part}_new"
        return Place(array=name, index=(sequence,), first=number * BLOCK_ROWS, count=BLOCK_ROWS)

    def written(self, routine: str, plan: CacheStream, entering: Entering) -> None:
        for number, _ in enumerate(entering.blocks()):
            for part in range(2):
                name = "value" if part else "key"
                new = self.new_block(plan, name, entering.sequence, number)
                semaphore = (f"{plan.name}_written", (part, entering.sequence))
                self.kernel.wait(routine, semaphore, self.kernel.size(new))

    def drain(self, cursor: CacheCursor) -> None:
        """The last layer's rows; `entering` has said what is wrong with them."""
        phase = next(
            one
            for one in self.kernel.program.phases()
            if isinstance(one, RowsAttentionPhase) and one.cache == cursor.plan.name
        )
        source = phase.remembered.positions if phase.remembered else phase.positions
        for sequence in cursor.awake:
            if self.kernel.rounds.scalars[source][sequence * self.kernel.rounds.size] >= 0:
                self.written("rows_drain", cursor.plan, self.entering(phase, sequence))
