"""Arrows from the start of a copy or message over it to the wait that takes its bytes.

A message has two of them: to the wait for its arrival, which is the receiver's, and to the wait
until it has left, the sender's. Of an arrow whose start or wait lies outside the step the rest is
shown: it begins, or ends, at the copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field

from mkc.schedule.simulate.events import Event
from mkc.schedule.simulate.events import Kind

MOVED = frozenset((Kind.COPY, Kind.MESSAGE))


@dataclass(kw_only=True)
class Arrows:
    """What arrows have to do with an event.

    Attributes:
      passing: numbers of arrows that begin or pass here.
      ending: numbers of arrows that end here.
      started: of a copy or message: its start is shown.
      awaited: of a copy or message: id of the wait for its arrival, -1 when none is shown.
      earlier: of a wait: how many it took that are not shown, because they came before the step.
    """

    passing: list[int] = field(default_factory=list)
    ending: list[int] = field(default_factory=list)
    started: bool = False
    awaited: int = -1
    earlier: int = 0


def arrows_of(events: Iterable[Event]) -> dict[int, Arrows]:
    """Event id -> its arrows, for the events that have any."""
    known = {one.id: one for one in events if one.end_us > one.start_us}
    moved = {id: one for id, one in known.items() if one.kind in MOVED}
    arrows = {id: Arrows() for id in moved}
    for id, one in moved.items():
        if one.source in known:
            arrows[id].started = True
            arrows[one.source] = Arrows()
    for one in events:
        if one.kind is Kind.WAIT and one.took:
            arrows[one.id] = _at_wait(one, moved, arrows)
    for id, one in moved.items():
        if arrows[id].awaited < 0 and arrows[id].started:
            arrows[one.source].passing.append(_number(id))
            arrows[id].ending.append(_number(id))
    return arrows


def _number(id: int, *, sent: bool = False) -> int:
    """Of the arrow of a copy or message; none has the number 0."""
    return 2 * id + (2 if sent else 1)


def _at_wait(wait: Event, moved: dict[int, Event], arrows: dict[int, Arrows]) -> Arrows:
    """Ends the arrows of all that a wait took."""
    own = Arrows()
    for id in wait.took:
        if id not in moved:
            own.earlier += 1
            continue
        arrived = moved[id].semaphore == wait.semaphore
        if arrived:
            arrows[id].awaited = wait.id
        number = _number(id, sent=not arrived)
        own.ending.append(number)
        arrows[id].passing.append(number)
        if arrows[id].started:
            arrows[moved[id].source].passing.append(number)
    return own
