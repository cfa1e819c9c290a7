"""Finding strings in a stream of text that arrives in pieces of any size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Found(NamedTuple):  # made for every token, which takes a dataclass three times as long
    """What one piece of the stream decided.

    Attributes:
      before: text that certainly stands before any pattern; never a part of one.
      pattern: the pattern that was completed, None when the piece ran out first.
      end: how many characters of the piece were read.
    """

    before: str
    pattern: str | None
    end: int


class Matcher:
    """Finds whichever of some patterns is completed first, in linear time.

    Each pattern is followed by the automaton of Knuth, Morris and Pratt, so a character costs a
    constant number of steps per pattern on average, however the text is divided. Text is held back
    only while it is the beginning of a pattern. When two patterns end at the same character, the
    longer one counts.

    Attributes:
      work: automaton steps so far; tests assert on it instead of on time.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        assert all(patterns), "a pattern of no characters is everywhere"
        self._patterns = tuple(sorted(set(patterns), key=lambda one: (-len(one), one)))
        self._fallbacks = tuple(_fallbacks(one) for one in self._patterns)
        self._lengths = [0] * len(self._patterns)
        self._held = ""
        self.work = 0

    def feed(self, text: str, begin: int = 0) -> Found:
        """Reads `text[begin:]` up to the end of the first pattern in it."""
        if not self._patterns:
            return Found(before=text[begin:], pattern=None, end=len(text))
        for place in range(begin, len(text)):
            pattern = self._step(text[place])
            if pattern is not None:
                seen = self._held + text[begin : place + 1]
                self._reset()
                return Found(before=seen[: -len(pattern)], pattern=pattern, end=place + 1)
        seen = self._held + text[begin:]
        keep = max(self._lengths, default=0)
        self._held = seen[len(seen) - keep :]
        return Found(before=seen[: len(seen) - keep], pattern=None, end=len(text))

    def flush(self) -> str:
        """The text held back, once the stream has ended."""
        held = self._held
        self._reset()
        return held

    def _step(self, character: str) -> str | None:
        completed = None
        for index, pattern in enumerate(self._patterns):
            length = self._lengths[index]
            fallback = self._fallbacks[index]
            while length and pattern[length] != character:
                length = fallback[length - 1]
                self.work += 1
            if pattern[length] == character:
                length += 1
            self.work += 1
            if length == len(pattern):
                completed = completed or pattern  # sorted: the longest comes first
            self._lengths[index] = length
        return completed

    def _reset(self) -> None:
        self._lengths = [0] * len(self._patterns)
        self._held = ""


def _fallbacks(pattern: str) -> list[int]:
    """For each prefix of the pattern: how long a proper prefix of it is also its suffix."""
    table = [0] * len(pattern)
    length = 0
    for place in range(1, len(pattern)):
        while length and pattern[place] != pattern[length]:
            length = table[length - 1]
        if pattern[place] == pattern[length]:
            length += 1
        table[place] = length
    return table
