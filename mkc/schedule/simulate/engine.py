"""The event simulation of all ranks.

A core executes its instructions in order and touches its own memory queue only, so the ranks meet
in messages alone. Each rank is run until it needs a message that no peer has sent yet; then the
others run. The order in which ranks are run has no influence on any time, as long as nobody sends
to a semaphore again before all that is awaited there was sent, which the proof of a program shows.

The model, whose constants are the target's:

* Memory serves one copy after the other at the sustained rate; urgent copies are taken first. A
  copy's bytes are there one latency after its last byte was served. How bandwidth grows with the
  bytes in flight follows from this and is not put in.
* Starting a copy or a message costs the core its issue time.
* Weights are pushed into the matrix unit in order. Its results come out one drain time after the
  last push; vector work and waits for copies need them, the start of a copy does not.
* A message leaves when the rank's egress port is free (to the sibling core it needs none) and the
  link to that peer is; it arrives one latency after its last byte.
* Semaphores count bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from heapq import heappop
from heapq import heappush
from typing import Any

from mkc.schedule.simulate.events import CORE
from mkc.schedule.simulate.events import MEMORY
from mkc.schedule.simulate.events import Event
from mkc.schedule.simulate.events import Kind
from mkc.schedule.simulate.fabric import Fabric
from mkc.schedule.simulate.fabric import Hop
from mkc.schedule.simulate.fabric import fabric_of
from mkc.schedule.simulate.machine import Engine
from mkc.schedule.simulate.machine import Instruction
from mkc.schedule.simulate.machine import MachineProgram
from mkc.schedule.simulate.machine import Mark
from mkc.schedule.simulate.machine import RankSkew
from mkc.schedule.simulate.machine import RoundStart
from mkc.schedule.simulate.machine import Send
from mkc.schedule.simulate.machine import Stall
from mkc.schedule.simulate.machine import Start
from mkc.schedule.simulate.machine import Wait
from mkc.schedule.simulate.machine import Work
from mkc.targets import Target

NO_SKEW = RankSkew()
EPSILON_US = 1e-9  # shorter stalls are rounding


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a simulation saw.

    Attributes:
      events: of all simulated ranks, by id; ranks of a symmetric program are one.
      round_starts: time of every round's begin, by rank.
      end_us: when each simulated rank ended.
      symmetric: rank 0 stands for all ranks.
    """

    events: tuple[Event, ...]
    round_starts: tuple[tuple[float, ...], ...]
    end_us: tuple[float, ...]
    symmetric: bool


@dataclass(slots=True)
class _Request:
    """A copy that waits for the memory."""

    start: Start
    issued_us: float
    issue: int  # event id


@dataclass(slots=True)
class _Memory:
    """The copy queue of one rank."""

    scale: float
    free_us: float = 0.0
    last: int = -1  # event id of the last copy
    urgent: deque[_Request] = field(default_factory=deque)
    ordinary: deque[_Request] = field(default_factory=deque)

    def queued_bytes(self, semaphore: str) -> int:
        """Bytes that queued copies will bring to a semaphore."""
        requests = (*self.urgent, *self.ordinary)
        return sum(one.start.bytes for one in requests if one.start.semaphore == semaphore)

    def next(self, until_us: float) -> _Request | None:
        """The copy that is served next if that begins before `until_us`; it leaves the queue."""
        if self.free_us >= until_us:
            return None
        urgent, ordinary = self.urgent, self.ordinary
        if not urgent and not ordinary:
            return None
        first = min(queue[0].issued_us for queue in (urgent, ordinary) if queue)
        begin = max(self.free_us, first)
        if begin >= until_us:
            return None
        return (urgent if urgent and urgent[0].issued_us <= begin else ordinary).popleft()


@dataclass(slots=True)
class _Rank:
    """One rank on its way through its program."""

    number: int
    instructions: Iterator[Instruction]
    memory: _Memory
    now_us: float
    drained_us: float = 0.0
    egress_us: float = 0.0
    last: int = -1  # event id of the last thing the core did
    waiting: Wait | None = None
    done: bool = False
    arrivals: dict[str, list[tuple[float, int, int]]] = field(default_factory=dict)
    links: dict[int, float] = field(default_factory=dict)
    rounds: list[float] = field(default_factory=list)


class Engines:
    """Runs a machine program. One object per run."""

    def __init__(self, program: MachineProgram, target: Target, skew: Sequence[RankSkew]) -> None:
        assert not skew or len(skew) == program.ranks, "one skew per rank"
        self.program = program
        self.fabric: Fabric = fabric_of(target)
        self.rate = float(target.hbm.sustained_bytes_per_us)
        self.latency_us = target.dma.latency_us
        self.issue_us = target.dma.issue_us
        self.send_us = target.links.issue_us
        self.drain_us = target.mxu.drain_us
        self.symmetric = program.symmetric and all(one == NO_SKEW for one in skew)
        self.events: list[Event] = []
        self.ranks = [
            self._rank(number, skew[number] if skew else NO_SKEW)
            for number in range(1 if self.symmetric else program.ranks)
        ]

    def _rank(self, number: int, skew: RankSkew) -> _Rank:
        return _Rank(
            number=number,
            instructions=iter(self.program.instructions(number)),
            memory=_Memory(scale=skew.memory_scale, free_us=skew.start_us),
            now_us=skew.start_us,
            drained_us=skew.start_us,
        )

    def run(self) -> Run:
        """Executes all ranks to their end."""
        while not all(rank.done for rank in self.ranks):
            progress = [self._advance(rank) for rank in self.ranks]
            if not any(progress):
                blocked = [
                    f"rank {rank.number} in {rank.waiting.mark.phase} at {rank.waiting.semaphore}"
                    for rank in self.ranks
                    if rank.waiting is not None
                ]
                raise AssertionError(f"the program never ends: {'; '.join(blocked)}")
        for rank in self.ranks:
            self._serve(rank, float("inf"))
        return Run(
            events=tuple(self.events),
            round_starts=tuple(tuple(rank.rounds) for rank in self.ranks),
            end_us=tuple(rank.now_us for rank in self.ranks),
            symmetric=self.symmetric,
        )

    def _advance(self, rank: _Rank) -> bool:
        """Runs a rank until it needs a message that was not sent; False when it did nothing."""
        if rank.done:
            return False
        moved = False
        if rank.waiting is not None:
            if not self._wait(rank, rank.waiting):
                return False
            rank.waiting, moved = None, True
        for one in rank.instructions:
            moved = True
            if type(one) is Wait:
                if not self._wait(rank, one):
                    rank.waiting = one
                    return moved
            elif type(one) is Work:
                self._work(rank, one)
            elif type(one) is Start:
                self._start(rank, one)
            elif type(one) is Send:
                self._send(rank, one)
            else:
                assert type(one) is RoundStart
                rank.rounds.append(rank.now_us)
        rank.done = True
        return True

    def _event(self, rank: _Rank, mark: Mark, kind: Kind, start: float, **fields: Any) -> int:
        end = fields.pop("end_us", rank.now_us)
        number = len(self.events)
        self.events.append(
            Event(
                id=number,
                rank=rank.number,
                track=fields.pop("track", CORE),
                kind=kind,
                start_us=start,
                end_us=end,
                done_us=fields.pop("done_us", end),
                phase=mark.phase,
                op=mark.op,
                layer=mark.layer,
                round=mark.round,
                **fields,
            )
        )
        return number

    def _drain(self, rank: _Rank, mark: Mark) -> None:
        """The core waits until the matrix unit has given its results."""
        if rank.drained_us - rank.now_us > EPSILON_US:
            start, rank.now_us = rank.now_us, rank.drained_us
            rank.last = self._event(
                rank, mark, Kind.WAIT, start, stall=Stall.DRAIN, after=rank.last, source=rank.last
            )

    def _work(self, rank: _Rank, one: Work) -> None:
        if one.engine is Engine.VECTOR:
            self._drain(rank, one.mark)
        start = rank.now_us
        rank.now_us += one.us
        if one.engine is Engine.MATRIX:
            rank.drained_us = rank.now_us + self.drain_us
        if one.us > 0.0:
            rank.last = self._event(
                rank, one.mark, Kind.WORK, start, engine=one.engine, after=rank.last
            )

    def _start(self, rank: _Rank, one: Start) -> None:
        start = rank.now_us
        rank.now_us += self.issue_us
        rank.last = self._event(
            rank,
            one.mark,
            Kind.ISSUE,
            start,
            bytes=one.bytes,
            slot=one.slot,
            semaphore=one.semaphore,
            after=rank.last,
        )
        queue = rank.memory.urgent if one.urgent else rank.memory.ordinary
        queue.append(_Request(start=one, issued_us=rank.now_us, issue=rank.last))

    def _serve(self, rank: _Rank, until_us: float) -> None:
        """Serves all copies that begin before `until_us`."""
        while (request := rank.memory.next(until_us)) is not None:
            self._copy(rank, request)

    def _copy(self, rank: _Rank, request: _Request) -> None:
        memory, one = rank.memory, request.start
        queued = memory.free_us > request.issued_us
        begin = max(memory.free_us, request.issued_us)
        memory.free_us = begin + one.bytes / (self.rate * memory.scale)
        landed = memory.free_us + self.latency_us
        memory.last = self._event(
            rank,
            one.mark,
            Kind.COPY,
            begin,
            end_us=memory.free_us,
            done_us=landed,
            track=MEMORY,
            bytes=one.bytes,
            slot=one.slot,
            semaphore=one.semaphore,
            after=memory.last if queued else request.issue,
            source=request.issue,
        )
        self._arrive(rank, one.semaphore, landed, one.bytes, memory.last)

    def _send(self, rank: _Rank, one: Send) -> None:
        start = rank.now_us
        rank.now_us += self.send_us
        rank.last = self._event(
            rank, one.mark, Kind.ISSUE, start, bytes=one.bytes, peer=one.peer, after=rank.last
        )
        hop = self.fabric.hop(rank.number, one.peer)
        link = self.fabric.links[hop]
        begin = max(rank.now_us, rank.links.get(one.peer, 0.0))
        if hop is not Hop.SIBLING:
            begin = max(begin, rank.egress_us)
            rank.egress_us = begin + one.bytes / self.fabric.egress_bytes_per_us
        end = rank.links[one.peer] = begin + one.bytes / link.bytes_per_us
        arrived = end + link.latency_us
        message = self._event(
            rank,
            one.mark,
            Kind.MESSAGE,
            begin,
            end_us=end,
            done_us=arrived,
            track=f"link:{hop}",
            bytes=one.bytes,
            semaphore=one.semaphore,
            peer=one.peer,
            after=rank.last,
            source=rank.last,
        )
        receiver = rank if self.symmetric else self.ranks[one.peer]
        self._arrive(receiver, one.semaphore, arrived, one.bytes, message)
        if one.sent:
            self._arrive(rank, one.sent, end, one.bytes, message)

    def _arrive(self, rank: _Rank, semaphore: str, at_us: float, count: int, event: int) -> None:
        heappush(rank.arrivals.setdefault(semaphore, []), (at_us, event, count))

    def _wait(self, rank: _Rank, one: Wait) -> bool:
        """Takes the bytes off the semaphore; False when they have not been sent."""
        self._serve(rank, rank.now_us)
        arrivals = rank.arrivals.setdefault(one.semaphore, [])
        missing = one.bytes - sum(count for _, _, count in arrivals)
        if missing > rank.memory.queued_bytes(one.semaphore):
            return False
        while missing > 0:
            # Nothing is issued while the core waits, so the queue's order is settled.
            request = rank.memory.next(float("inf"))
            assert request is not None
            self._copy(rank, request)
            if request.start.semaphore == one.semaphore:
                missing -= request.start.bytes
        self._take(rank, one, arrivals)
        return True

    def _take(self, rank: _Rank, one: Wait, arrivals: list[tuple[float, int, int]]) -> None:
        taken, at_us, source = 0, 0.0, -1
        took: list[int] = []
        while taken < one.bytes:
            at_us, source, count = heappop(arrivals)
            taken += count
            took.append(source)
        if taken > one.bytes:
            heappush(arrivals, (at_us, source, taken - one.bytes))
            took.pop()
        if at_us > rank.now_us:
            self._serve(rank, at_us)
        self._drain(rank, one.mark)
        start = rank.now_us
        stalled = at_us - start > EPSILON_US
        rank.now_us = max(start, at_us)
        rank.last = self._event(
            rank,
            one.mark,
            Kind.WAIT,
            start,
            bytes=one.bytes,
            slot=one.slot,
            semaphore=one.semaphore,
            stall=one.stall if stalled else None,
            after=source if stalled else rank.last,
            source=source,
            took=tuple(took),
        )


def run(program: MachineProgram, target: Target, skew: Sequence[RankSkew] = ()) -> Run:
    """Simulates a machine program.

    Args:
      skew: one per rank, or empty when all ranks are alike.

    Raises:
      AssertionError: the program never ends; `mkc.schedule.verify` explains why one does not.
    """
    return Engines(program, target, skew).run()
