"""Output in channels: thoughts, content and tool calls in a stream of ids."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from re import compile as compile_pattern

from mkc.runtime.text.arguments import ArgumentWriter
from mkc.runtime.text.events import ContentDelta
from mkc.runtime.text.events import Event
from mkc.runtime.text.events import ReasoningDelta
from mkc.runtime.text.events import ToolArgumentsDelta
from mkc.runtime.text.events import ToolCallBegin
from mkc.runtime.text.events import ToolCallEnd
from mkc.runtime.text.formats import ChannelFormat
from mkc.runtime.text.tokenizer import Tokenizer
from mkc.runtime.text.trim import Trim

ATTRIBUTE = compile_pattern(r'([^\s="]+)="([^"]*)"')
# A marker with attributes is a line; what is longer is not one, and must not be held back.
LONGEST_HEADER = 4096


class ChannelParser:
    """Parses a stream of ids; how it is divided makes no difference.

    A marker is a delimiter, a name that means something at this place, and a separator. Delimiters
    in any other sequence are text: a thought may quote them, an argument may contain them.
    """

    def __init__(
        self, channels: ChannelFormat, tokenizer: Tokenizer, *, channel: str | None
    ) -> None:
        """
        Args:
          channels: the format.
          tokenizer: says the bytes and the delimiters.
          channel: the channel that the prompt has opened; None when it opened only the message.
        """
        self._names = channels.names
        self._channels = channels.channels
        self._order = list(vars(channels.channels).values())
        self._tokenizer = tokenizer
        ids = tokenizer.special_tokens
        self._open = ids[channels.markers.open]
        self._close = ids[channels.markers.close]
        self._separator = ids[channels.markers.separator]
        self._end_of_message = ids[channels.markers.end_of_message]
        self._path = [channel] if channel is not None else []
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._delimiter: int | None = None  # of a marker that may be beginning
        self._header = b""
        self._between = Trim()
        self._calls = 0
        self._writer = ArgumentWriter({})
        self._has_raw_arguments = False
        self._events: list[Event] = []

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """What the next ids of the stream mean."""
        for token in ids:
            self._take(token)
        return self._taken()

    def end(self) -> list[Event]:
        """The end of the output: a marker cut off is none, and an open call is incomplete."""
        self._delimiter = None
        self._text_end()
        self._end_call(complete=False)
        return self._taken()

    def _take(self, token: int) -> None:
        if self._delimiter is not None:
            self._take_header(token)
        elif token in (self._open, self._close):
            self._delimiter = token
            self._header = b""
        elif token == self._end_of_message:
            self._text_end()
            self._end_call(complete=False)
            self._path = []
        elif token not in self._tokenizer.hidden_ids:
            self._text(self._tokenizer.token_bytes(token))

    def _take_header(self, token: int) -> None:
        """Reads a marker on, or finds out that it is none."""
        assert self._delimiter is not None
        if token == self._separator and self._is_marker():
            header, is_open = self._header.decode("utf-8", "replace"), self._delimiter == self._open
            self._delimiter = None
            self._text_end()
            self._enter(header) if is_open else self._leave(header)
            return
        if token not in self._tokenizer.special_ids:
            self._header += self._tokenizer.token_bytes(token)
            if self._may_be_marker():
                return
            self._no_marker()
            return
        self._no_marker()
        self._take(token)

    def _no_marker(self) -> None:
        """What looked like a marker is text."""
        assert self._delimiter is not None
        raw = self._tokenizer.token_bytes(self._delimiter) + self._header
        self._delimiter = None
        if not self._path or self._path[-1] not in (self._channels.tools, self._names.call):
            self._text(raw)

    def _expected(self) -> list[bytes]:
        """Names that may follow the delimiter at this place."""
        here = self._path[-1] if self._path else None
        is_raw = here in (self._names.argument, self._names.raw_arguments)
        if self._delimiter == self._close:
            own = [] if here is None else [here]
            return [name.encode() for name in own + ([] if is_raw else [self._names.message])]
        if is_raw:
            return []
        if here == self._names.call:
            return [self._names.argument.encode(), self._names.raw_arguments.encode()]
        if here == self._channels.tools:
            return [self._names.call.encode()]
        # A channel that a later one follows without having been closed is closed by it.
        later = self._order if here is None else self._order[self._order.index(here) + 1 :]
        return [name.encode() for name in later]

    def _is_marker(self) -> bool:
        return any(self._fits(name) for name in self._expected())

    def _may_be_marker(self) -> bool:
        if len(self._header) > LONGEST_HEADER:
            return False
        names = self._expected()
        return any(self._fits(name) or name.startswith(self._header) for name in names)

    def _fits(self, name: bytes) -> bool:
        has_attributes = self._delimiter == self._open and self._header.startswith(name + b" ")
        return self._header == name or has_attributes

    def _enter(self, header: str) -> None:
        name = header.split(" ", 1)[0]
        attributes = {key: unescaped(value) for key, value in ATTRIBUTE.findall(header)}
        if name in self._order:
            self._path = [name]
            return
        self._path.append(name)
        if name == self._names.call:
            self._writer = ArgumentWriter({})
            tool = attributes.get(self._names.tool, "")
            self._events.append(ToolCallBegin(index=self._calls, name=tool))
        elif name == self._names.argument:
            kind = attributes.get(self._names.type, "string")
            self._argue(self._writer.begin(attributes.get(self._names.key, ""), (kind,)))

    def _leave(self, name: str) -> None:
        if name == self._names.message:
            self._end_call(complete=False)
            self._path = []
            return
        inside = self._path.pop()
        if inside == self._names.argument:
            self._argue(self._writer.end())
        elif inside == self._names.call:
            self._path.append(inside)
            self._end_call(complete=True)

    def _end_call(self, *, complete: bool) -> None:
        """Ends the call that the path is in, if it is in one."""
        if self._names.call not in self._path:
            return
        if complete and not self._has_raw_arguments:
            self._argue(self._writer.close())
        self._events.append(ToolCallEnd(index=self._calls, complete=complete))
        self._calls += 1
        self._path = [self._channels.tools]
        self._has_raw_arguments = False

    def _text(self, raw: bytes) -> None:
        self._say(self._decoder.decode(raw))

    def _text_end(self) -> None:
        """A marker ends a text, also inside a character."""
        self._say(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._between = Trim()

    def _say(self, text: str) -> None:
        """Text of the innermost element."""
        if not text:
            return
        here = self._path[-1] if self._path else None
        if here == self._channels.reasoning:
            self._events.append(ReasoningDelta(text=text))
        elif here == self._channels.content:
            self._events.append(ContentDelta(text=text))
        elif here == self._names.argument:
            self._argue(self._writer.add(text))
        elif here == self._names.raw_arguments:
            self._has_raw_arguments = True
            self._argue(text)
        elif here is None:
            stray = self._between.feed(text)
            if stray:
                self._events.append(ContentDelta(text=stray))

    def _argue(self, text: str) -> None:
        if text:
            self._events.append(ToolArgumentsDelta(index=self._calls, text=text))

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def unescaped(value: str) -> str:
    """An attribute value as it was meant; the inverse of `escaped`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")
