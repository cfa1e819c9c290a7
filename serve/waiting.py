"""The queue in front of the slots: bounded, and fair between owners."""

from __future__ import annotations

from collections import OrderedDict
from collections import deque
from collections.abc import Callable


class FairQueue[T]:
    """First come, first served for one owner; owners take turns.

    Attributes:
      limit: most entries.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._length = 0
        self._by_owner: OrderedDict[str, deque[T]] = OrderedDict()  # whose turn it is comes first

    def __len__(self) -> int:
        return self._length

    def put(self, owner: str, entry: T) -> None:
        """Appends an entry; the caller has looked whether there is room."""
        self._by_owner.setdefault(owner, deque()).append(entry)
        self._length += 1

    def take(self) -> T:
        """The next entry; the queue must not be empty."""
        owner, entries = self._by_owner.popitem(last=False)
        entry = entries.popleft()
        if entries:
            self._by_owner[owner] = entries
        self._length -= 1
        return entry

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Takes out the entries for which `unwanted` holds."""
        removed: list[T] = []
        for owner, entries in list(self._by_owner.items()):
            removed += [one for one in entries if unwanted(one)]
            kept = deque(one for one in entries if not unwanted(one))
            if kept:
                self._by_owner[owner] = kept
            else:
                del self._by_owner[owner]
        self._length -= len(removed)
        return removed

    def clear(self) -> list[T]:
        """Takes out all entries."""
        return self.remove(lambda entry: True)
