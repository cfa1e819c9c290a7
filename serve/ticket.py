"""Sequences on their way through the engine, as the event loop sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Callable
from collections.abc import Sequence
from contextlib import suppress

from mkc.errors import MkcError
from mkc.errors import RequestTimeoutError
from mkc.runtime.request import Delta
from mkc.runtime.request import Request

type Arrival = tuple[int, Delta] | MkcError  # of one sequence by its number, or the end of them all


class Ticket:
    """What one HTTP request has submitted.

    Belongs to the event loop in which it was made; the engine calls `arrive` there.

    Attributes:
      requests: its sequences.
      owner: whose turn it is when a slot becomes free.
      closed: nobody waits for it any more.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        *,
        owner: str,
        seconds: float | None,
        cancel: Callable[[Ticket], None],
    ) -> None:
        """
        Args:
          seconds: how long all of it may take, None for any time.
          cancel: called once when it is closed before its sequences have ended.
        """
        self.requests = tuple(requests)
        self.owner = owner
        self.closed = False
        self.loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._arrived: asyncio.Queue[Arrival] = asyncio.Queue()
        self._unfinished = len(self.requests)
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._expire)
        self._seconds = seconds

    def arrive(self, arrival: Arrival) -> None:
        """Takes what the engine has to say."""
        self._arrived.put_nowait(arrival)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What is new, with the number of its sequence, until all sequences have ended.

        Raises:
          MkcError: a sequence ended with an error, the engine failed, or time is up; what is left
            is cancelled.
        """
        try:
            while self._unfinished:
                arrival = await self._arrived.get()
                if isinstance(arrival, MkcError):
                    raise arrival
                finish = arrival[1].finish
                self._unfinished -= finish is not None
                if finish is not None and finish.error is not None:
                    raise finish.error
                yield arrival
        finally:
            self.close()

    def close(self) -> None:
        """Cancels what has not ended. Calling it again does nothing."""
        if not self.closed:
            self.closed = True
            if self._timer is not None:
                self._timer.cancel()
            if self._unfinished:
                self._cancel(self)

    def _expire(self) -> None:
        assert self._seconds is not None
        self.arrive(RequestTimeoutError(seconds=self._seconds, what="the request"))


def deliver(arrivals: Sequence[tuple[Ticket, Arrival]]) -> None:
    """Brings what a turn of the engine has produced, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Arrival]]] = {}
    for one in arrivals:
        by_loop.setdefault(one[0].loop, []).append(one)
    for loop, group in by_loop.items():
        with suppress(RuntimeError):  # the loop has been closed, and nobody waits
            loop.call_soon_threadsafe(_arrive, group)


def _arrive(group: Sequence[tuple[Ticket, Arrival]]) -> None:
    for ticket, arrival in group:
        ticket.arrive(arrival)
