"""A server in a process of its own, for the scripts that measure one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from re import search
from signal import SIGTERM
from typing import Any
from urllib.request import urlopen

START_SECONDS = 300
CPUCLOCK_SCHED = 2  # Linux: ~pid << 3 with it is the clock of a process, in nanoseconds


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """A server that is ready.

    Attributes:
      port: on this machine.
      pid: of its process, None for a server that was there before.
    """

    port: int
    pid: int | None

    @property
    def resident_bytes(self) -> int:
        """Memory of the process."""
        text = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8")
        found = search(r"VmRSS:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) * 1024

    @property
    def cpu_seconds(self) -> float:
        """Processor time of the process so far, of all its threads."""
        assert self.pid is not None
        return time.clock_gettime(~self.pid << 3 | CPUCLOCK_SCHED)


@contextmanager
def started(*options: str) -> Iterator[ServerProcess]:
    """`mkc serve` with the small model; it is ended, and has to end well."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mkc.cli.main", "serve", "--port", "0", *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        lines: list[str] = []
        while not lines or "XLA cache" not in lines[-1]:
            lines.append(process.stderr.readline())
            assert lines[-1], "".join(lines)
        found = search(r"serving +http://127\.0\.0\.1:(\d+)/", "".join(lines))
        assert found is not None
        server = ServerProcess(port=int(found[1]), pid=process.pid)
        wait_until_ready(server)
        yield server
        process.send_signal(SIGTERM)
        status = process.wait(START_SECONDS)
        assert status == 0, f"the server ended with status {status}"
    finally:
        process.kill()
        process.stderr.close()


def wait_until_ready(server: ServerProcess) -> None:
    """Until /health says so."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        try:
            with urlopen(f"http://127.0.0.1:{server.port}/health") as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the server is not ready")


@dataclass(kw_only=True)
class Reply:
    """An answer whose body is read line by line.

    Attributes:
      left: whether the body was not read to its end.
    """

    status: int
    lines: AsyncIterator[bytes]


class Connection:
    """One request over a connection of its own; costs far less than a general client does."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: bytes | dict[str, Any]) -> Reply:
        """Sends a body, as JSON unless it is bytes, and reads the head of the answer."""
        data = body if isinstance(body, bytes) else dumps(body).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        self._writer = writer
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        return Reply(status=int(answer.split(b" ", 2)[1]), lines=_lines(reader))

    def close(self) -> None:
        """Leaves, whether the answer is complete or not."""
        if self._writer is not None:
            self._writer.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines that are data of events, or of a JSON body."""
    while line := await reader.readline():
        if line.startswith((b"data: ", b"{")):
            yield line.strip().removeprefix(b"data: ")
