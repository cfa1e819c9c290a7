"""Events: what the simulator saw, for tables, traces, pictures and explanations."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mkc.schedule.simulate.machine import Engine
from mkc.schedule.simulate.machine import Stall

CORE = "core"
MEMORY = "hbm"


class Kind(StrEnum):
    """What happened."""

    WORK = "work"  # the core computed
    ISSUE = "issue"  # the core started a copy or a message
    WAIT = "wait"  # the core waited
    COPY = "copy"  # the memory moved bytes between HBM and VMEM
    MESSAGE = "message"  # bytes went to a peer


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that took time on a track.

    Attributes:
      id: number, in the order of simulation; stable for the same program.
      rank: where.
      track: `core`, `hbm`, or `link:CLASS`.
      start_us, end_us: from the start of the first rank's kernel. A copy or message occupies its
        track until `end_us`; its bytes are there at `done_us`.
      phase, op, layer, round: what it belongs to, see `machine.Mark`.
      engine: of work, else None.
      stall: why a core waited, None when it did not have to.
      bytes, slot, semaphore: of a copy, message or wait.
      peer: rank that a message goes to, -1 otherwise.
      after: id of the event whose end let this one begin, or end in the case of a wait; -1 at the
        very start.
      source: id of the event that a wait waited for, or the issue of a copy or message; -1
        otherwise.
      took: of a wait: ids of the copies and messages whose last bytes it took off its semaphore,
        also of those that it did not have to wait for.
    """

    id: int
    rank: int
    track: str
    kind: Kind
    start_us: float
    end_us: float
    done_us: float
    phase: str
    op: str
    layer: int
    round: int
    engine: Engine | None = None
    stall: Stall | None = None
    bytes: int = 0
    slot: int = -1
    semaphore: str = ""
    peer: int = -1
    after: int = -1
    source: int = -1
    took: tuple[int, ...] = ()

    @property
    def us(self) -> float:
        """Time on its track."""
        return self.end_us - self.start_us


def event_document(event: Event) -> dict[str, Any]:
    """The event for JSON; times in us with a resolution of 0.1 ns."""
    document = asdict(event)
    for key in ("start_us", "end_us", "done_us"):
        document[key] = round(document[key], 4)
    return document
