"""The engine: one thread that owns the generator, and what other threads may ask of it."""

from __future__ import annotations

import gc
import logging
import threading
import traceback
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil
from time import monotonic

from mkc.errors import EngineError
from mkc.errors import MkcError
from mkc.errors import NotServingError
from mkc.errors import QueueFullError
from mkc.errors import RequestFieldError
from mkc.runtime.backends.timed import timed
from mkc.runtime.generate import Generator
from mkc.runtime.request import Delta
from mkc.runtime.request import Request
from serve.metrics import Metrics
from serve.metrics import SequenceTimes
from serve.model import ServedModel
from serve.ticket import Arrival
from serve.ticket import Ticket
from serve.ticket import deliver
from serve.waiting import FairQueue

log = logging.getLogger("mkc.serve")

RESTARTS = 1  # after so many crashes the next one is the end
LOADING_RETRY = 5  # seconds
LONGEST_RETRY = 60
STATUS_SECONDS = 10.0  # between two lines in the log
SHARE_OF_NEW = 0.1  # of the mean time of a sequence, how much the newest one counts

type OpenModel = Callable[[Callable[[str], None]], ServedModel]


class State(StrEnum):
    """What the engine is doing."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(kw_only=True)
class _Sequence:
    """One sequence of a ticket. Times are seconds of one clock."""

    ticket: Ticket
    index: int
    submitted: float
    added: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    tokens: int = 0

    @property
    def request(self) -> Request:
        return self.ticket.requests[self.index]


class Engine:
    """Requests wait in a queue and join the generator's slots between two launches.

    A crash answers every request with an error, and the model is opened once more; after the
    second crash `on_end` is called with the state FAILED.

    Attributes:
      state: what it is doing.
      stage: what it is doing while it loads, for people.
      model: None until it is open.
      error: why it failed.
    """

    def __init__(
        self,
        open_model: OpenModel,
        *,
        queue_size: int = 256,
        rounds: int = 1,
        metrics: Metrics | None = None,
        on_ready: Callable[[ServedModel], None] = lambda model: None,
        on_end: Callable[[State], None] = lambda state: None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """
        Args:
          open_model: given a function that takes the stage it has reached.
          rounds: most rounds of a launch; the next request joins behind it.
          on_ready: called in the engine's thread whenever it begins to take requests.
          on_end: called in the engine's thread when that ends.
          clock: seconds.
        """
        self.state = State.LOADING
        self.stage = "waiting to start"
        self.model: ServedModel | None = None
        self.error: BaseException | None = None
        self.metrics = metrics or Metrics()
        self._open = open_model
        self._rounds = rounds
        self._on_ready = on_ready
        self._on_end = on_end
        self._clock = clock
        self._started = clock()
        self._wake = threading.Condition()  # guards what follows
        self._queue: FairQueue[_Sequence] = FairQueue(queue_size)
        self._cancelled: set[Ticket] = set()
        self._running: dict[int, _Sequence] = {}  # by the generator's number; engine's thread only
        self._joining: _Sequence | None = None  # neither waiting nor running; engine's thread only
        self._slots = 1
        self._tokens = 0  # of all sequences, and how many there were at the last line in the log
        self._tokens_told = 0
        self._told = self._started
        self._sequence_seconds = 1.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def loading_seconds(self) -> float:
        """How long it has been loading, or has existed."""
        return self._clock() - self._started

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._queue)

    @property
    def running(self) -> int:
        """Sequences that have a slot."""
        return len(self._running)

    @property
    def usage(self) -> float:
        """The part of all positions that sequences use, 0 to 1."""
        model = self.model
        if model is None:
            return 0.0
        used = sum(len(one.request.tokens) + one.tokens for one in list(self._running.values()))
        return used / (model.backend.batch * model.backend.context)

    @property
    def queue_size(self) -> int:
        """Most sequences in the queue."""
        return self._queue.limit

    def start(self) -> None:
        """Opens the model and begins to serve, in a thread of its own."""
        self._thread.start()

    def join(self, seconds: float | None = None) -> bool:
        """Waits until it has ended; whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def ready_model(self) -> ServedModel:
        """The model. Raises `NotServingError` unless requests are taken."""
        model = self.model
        if self.state is not State.READY or model is None:
            raise NotServingError(state=self.state, retry_after=LOADING_RETRY)
        return model

    def check(self, request: Request) -> int:
        """The most tokens that a request may generate. Raises what `Generator.check` raises."""
        return Generator(self.ready_model().backend).check(request)

    def submit(
        self, requests: Sequence[Request], *, owner: str, seconds: float | None = None
    ) -> Ticket:
        """Queues sequences that belong together. Called in an event loop.

        Args:
          owner: owners take turns in the queue.
          seconds: how long all of it may take.

        Raises:
          NotServingError: the engine is loading or ending.
          QueueFullError: there is no room for all of them now.
          RequestFieldError: there never will be.
        """
        self.ready_model()
        ticket = Ticket(requests, owner=owner, seconds=seconds, cancel=self._cancel)
        now = self._clock()
        with self._wake:
            self._check_room(len(requests))
            for index in range(len(requests)):
                self._queue.put(owner, _Sequence(ticket=ticket, index=index, submitted=now))
            self._wake.notify()
        return ticket

    def drain(self) -> None:
        """Takes no more requests, and ends when all that were taken are done."""
        with self._wake:
            if self.state in (State.LOADING, State.READY):
                self.state = State.DRAINING
            self._wake.notify()

    def _cancel(self, ticket: Ticket) -> None:
        with self._wake:
            self._cancelled.add(ticket)
            self._wake.notify()

    def _check_room(self, wanted: int) -> None:
        waiting, limit = len(self._queue), self._queue.limit
        free = max(0, self._slots - len(self._running) - waiting)
        if wanted > limit + self._slots:
            raise RequestFieldError(
                field="n",
                problem=f"asks for {wanted} sequences with all prompts together",
                expected=f"at most {limit + self._slots}",
            )
        if waiting + wanted > limit + free:
            retry = ceil(self._sequence_seconds * (waiting + 1) / self._slots)
            raise QueueFullError(
                waiting=waiting, limit=limit, retry_after=min(max(retry, 1), LONGEST_RETRY)
            )

    def _run(self) -> None:
        for attempt in range(RESTARTS + 1):
            try:
                self._serve()
                self.state = State.STOPPED
                break
            except Exception as error:
                hopeless = isinstance(error, MkcError) and self.model is None  # it does not open
                last = hopeless or attempt == RESTARTS or self.state is State.DRAINING
                self._fail(error, State.FAILED if last else State.LOADING)
                if last:
                    break
                self.metrics.restarted()
        self._on_end(self.state)

    def _serve(self) -> None:
        """Opens the model and serves until there is nothing left to do."""
        self._started = self._clock()
        model = self._open(self._say)
        backend = timed(model.backend)
        for slot in range(backend.batch):
            backend.reset(slot)
        generator = Generator(backend, tokenizer=model.tokenizer, prefix_cache=model.prefix_cache)
        self.metrics.serve(model.name, step_floor_us=model.step_floor_us)
        with self._wake:
            self._slots = backend.batch
            if self.state is State.LOADING:
                self.state = State.READY
            self.model = model  # last: who sees it may ask for something
        if self.state is State.READY:
            self._on_ready(model)
        while self._wait():
            self._cancel_and_add(generator)
            if generator.running:
                deltas, now = generator.rounds(self._rounds), self._clock()
                deliver([self._arrival(one, now) for one in deltas])
            self.metrics.turn(backend.take_times(), generator)
            self._tell()

    def _tell(self) -> None:
        """A line in the log, now and then while there is something to do."""
        now = self._clock()
        if now - self._told < STATUS_SECONDS:
            return
        rate = (self._tokens - self._tokens_told) / (now - self._told)
        self._told, self._tokens_told = now, self._tokens
        log.info(
            "%d running, %d waiting, %.1f tokens/s, %.2f ms per round, %.0f %% of all positions",
            self.running,
            self.waiting,
            rate,
            1e3 * self.metrics.round_seconds,
            100 * self.usage,
        )

    def _say(self, stage: str) -> None:
        self.stage = stage
        log.info("%s", stage)

    def _wait(self) -> bool:
        """Waits for work; False when there will be none."""
        with self._wake:
            while not (self._queue or self._running or self._cancelled):
                if self.state is State.DRAINING:
                    return False
                self._wake.wait()
        return True

    def _cancel_and_add(self, generator: Generator) -> None:
        """Frees the slots of cancelled tickets, and gives free slots to those that wait."""
        with self._wake:
            cancelled, self._cancelled = self._cancelled, set()
            removed = self._queue.remove(lambda one: one.ticket in cancelled) if cancelled else []
        gone = [number for number, one in self._running.items() if one.ticket in cancelled]
        for number in gone:
            generator.cancel(number)
            del self._running[number]
        for _ in range(len(gone) + len(removed)):
            self.metrics.cancelled()
        while generator.free_slots and (one := self._take()) is not None:
            self._joining = one
            try:
                number = generator.add(one.request)
            except MkcError as error:
                deliver([(one.ticket, error)])
            else:
                one.added = self._clock()
                self._running[number] = one
            self._joining = None

    def _take(self) -> _Sequence | None:
        with self._wake:
            return self._queue.take() if self._queue else None

    def _arrival(self, delta: Delta, now: float) -> tuple[Ticket, Arrival]:
        """What a delta means for the figures, and for whom it is."""
        one = self._running[delta.sequence]
        if delta.tokens:
            is_first = not one.tokens
            one.tokens += len(delta.tokens)
            self._tokens += len(delta.tokens)
            self.metrics.tokens(len(delta.tokens), None if is_first else now - one.last_token)
            if is_first:
                one.first_token = now
                self.metrics.first_token(now - one.submitted)
            one.last_token = now
        if delta.finish is not None:
            del self._running[delta.sequence]
            self._sequence_seconds += SHARE_OF_NEW * (now - one.added - self._sequence_seconds)
            self.metrics.ended(
                delta.finish,
                SequenceTimes(
                    submitted=one.submitted,
                    added=one.added,
                    first_token=one.first_token or now,
                    ended=now,
                ),
            )
        return one.ticket, (one.index, delta)

    def _fail(self, error: Exception, state: State) -> None:
        """Answers everyone who waits, and lets go of the model."""
        problem = type(error).__name__
        # No message, and no values: they could hold what a user wrote.
        frames = "".join(traceback.format_tb(error.__traceback__))
        log.error("the engine failed with %s\n%s", problem, frames)
        with self._wake:
            joining = [self._joining] if self._joining is not None else []
            left = (*joining, *self._queue.clear(), *self._running.values())
            tickets = {one.ticket for one in left}
            self._joining = None
            self._running.clear()
            self._cancelled.clear()
            self.model, self.state, self.error = None, state, error
        answer = EngineError(problem=problem)
        deliver([(one, answer) for one in tickets])
        self.metrics.forget_engine()
        error.__traceback__ = None  # it holds the model, which is opened again
        gc.collect()
