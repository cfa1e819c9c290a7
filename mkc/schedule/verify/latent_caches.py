"""What attention to latent vectors does with its cache, as events; part of `protocol`.

Its tiles and new rows are those of `rows_caches`; a plain step has one real row for each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

from mkc.schedule.mixing_phases import LatentAttentionPhase
from mkc.schedule.program import View
from mkc.schedule.verify.caches import CacheCursor
from mkc.schedule.verify.rows_caches import Entering
from mkc.schedule.verify.rows_caches import RowsAttention

ROUTINE = "latent_attention"


@dataclass(frozen=True, kw_only=True)
class LatentAttention(RowsAttention):
    """Attention of all heads to one stream of latents and shared keys."""

    def latent_phase(self, phase: LatentAttentionPhase) -> None:
        """Keys are folded into all queries first, and values projected from all sums last."""
        kernel = self.kernel
        cursor, up = kernel.caches[phase.cache], kernel.streams[phase.up]
        kernel.load(ROUTINE, phase.q)
        kernel.stream_read(ROUTINE, up)
        for sequence in cursor.awake:
            self.one_sequence(cursor, phase, sequence)
        kernel.stream_read(ROUTINE, up)
        for head in range(phase.heads):
            start = phase.output.start + head * phase.value_dim
            view = View(buffer=phase.output.buffer, start=start, width=phase.value_dim)
            kernel.store_row(ROUTINE, view)  # a choice between all rows and what resting ones hold
        cursor.calls += 1

    def one_sequence(self, cursor: CacheCursor, phase: LatentAttentionPhase, sequence: int) -> None:
        entering = self.latent_rows(sequence)
        for view in (phase.latent, phase.shared):
            self.kernel.load(ROUTINE, view)
        first, end = self.span(cursor.plan, sequence)
        for tile in range(first, end):
            rings = self.wait(ROUTINE, cursor)
            if tile == end - 1:
                self.append(cursor, entering)
            self.read_seen(cursor, sequence, tile, rings)
            self.fetch(ROUTINE, cursor)

    def latent_rows(self, sequence: int) -> Entering:
        """The new rows of a sequence."""
        kernel = self.kernel
        count = 1 if kernel.program.round is None else kernel.real[sequence]
        return Entering(sequence=sequence, first=kernel.positions[sequence], count=count)

    def drain(self, cursor: CacheCursor) -> None:
        for sequence in cursor.awake:
            self.written("rows_drain", cursor.plan, self.latent_rows(sequence))
