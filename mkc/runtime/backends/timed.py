"""A backend that measures its calls, so that what they leave is the time of the host."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from mkc.runtime.backends.backend import Backend
from mkc.runtime.backends.backend import BackendName
from mkc.runtime.backends.backend import DraftingBackend
from mkc.runtime.backends.backend import Launch
from mkc.runtime.backends.backend import Snapshot
from mkc.runtime.backends.backend import StepResult
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.shards import Array
from mkc.runtime.token_masks import Masks


@dataclass(frozen=True, kw_only=True)
class CallTimes:
    """What a backend has done since it was last asked.

    Attributes:
      launches: calls that ran decode rounds.
      rounds: that these calls ran.
      seconds: inside all calls, prefill and saved states included.
      round_seconds: inside the calls that ran decode rounds.
    """

    launches: int = 0
    rounds: int = 0
    seconds: float = 0.0
    round_seconds: float = 0.0


class TimedBackend:
    """Passes every call on to another backend."""

    def __init__(self, backend: Backend, *, clock: Callable[[], float] = perf_counter) -> None:
        """
        Args:
          clock: seconds.
        """
        self.backend = backend
        self.name: BackendName = backend.name
        self.batch = backend.batch
        self.context = backend.context
        self.vocab = backend.vocab
        self.prefill_rows = backend.prefill_rows
        self.rounds_per_launch = backend.rounds_per_launch
        self.stop_ids_per_launch = backend.stop_ids_per_launch
        self._clock = clock
        self._begin()

    def take_times(self) -> CallTimes:
        """What has been done since the last call."""
        found = CallTimes(
            launches=self._launches,
            rounds=self._rounds,
            seconds=self._seconds,
            round_seconds=self._round_seconds,
        )
        self._begin()
        return found

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        with self._measured():
            return self.backend.prefill(slot, tokens, position)

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        masks: Masks = (),
    ) -> StepResult:
        with self._launched():
            result = self.backend.step(tokens, positions, active, masks=masks)
        self._rounds += 1
        return result

    def greedy_rounds(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        rounds: Sequence[int],
        stop_ids: Sequence[Sequence[int]] = (),
        masks: Masks = (),
    ) -> Array:
        with self._launched():
            emitted = self.backend.greedy_rounds(
                tokens, positions, active, rounds=rounds, stop_ids=stop_ids, masks=masks
            )
        self._rounds += len(emitted)
        return emitted

    def reset(self, slot: int) -> None:
        with self._measured():
            self.backend.reset(slot)

    def save(self, slot: int, *, start: int, end: int) -> Snapshot:
        with self._measured():
            return self.backend.save(slot, start=start, end=end)

    def restore(self, slot: int, snapshots: Sequence[Snapshot]) -> None:
        with self._measured():
            self.backend.restore(slot, snapshots)

    def state(self, slot: int) -> dict[str, Array]:
        return self.backend.state(slot)

    def _begin(self) -> None:
        self._launches = 0
        self._rounds = 0
        self._seconds = 0.0
        self._round_seconds = 0.0

    @contextmanager
    def _measured(self) -> Iterator[None]:
        start = self._clock()
        try:
            yield
        finally:
            self._seconds += self._clock() - start

    @contextmanager
    def _launched(self) -> Iterator[None]:
        """A call that runs decode rounds."""
        start = self._clock()
        yield
        passed = self._clock() - start
        self._launches += 1
        self._seconds += passed
        self._round_seconds += passed


class TimedDraftingBackend(TimedBackend):
    """The same for a backend that drafts."""

    def __init__(
        self, backend: DraftingBackend, *, clock: Callable[[], float] = perf_counter
    ) -> None:
        super().__init__(backend, clock=clock)
        self.drafting = backend
        self.drafts = backend.drafts
        self.draws = backend.draws

    def speculate(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        rounds: int,
        budgets: Sequence[int],
        sampling: Sequence[SamplingParams],
        seeds: Sequence[int],
        stop_ids: Sequence[Sequence[int]] = (),
        masks: Masks = (),
    ) -> Launch:
        with self._launched():
            launch = self.drafting.speculate(
                tokens,
                positions,
                active,
                rounds=rounds,
                budgets=budgets,
                sampling=sampling,
                seeds=seeds,
                stop_ids=stop_ids,
                masks=masks,
            )
        self._rounds += len(launch.tokens)
        return launch

    def next_drafts(self, slot: int, token: int, position: int) -> list[int]:
        return self.drafting.next_drafts(slot, token, position)


def timed(backend: Backend, *, clock: Callable[[], float] = perf_counter) -> TimedBackend:
    """A backend whose calls are measured, which drafts if `backend` does."""
    if isinstance(backend, DraftingBackend):
        return TimedDraftingBackend(backend, clock=clock)
    return TimedBackend(backend, clock=clock)
