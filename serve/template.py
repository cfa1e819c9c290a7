"""Events of a stream that differ in one text only: what the rest of them is, is written once."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Hashable

from pydantic_core import to_json

PLACE = "\ue000text\ue000"  # stands for the text; these characters are nobody's


class EventTemplates:
    """Makes events of texts. The first event of a kind is written in full, with a mark in it."""

    def __init__(self) -> None:
        self._parts: dict[Hashable, list[bytes]] = {}

    def event(self, kind: Hashable, text: str, write: Callable[[str], bytes]) -> bytes:
        """The event that `write` makes of a text.

        Args:
          kind: events of a kind differ in nothing but the text.
          write: puts the text into JSON, as one whole string or several.
        """
        parts = self._parts.get(kind)
        if parts is None:
            parts = self._parts[kind] = write(PLACE).split(to_json(PLACE))
            assert len(parts) > 1, "the text is not in the event"
        return to_json(text).join(parts)
