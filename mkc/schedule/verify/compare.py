"""A traced kernel beside what the verifier says of its program, and by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import replace

from mkc.schedule.program import Program
from mkc.schedule.verify.arrays import arrays_of
from mkc.schedule.verify.arrays import receive_arrays
from mkc.schedule.verify.arrays import semaphores_of
from mkc.schedule.verify.case import Case
from mkc.schedule.verify.events import Event
from mkc.schedule.verify.events import Index
from mkc.schedule.verify.events import Meet
from mkc.schedule.verify.events import Read
from mkc.schedule.verify.events import Receive
from mkc.schedule.verify.events import Rest
from mkc.schedule.verify.events import Send
from mkc.schedule.verify.events import Signal
from mkc.schedule.verify.events import Write
from mkc.schedule.verify.issue import CODES
from mkc.schedule.verify.issue import Issue
from mkc.schedule.verify.memory import Memory
from mkc.schedule.verify.proof import MOST_ISSUES
from mkc.schedule.verify.protocol import Kernel
from mkc.schedule.verify.ranks import Ranks

type Spans = dict[tuple[str, Index], list[tuple[int, int]]]
"""Per block of an array the parts of it, joined where they touch."""


class Recorder:
    """Keeps the events of a kernel."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)

    def enter(self, loop: str, count: int) -> None:
        """Every iteration is executed."""

    def border(self, index: int) -> int:
        return 0

    def leave(self) -> None:
        """Nothing to note."""

    def problem(self, code: str, phase: str, message: str) -> None:
        """The proof tells it."""


def expected_events(program: Program, rank: int, case: Case) -> list[Event]:
    """What the verifier says a rank does, every iteration of it."""
    recorder = Recorder()
    Kernel(program=program, rank=rank, case=case, sink=recorder).run()
    return recorder.events


def difference(expected: Sequence[Event], found: Sequence[Event]) -> str | None:
    """The first thing in which a traced kernel differs; None when it does what is expected.

    Copies, waits, sends, signals and meetings must be the same, one by one. Between two of them the
    same places must be written, and nothing else read.
    """
    orders, others = _orders(expected), _orders(found)
    for number, (one, other) in enumerate(zip(orders, others, strict=False)):
        if one != replace(other, phase=one.phase, routine=one.routine):
            return f"event {number}, in {one.phase}: expected {_text(one)}, found {_text(other)}"
    if len(orders) != len(others):
        return f"{len(orders)} copies and waits expected, {len(others)} found"
    for number, (said, done) in enumerate(
        zip(_accesses(expected, Write), _accesses(found, Write), strict=True)
    ):
        if said != done:
            return f"before event {number}: expected writes to {_places(said)}, not {_places(done)}"
    for number, (said, done) in enumerate(
        zip(_accesses(expected, Read), _accesses(found, Read), strict=True)
    ):
        if not _inside(done, said):
            return f"before event {number}: expected reads of {_places(said)}, not {_places(done)}"
    return None


def _orders(events: Iterable[Event]) -> list[Event]:
    return [one for one in events if not isinstance(one, Read | Write)]


def _text(event: Event) -> str:
    names = [name for name in event.__dataclass_fields__ if name not in ("phase", "routine")]
    return f"{type(event).__name__} " + ", ".join(
        f"{name} {getattr(event, name)}" for name in names
    )


def _places(spans: Spans) -> str:
    return ", ".join(f"{array}{list(index)} {parts}" for (array, index), parts in spans.items())


def _accesses(events: Iterable[Event], kind: type[Read] | type[Write]) -> list[Spans]:
    gaps: list[Spans] = [{}]
    for event in events:
        if isinstance(event, kind) and not isinstance(event, Rest):
            place = event.place
            spans = gaps[-1].setdefault((place.array, place.index), [])
            spans.append((place.first, place.first + place.count))
        elif not isinstance(event, Read | Write):
            gaps.append({})
    return [{block: _joined(spans) for block, spans in gap.items()} for gap in gaps]


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, end in sorted(set(spans)):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found


def _inside(some: Spans, others: Spans) -> bool:
    """Every part of `some` lies in a part of `others`."""
    return all(
        any(a <= first and end <= b for a, b in others.get(block, ()))
        for block, spans in some.items()
        for first, end in spans
    )


def check_traced(program: Program, events: Sequence[Sequence[Event]]) -> list[Issue]:
    """What can be said of a kernel whose order is not the planned one: the events of every rank, or
    of one rank alone, whose messages are then left out.

    Copies, waits, slots, messages and progress are checked as in a proof. What a reader expects to
    find is not known, so order mistakes that move the right bytes to the wrong place stay unseen.

    Returns:
      At most `MOST_ISSUES`: one for each code and array, which says how many more there are.
    """
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}  # phases and messages
    receive, arrays = receive_arrays(program), arrays_of(program)
    names = sorted([*arrays, *semaphores_of(program)], key=len, reverse=True)
    array = re.compile("|".join(rf"\b{re.escape(one)}\b" for one in names))

    def report(code: str, phase: str, message: str) -> None:
        named = array.search(message)
        alike = found.setdefault((code, named.group() if named else ""), [])
        if (phase, message) not in alike:
            alike.append((phase, message))

    for one in events:
        memory = Memory(
            arrays=arrays, semaphores=semaphores_of(program), elsewhere=receive, report=report
        )
        for event in one:
            memory.event(event)
        memory.end()
    if len(events) > 1:
        talks = [_talk(one, receive) for one in events]
        Ranks(talks, [arrays] * len(events), report).run()
    return [_issue(code, alike) for (code, _), alike in found.items()][:MOST_ISSUES]


def _issue(code: str, alike: Sequence[tuple[str, str]]) -> Issue:
    """The first of several, and how many follow."""
    (phase, message), *others = alike
    more = f" (and {len(others)} more)" if others else ""
    return Issue(code=code, message=message + more, where=phase, hint=CODES[code].hint)


def _talk(events: Iterable[Event], receive: frozenset[str]) -> list[Event]:
    """The events that other ranks have to do with, reads of one message as one.

    A kernel may read the parts of a block one by one. As long as the rank sends, receives and
    signals nothing in between, no rank can learn that it has read one part and not the others.
    """
    talk: list[Event] = []
    read: set[tuple[str, Index]] = set()
    for event in events:
        if isinstance(event, Read | Write):
            block = (event.place.array, event.place.index)
            if block[0] not in receive or (isinstance(event, Read) and block in read):
                continue
            if isinstance(event, Read):
                read.add(block)
            else:
                read.discard(block)
        elif isinstance(event, Send | Receive | Signal | Meet):
            read.clear()
        else:
            continue
        talk.append(event)
    return talk
