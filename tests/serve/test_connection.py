"""Connections whose requests do not begin, or whose heads do not end."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from serve.connection import HEAD_BYTES
from serve.connection import BoundedConnection
from serve.process import Place
from tests.serve.running import SECONDS
from tests.serve.running import until
from tests.serve.test_process import BODY
from tests.serve.test_process import in_thread
from tests.serve.test_serving_engine import Steps


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    """A server with the protocol that `mkc serve` uses."""
    backend, status = Steps(batch=1, context=128), list[int]()
    with in_thread(checkpoint, backend, Place(port=0), status) as found:
        until(lambda: httpx.get(f"{found}/health").status_code == 200)
        yield found
        backend.broken = True
        for _ in range(2):
            until(lambda: httpx.get(f"{found}/health").status_code == 200)
            httpx.post(f"{found}/v1/completions", json=BODY)


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    place = urlsplit(url)
    with socket.create_connection((place.hostname or "", place.port or 0), SECONDS) as found:
        yield found


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: b"])
def test_a_head_that_does_not_arrive(
    url: str, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedConnection, "head_seconds", 0.2)
    with connected(url) as client:
        client.sendall(sent)
        assert client.recv(100) == b""


def test_the_second_head_of_a_connection_has_to_arrive_too(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(BoundedConnection, "head_seconds", 0.2)
        client.sendall(b"GET /health HTTP/1.1\r\nHost:")
        assert client.recv(4096) == b""


@pytest.mark.parametrize("line", [b"X-A: " + b"a" * 1000 + b"\r\n", b"a" * 1000])
def test_a_head_that_does_not_end(url: str, line: bytes) -> None:
    """Many fields, or one that is endless."""
    with connected(url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-B: ")
        for _ in range(2 * HEAD_BYTES // len(line)):
            try:
                client.sendall(line)
            except ConnectionError:
                return
        try:
            assert client.recv(4096).startswith(b"HTTP/1.1 431 ")
        except ConnectionError:
            return  # it ended while the rest was under way


def test_a_body_may_take_longer_than_a_head(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it may be larger."""
    monkeypatch.setattr(BoundedConnection, "head_seconds", 0.2)
    body = b'{"prompt": "hello", "max_tokens": 2' + b" " * 2 * HEAD_BYTES
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) + 1}\r\n\r\n"
    )
    with connected(url) as client:
        client.sendall(head.encode() + body)
        client.settimeout(0.5)
        with pytest.raises(TimeoutError):
            client.recv(100)
        client.settimeout(SECONDS)
        client.sendall(b"}")
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
