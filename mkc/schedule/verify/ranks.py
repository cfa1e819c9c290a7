"""The exchanges of all ranks together: matching, order and progress.

Ranks run their events in order and meet only through semaphores, so one schedule decides whether
all schedules come to an end. What is ordered, is ordered in every schedule: each rank keeps a
vector clock, its own event number and what it knows of the others'. It learns from a message when
it has waited for it, and from a meeting. Two accesses are safe when the later one's clock knows the
earlier one.

Which message a wait has counted is decided by number: the n-th messages of all senders to one
semaphore belong together, and the wait that completes them has seen them all. This is right if no
rank can send its next message to that semaphore before that wait (V603). Suppose some execution
breaks it: up to the first wait that counts a message too early every clock is right, so the message
was sent after that wait, which is a contradiction.

In a meeting all ranks signal all others and wait for as many signals. A fast rank may signal for
the next meeting early, and may be counted in place of a slow one, but it got past the meeting
before only because the slow one had entered it. So whoever leaves a meeting knows that all have
entered it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field

from mkc.schedule.verify.arrays import Array
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Meet
from mkc.schedule.verify.events import Place
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Receive
from mkc.schedule.verify.events import Semaphore
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Signal
from mkc.schedule.verify.events import Write
from mkc.schedule.verify.memory import Report
from mkc.schedule.verify.memory import semaphore_name

type Clock = list[int]
type Block = tuple[str, tuple[int, ...]]
"""An array and an index: one rank's place in a receive buffer."""


@dataclass(kw_only=True, eq=False)
class Message:
    """Attributes:
    block: where it goes, in the receiver's memory.
    number: how many the sender has sent to this semaphore before.
    clock: what the sender knew.
    landed: the receiver's time at the wait that has seen it, None before.
    """

    sender: int
    source: Place
    block: Block
    number: int
    size: int
    clock: Clock
    landed: int | None = None


@dataclass(kw_only=True)
class Mailbox:
    """One receive semaphore of one rank.

    Attributes:
      totals: bytes of all messages up to the n-th ones of all senders.
      arrived: messages so far, by number.
      closed: the receiver's time when it had seen the n-th messages.
      waited: bytes waited for so far.
    """

    totals: list[int]
    arrived: list[list[Message]]
    senders: list[set[int]]
    closed: list[int] = field(default_factory=list)
    waited: int = 0

    def group(self, size: int) -> int | None:
        """The number of the messages among which the wait for byte `size` ends."""
        number = bisect_left(self.totals, size)
        return number if number < len(self.totals) else None

    def missing(self, size: int) -> set[int]:
        """Ranks without whose message a wait up to byte `size` does not end."""
        number = self.group(size)
        if number is None:
            return set()
        before = self.totals[number - 1] if number else 0
        for earlier in range(len(self.closed), number):  # the wait for closed ones had all of them
            absent = self.senders[earlier] - {one.sender for one in self.arrived[earlier]}
            if absent:
                return absent
        found = sum(one.size for one in self.arrived[number])
        if before + found >= size:
            return set()
        return self.senders[number] - {one.sender for one in self.arrived[number]}


@dataclass(kw_only=True)
class Rank:
    """Attributes:
    next: index of the next event.
    meetings: what the rank knew when it entered each meeting.
    signals: peers signalled since the last meeting.
    signalled: signals that others have sent to this rank.
    met: signals waited for.
    """

    number: int
    events: Sequence[Event]
    arrays: Mapping[str, Array]
    clock: Clock
    next: int = 0
    meetings: list[Clock] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    left: int = 0
    signalled: int = 0
    met: int = 0
    touched: dict[Block, int] = field(default_factory=dict)  # own time of the last access
    coming: dict[Block, list[Message]] = field(default_factory=dict)  # not seen yet
    holds: dict[Block, tuple[int, Place | None]] = field(
        default_factory=dict
    )  # whose, what; unread

    @property
    def ended(self) -> bool:
        return self.next == len(self.events)

    @property
    def now(self) -> int:
        return self.clock[self.number]


class Ranks:
    """Plays all ranks; problems go to `report`."""

    def __init__(
        self,
        events: Sequence[Sequence[Event]],
        arrays: Sequence[Mapping[str, Array]],
        report: Report,
    ) -> None:
        count = len(events)
        self.report = report
        self.ranks = [
            Rank(
                number=number,
                events=one,
                arrays=arrays[number],
                # everybody knows of itself that it has entered the kernel
                clock=[1 if other == number else 0 for other in range(count)],
            )
            for number, one in enumerate(events)
        ]
        self.mailboxes = _mailboxes(self.ranks)
        self.sent: dict[tuple[int, int, Semaphore], int] = {}

    def run(self) -> None:
        moving = True
        while moving:
            moving = False
            for rank in self.ranks:
                while not rank.ended and self.step(rank):
                    moving = True
        stuck = [rank for rank in self.ranks if not rank.ended]
        if stuck:
            self.report("V701", stuck[0].events[stuck[0].next].phase, self.witness(stuck[0]))
        else:
            self.leftovers()

    def step(self, rank: Rank) -> bool:
        """Executes the next event; False when it has to wait."""
        event = rank.events[rank.next]
        if self.blockers(rank, event):
            return False
        rank.clock[rank.number] += 1
        rank.next += 1
        match event:
            case Send():
                self.send(rank, event)
            case Receive():
                self.receive(rank, event)
            case Signal():
                self.signal(rank, event)
            case Meet():
                self.meet(rank, event)
            case Read():
                self.read(rank, event)
            case Write():
                self.write(rank, event)
        return True

    # waiting

    def blockers(self, rank: Rank, event: Event) -> set[int]:
        """Ranks that must do something first; all others when nobody ever does it."""
        if isinstance(event, Receive):
            box = self.mailboxes.get((rank.number, event.semaphore))
            if box is None or box.group(box.waited + event.size) is None:
                return self.others(rank)
            return box.missing(box.waited + event.size)
        if isinstance(event, Meet) and rank.signalled < rank.met + event.count:
            others, meeting = self.others(rank), rank.left
            return {one for one in others if len(self.ranks[one].meetings) <= meeting} or others
        return set()

    def others(self, rank: Rank) -> set[int]:
        return {one.number for one in self.ranks} - {rank.number}

    def witness(self, rank: Rank) -> str:
        """Who waits for whom, from a rank to the first one that occurs again or has ended."""
        path = []
        seen: set[int] = set()
        while rank.number not in seen and not rank.ended:
            seen.add(rank.number)
            event = rank.events[rank.next]
            blockers = self.blockers(rank, event)
            other = self.ranks[min(blockers - seen or blockers)]
            what = "meets" if isinstance(event, Meet) else "waits for a message"
            path.append(f"rank {rank.number} {what} in {event.phase} for rank {other.number}")
            rank = other
        if rank.ended:
            path.append(f"rank {rank.number} has ended")
        return "; ".join(path)

    # events

    def send(self, rank: Rank, event: Send) -> None:
        key = (event.peer, event.received)
        if not 0 <= event.peer < len(self.ranks) or event.peer == rank.number:
            text = f"rank {rank.number} sends to rank {event.peer} of {len(self.ranks)}"
            self.report("V605", event.phase, text)
            return
        peer = self.ranks[event.peer]
        box = self.mailboxes[key]
        number = self.sent.get((rank.number, *key), 0)
        self.sent[rank.number, *key] = number + 1
        size = _size(rank.arrays, event.source)
        message = Message(
            sender=rank.number,
            source=event.source,
            block=_block(event.target),
            number=number,
            size=size,
            clock=list(rank.clock),
        )
        box.arrived[number].append(message)
        for code, text in self.send_problems(rank, peer, event, message, box):
            self.report(code, event.phase, f"rank {rank.number} to rank {peer.number}: {text}")
        peer.coming.setdefault(message.block, []).append(message)

    def send_problems(
        self, rank: Rank, peer: Rank, event: Send, message: Message, box: Mailbox
    ) -> Iterator[tuple[str, str]]:
        known = rank.clock[peer.number]
        array = peer.arrays.get(event.target.array)
        if array is None or not array.has(event.target):
            yield "V605", f"{event.target} is not in the receiver's memory"
        elif _size(peer.arrays, event.target) != message.size:
            room = _size(peer.arrays, event.target)
            yield "V605", f"{message.size} bytes of {event.source} are sent to {room} bytes"
        if known < 1:
            yield "V601", "the receiver may not have entered the kernel yet"
        number = message.number
        if number > 0 and not (len(box.closed) >= number and box.closed[number - 1] <= known):
            name = semaphore_name(event.received)
            yield "V603", f"the wait at {name} for the message before may count this one"
        earlier = peer.coming.get(message.block, ())
        if earlier or peer.touched.get(message.block, 0) > known:
            yield "V602", f"{event.target} may still be in use when the message arrives"

    def receive(self, rank: Rank, event: Receive) -> None:
        box = self.mailboxes[rank.number, event.semaphore]
        box.waited += event.size
        while len(box.closed) < len(box.totals) and box.totals[len(box.closed)] <= box.waited:
            group = box.arrived[len(box.closed)]
            box.closed.append(rank.now)
            for message in group:
                message.landed = rank.now
                rank.coming[message.block].remove(message)
                rank.holds[message.block] = (message.sender, message.source)
            clocks = [message.clock for message in group]
            rank.clock[:] = map(max, rank.clock, *clocks) if clocks else rank.clock

    def signal(self, rank: Rank, event: Signal) -> None:
        if not rank.signals:
            rank.meetings.append(list(rank.clock))
        rank.signals.append(event.peer)
        if 0 <= event.peer < len(self.ranks):
            self.ranks[event.peer].signalled += 1

    def meet(self, rank: Rank, event: Meet) -> None:
        others = [one.number for one in self.ranks if one is not rank]
        if sorted(rank.signals) != others or event.count != len(others):
            message = f"rank {rank.number} signals {rank.signals} and waits for {event.count}"
            self.report("V607", event.phase, message)
        rank.signals.clear()
        rank.met += event.count
        for other in others:
            entered = self.ranks[other].meetings
            if len(entered) > rank.left:
                rank.clock[:] = map(max, rank.clock, entered[rank.left])
            else:
                message = f"rank {rank.number} leaves a meeting that rank {other} has not entered"
                self.report("V607", event.phase, message)
        rank.left += 1

    def read(self, rank: Rank, event: Read) -> None:
        block = _block(event.place)
        rank.touched[block] = rank.now
        problem = self.read_problem(rank, event, block)
        if problem:
            self.report("V606", event.phase, f"rank {rank.number} reads {event.place}: {problem}")
        rank.holds.pop(block, None)

    def read_problem(self, rank: Rank, event: Read, block: Block) -> str | None:
        if rank.coming.get(block):
            sender = rank.coming[block][0].sender
            return f"the message of rank {sender} has not been waited for"
        if block not in rank.holds:
            return "no message has come since it was read last"
        sender, source = rank.holds[block]
        wanted = event.place.index[0] if event.sender is None else event.sender
        if event.data is not None and (sender, source) != (wanted, event.data):
            return f"it holds {source} of rank {sender}, not {event.data}"
        return None

    def write(self, rank: Rank, event: Write) -> None:
        block = _block(event.place)
        rank.touched[block] = rank.now
        if rank.coming.get(block):
            message = f"rank {rank.number} writes {event.place}, where a message is coming in"
            self.report("V602", event.phase, message)
        rank.holds[block] = (rank.number, event.data)

    def leftovers(self) -> None:
        for (number, semaphore), box in self.mailboxes.items():
            total = sum(one.size for group in box.arrived for one in group)
            if total != box.waited:
                message = (
                    f"rank {number} is sent {total} bytes at {semaphore_name(semaphore)} and waits "
                    f"for {box.waited}; the semaphore is not zero at the end"
                )
                self.report("V604", semaphore[0], message)
        for rank in self.ranks:
            if rank.signalled != rank.met:
                message = f"rank {rank.number} gets {rank.signalled} signals, waits for {rank.met}"
                self.report("V607", "end", message)


def _mailboxes(ranks: Sequence[Rank]) -> dict[tuple[int, Semaphore], Mailbox]:
    """The receive semaphores, with the messages that will come."""
    numbers: dict[tuple[int, Semaphore], dict[int, list[int]]] = {}
    for rank in ranks:
        for event in rank.events:
            if isinstance(event, Send):
                box = numbers.setdefault((event.peer, event.received), {})
                box.setdefault(rank.number, []).append(_size(rank.arrays, event.source))
    found = {}
    for key, senders in numbers.items():
        most = max(map(len, senders.values()))
        totals: list[int] = []
        groups: list[set[int]] = []
        for number in range(most):
            sizes = {who: one[number] for who, one in senders.items() if len(one) > number}
            totals.append(sum(sizes.values()) + (totals[-1] if totals else 0))
            groups.append(set(sizes))
        found[key] = Mailbox(totals=totals, arrived=[[] for _ in totals], senders=groups)
    return found


def _block(place: Place) -> Block:
    return place.array, place.index


def _size(arrays: Mapping[str, Array], place: Place) -> int:
    array = arrays.get(place.array)
    return place.count * array.unit_bytes if array else 0
