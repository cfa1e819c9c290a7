"""From the ids of finished rounds to events, up to the end of the output."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence
from typing import NamedTuple
from typing import Protocol

from mkc.runtime.text.channel_output import ChannelParser
from mkc.runtime.text.detokenizer import Detokenizer
from mkc.runtime.text.events import ContentDelta
from mkc.runtime.text.events import Event
from mkc.runtime.text.events import ReasoningDelta
from mkc.runtime.text.events import ToolArgumentsDelta
from mkc.runtime.text.stop import StopStrings
from mkc.runtime.text.tag_output import TagParser


class OutputUpdate(NamedTuple):
    """What the ids of one round mean.

    Attributes:
      events: new events; neighbours of a kind are one.
      used: how many of the ids belong to the output, the stopping one included.
      stopped_by: the stop id or stop string that has ended the output; None while it goes on.
    """

    events: tuple[Event, ...]
    used: int
    stopped_by: int | str | None = None


class Reader(Protocol):
    """Reads ids one at a time; `matched` is the stop string that has been found."""

    @property
    def matched(self) -> str | None: ...

    def read(self, token: int) -> list[Event]: ...

    def end(self) -> list[Event]: ...


class TextReader:
    """Ids to text, text up to a stop string, and what its tags mean."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings, parser: TagParser) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._parser = parser
        self.matched: str | None = None

    def read(self, token: int) -> list[Event]:
        return self._show(self._detokenizer.feed((token,)))

    def end(self) -> list[Event]:
        events = self._show(self._detokenizer.flush())
        events += self._parser.feed(self._stops.flush().text)
        return events + self._parser.end()

    def _show(self, delta: str) -> list[Event]:
        result = self._stops.feed(delta)
        self.matched = result.matched
        return self._parser.feed(result.text)


class ChannelReader:
    """What ids in channels mean, with stop strings found in thoughts and in content.

    Markup of this kind is no text, so a stop string can not be found in it, nor across it.
    """

    def __init__(
        self, parser: ChannelParser, stop_strings: Sequence[str], *, include_stop: bool
    ) -> None:
        self._parser = parser
        self._stop_strings = tuple(stop_strings)
        self._include_stop = include_stop
        self._stops = StopStrings(stop_strings, include=include_stop)
        self._kind: type[ReasoningDelta | ContentDelta] = ContentDelta
        self.matched: str | None = None

    def read(self, token: int) -> list[Event]:
        return self._cut(self._parser.feed((token,)))

    def end(self) -> list[Event]:
        return self._cut(self._parser.end()) + self._flush()

    def _cut(self, events: Sequence[Event]) -> list[Event]:
        """The events up to a stop string."""
        shown: list[Event] = []
        for one in events:
            if self.matched is not None:
                break
            if not isinstance(one, ReasoningDelta | ContentDelta):
                shown += [*self._flush(), one]
                continue
            if type(one) is not self._kind:
                shown += self._flush()
                self._kind = type(one)
            result = self._stops.feed(one.text)
            self.matched = result.matched
            shown += self._text(result.text)
        return shown

    def _flush(self) -> list[Event]:
        return self._text(self._stops.flush().text)

    def _text(self, text: str) -> list[Event]:
        return [self._kind(text=text)] if text else []


class OutputStream:
    """Follows the output of one request until something stops it."""

    def __init__(self, reader: Reader, *, stop_ids: Collection[int]) -> None:
        self._reader = reader
        self._stop_ids = frozenset(stop_ids)
        self._stopped_by: int | str | None = None

    def feed(self, ids: Sequence[int]) -> OutputUpdate:
        """Takes the ids of a round; those behind a stop are not used."""
        events: list[Event] = []
        used = 0
        for token in ids:
            if self._stopped_by is not None:
                break
            used += 1
            if token in self._stop_ids:
                self._stopped_by = token
            else:
                events += self._reader.read(token)
                self._stopped_by = self._reader.matched
            if self._stopped_by is not None:
                events += self._reader.end()
        return OutputUpdate(events=merged(events), used=used, stopped_by=self._stopped_by)

    def finish(self) -> tuple[Event, ...]:
        """The end of an output that nothing has stopped, such as at a limit of length."""
        return merged(self._reader.end()) if self._stopped_by is None else ()


def merged(events: Sequence[Event]) -> tuple[Event, ...]:
    """The events with neighbouring deltas of one text joined."""
    if len(events) < 2:  # as for most tokens
        return tuple(events)
    groups: list[list[Event]] = []
    for one in events:
        if groups and _same_text(groups[-1][0], one):
            groups[-1].append(one)
        else:
            groups.append([one])
    return tuple(_join(group) for group in groups)


def _same_text(first: Event, second: Event) -> bool:
    match first, second:
        case (ReasoningDelta(), ReasoningDelta()) | (ContentDelta(), ContentDelta()):
            return True
        case ToolArgumentsDelta(), ToolArgumentsDelta():
            return True  # calls do not overlap
    return False


def _join(group: Sequence[Event]) -> Event:
    match group[0]:
        case ReasoningDelta():
            return ReasoningDelta(text="".join(_texts(group)))
        case ContentDelta():
            return ContentDelta(text="".join(_texts(group)))
        case ToolArgumentsDelta():
            return ToolArgumentsDelta(index=group[0].index, text="".join(_texts(group)))
    return group[0]


def _texts(group: Sequence[Event]) -> list[str]:
    kinds = ReasoningDelta | ContentDelta | ToolArgumentsDelta
    return [one.text for one in group if isinstance(one, kinds)]
