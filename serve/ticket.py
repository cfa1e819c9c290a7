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
from mkc.runtime.text.output import merged

type Arrival = tuple[int, Delta] | MkcError  # of one sequence by its number, or the end of them all

MOST_APART = 64  # deltas of one sequence that wait for a slow client before they are joined


class Ticket:
    """What one HTTP request has submitted.

    Belongs to the event loop in which it was made; the engine calls `arrive` there. What a slow
    client has not taken yet is joined, so what waits is no larger than the output itself.

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
        self._pending: dict[int, list[Delta]] = {}  # by sequence, in order of their arrival
        self._error: MkcError | None = None
        self._arrived = asyncio.Event()
        self._unfinished = len(self.requests)
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._expire)
        self._seconds = seconds

    def arrive(self, arrival: Arrival) -> None:
        """Takes what the engine has to say."""
        if isinstance(arrival, MkcError):
            self._error = self._error or arrival
        elif not self.closed:
            index, delta = arrival
            waiting = self._pending.setdefault(index, [])
            waiting.append(delta)
            if len(waiting) == MOST_APART:
                self._pending[index] = [joined_delta(waiting)]
        self._arrived.set()

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What is new, with the number of its sequence, until all sequences have ended.

        Deltas of a sequence that have arrived since the last look are one.

        Raises:
          MkcError: a sequence ended with an error, the engine failed, or time is up; what is left
            is cancelled.
        """
        try:
            while self._unfinished:
                await self._arrived.wait()
                self._arrived.clear()
                pending, self._pending = self._pending, {}
                for index, waiting in pending.items():
                    delta = waiting[0] if len(waiting) == 1 else joined_delta(waiting)
                    finish = delta.finish
                    self._unfinished -= finish is not None
                    if finish is not None and finish.error is not None:
                        raise finish.error
                    yield index, delta
                if self._error is not None and self._unfinished:
                    raise self._error
        finally:
            self.close()

    def close(self) -> None:
        """Cancels what has not ended. Calling it again does nothing."""
        if not self.closed:
            self.closed = True
            self._pending.clear()
            if self._timer is not None:
                self._timer.cancel()
            if self._unfinished:
                self._cancel(self)

    def _expire(self) -> None:
        """Ends at once: who reads may be waiting for a client that takes nothing."""
        assert self._seconds is not None
        self.arrive(RequestTimeoutError(seconds=self._seconds, what="the request"))
        self.close()


def joined_delta(deltas: Sequence[Delta]) -> Delta:
    """Deltas of one sequence, in order, as one."""
    return Delta(
        sequence=deltas[0].sequence,
        tokens=tuple(token for one in deltas for token in one.tokens),
        events=merged([event for one in deltas for event in one.events]),
        logprobs=tuple(entry for one in deltas for entry in one.logprobs),
        alternatives=tuple(entry for one in deltas for entry in one.alternatives),
        finish=deltas[-1].finish,
    )


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
