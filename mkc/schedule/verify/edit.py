"""A change of a kernel's events, as an edit of its code would make it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable

from mkc.schedule.verify.events import Event

type Edit = Callable[[int, Event], Iterable[Event]]
"""From a rank and an event to the events that are executed in its place."""
