"""Messages from process 0 to all others, through the key-value store of JAX's coordinator.

Not a collective: a process that waits for the next message, perhaps for hours, then occupies no
device, and on a CPU a message costs a quarter of a broadcast.
"""

from __future__ import annotations

import jax

from mkc.runtime.distributed.runtime import client

FOLDER_MESSAGES = 1024  # after so many all processes meet, and process 0 deletes them
WAIT_MS = 3_600_000  # how long one request waits; it is then made again
MEET_MS = 3_600_000


class Channel:
    """Numbered messages; every process reads all of them in order.

    Errors of the coordinator are `jax.errors.JaxRuntimeError`.
    """

    def __init__(self) -> None:
        self._client = client()
        self._next = 0

    def send(self, message: bytes) -> None:
        """Called by process 0."""
        self._client.key_value_set_bytes(self._key(), message)
        if self._meet():
            self._client.key_value_delete(f"{self._folder()}/")
        self._next += 1

    def receive(self) -> bytes:
        """Called by all others; waits."""
        while True:
            try:
                message: bytes = self._client.blocking_key_value_get_bytes(self._key(), WAIT_MS)
                break
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        self._meet()
        self._next += 1
        return message

    def _folder(self) -> str:
        return f"mkc/messages/{self._next // FOLDER_MESSAGES}"

    def _key(self) -> str:
        return f"{self._folder()}/{self._next}"

    def _meet(self) -> bool:
        """Waits for all others behind the last message of a folder; whether it was one."""
        if (self._next + 1) % FOLDER_MESSAGES:
            return False
        self._client.wait_at_barrier(self._folder(), MEET_MS)
        return True
