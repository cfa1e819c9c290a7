"""A command in a pseudo-terminal: what a person types and sees."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from select import select
from signal import SIG_DFL
from signal import SIGINT
from signal import signal
from time import monotonic

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CHUNK = 4096
SECONDS = 120.0  # a busy machine needs a while to start Python


class Terminal:
    """The side of a terminal at which the person sits.

    Attributes:
      seen: all output so far.
    """

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self.seen = ""
        self._descriptor = descriptor
        self._looked_at = 0

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, text: str, *, seconds: float = SECONDS) -> None:
        """Waits until the text appears behind what was waited for before."""
        end = monotonic() + seconds
        while (place := self.seen.find(text, self._looked_at)) < 0:
            left = end - monotonic()
            assert left > 0, f"{text!r} did not come: {self.seen[self._looked_at :]!r}"
            assert self._read(left), f"ended without {text!r}: {self.seen!r}"
        self._looked_at = place + len(text)

    def wait_until_idle(self) -> None:
        """Waits until the program sleeps, as it does when it waits for a key.

        CPython's readline loop shows the prompt a moment before it waits; a signal in between is
        only seen with the next key.
        """
        end = monotonic() + SECONDS
        while _state(self.process.pid) != "S":
            assert monotonic() < end, "the program is busy"
            self._read(0.01)

    def wait_for_end(self) -> int:
        """The exit status."""
        while self._read(SECONDS):
            pass
        return self.process.wait(SECONDS)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select([self._descriptor], [], [], seconds)
        if not ready:
            return True
        try:
            chunk = os.read(self._descriptor, CHUNK)
        except OSError:  # how Linux says that nobody is on the other side
            return False
        self.seen += chunk.decode("utf-8", "replace")
        return bool(chunk)


def _state(process: int) -> str:
    """The scheduler's letter for the main thread: R runs, S sleeps."""
    with open(f"/proc/{process}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0]


def _begin_session(terminal: int) -> None:
    """What a login does; a shell's background job, which these tests may be, ignores Ctrl-C."""
    signal(SIGINT, SIG_DFL)
    os.login_tty(terminal)


@contextmanager
def in_terminal(arguments: Sequence[str]) -> Iterator[Terminal]:
    """Runs Python with arguments, in a terminal of its own; ends it however the block ends."""
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": ROOT, "TERM": "xterm", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: _begin_session(slave),
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)
