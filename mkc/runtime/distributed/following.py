"""A backend over several processes: process 0 makes calls, and all others make the same ones.

Every process has its own `Backend` over its part of the devices. Only process 0 has a generator,
requests and text. Saved states stay where they are: process 0 numbers them, and says which ones it
has forgotten.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from signal import SIG_IGN
from signal import SIGINT
from signal import signal
from typing import Any
from typing import Protocol
from weakref import finalize

import jax

from mkc.errors import ProcessLostError
from mkc.runtime.backends.backend import Backend
from mkc.runtime.backends.backend import BackendName
from mkc.runtime.backends.backend import Snapshot
from mkc.runtime.backends.backend import StepResult
from mkc.runtime.distributed.calls import CLOSE
from mkc.runtime.distributed.calls import Call
from mkc.runtime.distributed.runtime import first_line
from mkc.runtime.distributed.runtime import leave
from mkc.runtime.shards import Array
from mkc.runtime.token_masks import Masks


class Messages(Protocol):
    """See `mkc.runtime.distributed.channel`."""

    def send(self, message: bytes) -> None: ...
    def receive(self) -> bytes: ...


@dataclass(frozen=True, kw_only=True)
class NumberedSnapshot(Snapshot):
    """Attributes:
    number: of this save, the same in all processes.
    """

    number: int


class LeadingBackend:
    """The backend of process 0: sends every call, then makes it."""

    def __init__(self, backend: Backend, messages: Messages) -> None:
        self.name: BackendName = backend.name
        self.batch = backend.batch
        self.context = backend.context
        self.vocab = backend.vocab
        self.prefill_rows = backend.prefill_rows
        self.rounds_per_launch = backend.rounds_per_launch
        self.stop_ids_per_launch = backend.stop_ids_per_launch
        self._backend = backend
        self._messages = messages
        self._saved = 0
        self._forgotten: list[int] = []
        self._closed = False

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        with self._call("prefill", slot, tokens, position):
            return self._backend.prefill(slot, tokens, position)

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        masks: Masks = (),
    ) -> StepResult:
        with self._call("step", tokens, positions, active, masks=masks):
            return self._backend.step(tokens, positions, active, masks=masks)

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
        options: dict[str, Any] = {"rounds": rounds, "stop_ids": stop_ids, "masks": masks}
        with self._call("greedy_rounds", tokens, positions, active, **options):
            return self._backend.greedy_rounds(tokens, positions, active, **options)

    def reset(self, slot: int) -> None:
        with self._call("reset", slot):
            self._backend.reset(slot)

    def save(self, slot: int, *, start: int, end: int) -> Snapshot:
        number = self._saved
        self._saved += 1
        with self._call("save", slot, start=start, end=end, number=number):
            saved = self._backend.save(slot, start=start, end=end)
        snapshot = NumberedSnapshot(
            start=saved.start, end=saved.end, fixed=saved.fixed, rows=saved.rows, number=number
        )
        finalize(snapshot, self._forgotten.append, number)
        return snapshot

    def restore(self, slot: int, snapshots: Sequence[Snapshot]) -> None:
        numbers = []
        for one in snapshots:
            assert isinstance(one, NumberedSnapshot), "a snapshot of another backend"
            numbers.append(one.number)
        with self._call("restore", slot, numbers):
            self._backend.restore(slot, snapshots)

    def state(self, slot: int) -> dict[str, Array]:
        with self._call("state", slot):
            return self._backend.state(slot)

    def close(self) -> None:
        """The others end; no call may follow. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            with self._call(CLOSE):
                pass

    @contextmanager
    def _call(self, name: str, /, *arguments: Any, **options: Any) -> Iterator[None]:
        """Sends a call before the block makes it here; an error of JAX ends this process."""
        forgotten = [self._forgotten.pop() for _ in range(len(self._forgotten))]
        call = Call(name=name, arguments=arguments, options=options, forgotten=forgotten)
        with ending_on_error():
            self._messages.send(call.encode())
            yield


@contextmanager
def ending_on_error() -> Iterator[None]:
    """Ends this process when JAX reports an error: after half a call nothing is in order."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        traceback.print_exc()
        leave(
            ProcessLostError(
                process=jax.process_index(),
                processes=jax.process_count(),
                problem=first_line(error),
            )
        )


def follow(backend: Backend, messages: Messages) -> None:
    """Makes the calls of process 0 until it closes; any error ends this process.

    Ctrl-C in a terminal reaches all processes; it is up to process 0 what it means.
    """
    signal(SIGINT, SIG_IGN)
    try:
        Follower(backend).run(messages.receive)
    except Exception as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {first_line(error)}"
        leave(
            ProcessLostError(
                process=jax.process_index(), processes=jax.process_count(), problem=problem
            )
        )


class Follower:
    """Attributes:
    snapshots: what was saved and not forgotten, by number.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.snapshots: dict[int, Snapshot] = {}

    def run(self, receive: Callable[[], bytes]) -> None:
        while (call := Call.decode(receive())).name != CLOSE:
            for number in call.forgotten:
                del self.snapshots[number]
            self._make(call)

    def _make(self, call: Call) -> None:
        if call.name == "save":
            options = dict(call.options)
            number = options.pop("number")
            self.snapshots[number] = self.backend.save(*call.arguments, **options)
        elif call.name == "restore":
            slot, numbers = call.arguments
            self.backend.restore(slot, [self.snapshots[number] for number in numbers])
        else:
            getattr(self.backend, call.name)(*call.arguments, **call.options)
