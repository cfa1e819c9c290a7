"""Stop strings: found anywhere in a stream of text, and never shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mkc.errors import StopStringError
from mkc.runtime.text.matcher import Matcher


class StopResult(NamedTuple):
    """What may be shown after one delta.

    Attributes:
      text: shown text that is new.
      matched: the stop string that ended the stream, None while it goes on.
    """

    text: str
    matched: str | None = None


class StopStrings:
    """Cuts a stream of text at the first stop string.

    The stream ends at the earliest character that completes a stop string, whichever it is, so the
    outcome does not depend on how the text is divided into deltas. After that nothing is shown any
    more. `include` shows the stop string itself.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        if not all(strings):
            raise StopStringError(strings=strings)
        self._matcher = Matcher(strings)
        self._include = include
        self._matched: str | None = None

    def feed(self, delta: str) -> StopResult:
        """Takes the next text of the stream, and gives the text that no stop string can begin."""
        if self._matched is not None:
            return StopResult(text="", matched=self._matched)
        found = self._matcher.feed(delta)
        self._matched = found.pattern
        shown = found.before + (found.pattern or "" if self._include else "")
        return StopResult(text=shown, matched=found.pattern)

    def flush(self) -> StopResult:
        """The end of the stream: what was held back turned out to be no stop string."""
        return StopResult(text=self._matcher.flush(), matched=self._matched)
