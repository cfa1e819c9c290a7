"""White space around a stream of text."""

from __future__ import annotations


class Trim:
    """Drops certain characters from the beginning of a stream, and holds them back at its end.

    Held back, because only what follows tells whether they are the end: the caller drops them when
    markup follows. Linear however long the run is, since pieces are joined once.
    """

    def __init__(self, characters: str | None = None, *, lead: bool = True) -> None:
        """
        Args:
          characters: which ones; None for all white space.
          lead: whether they are dropped at the beginning too.
        """
        self._characters = characters
        self._at_begin = lead
        self._held: list[str] = []

    def feed(self, text: str) -> str:
        """The text that is certainly inside the stream."""
        if self._at_begin:
            text = text.lstrip(self._characters)
        kept = text.rstrip(self._characters)
        if not kept:
            self._held.append(text)
            return ""
        self._at_begin = False
        shown = "".join(self._held) + kept
        self._held = [text[len(kept) :]]
        return shown

    def flush(self) -> str:
        """What was held back, when it is to be shown after all."""
        held = "".join(self._held)
        self._held = []
        return held
