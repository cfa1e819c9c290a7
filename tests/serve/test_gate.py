"""Who is let in, what is too much, and what is never written down."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import httpx
import pytest

from serve.keys import ApiKeys
from serve.settings import Settings
from tests.runtime.fake_backend import FakeBackend
from tests.serve.running import Running
from tests.serve.running import fake_model
from tests.serve.running import opening
from tests.serve.running import running
from tests.serve.running import until

SECRET = "correct-horse"
BODY = {"prompt": "hello", "max_tokens": 2}
LIMIT = 2000


@pytest.fixture(scope="module")
def guarded(checkpoint: Path) -> Iterator[Running]:
    settings = Settings(
        keys=ApiKeys([("alice", SECRET), ("bob", "battery-staple")]),
        max_body_bytes=LIMIT,
        body_seconds=0.3,
        log_requests=True,
        request_ids=True,
        origins=("https://page.example",),
        hosts=("127.0.0.1", "model.example"),
    )
    with running(opening(fake_model(checkpoint, FakeBackend(context=128))), settings) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("wrong"), bearer(SECRET[:-1]), bearer(SECRET + "x"), {"Authorization": SECRET}],
    ids=["none", "wrong", "shorter", "longer", "no scheme"],
)
@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/models", "/tokenize", "/metrics", "/load", "/openapi.json", "/other"],
)
def test_everything_else_needs_a_key(guarded: Running, path: str, headers: dict[str, str]) -> None:
    body = BODY if path in ("/v1/completions", "/tokenize") else None
    answer = guarded.ask(path, body, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_any_key_opens(guarded: Running) -> None:
    for key in (SECRET, "battery-staple"):
        assert guarded.ask("/v1/completions", BODY, headers=bearer(key)).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
def test_health_needs_no_key(guarded: Running, path: str) -> None:
    assert guarded.ask(path).status_code == 200


def test_a_host_name_of_somebody_else(guarded: Running) -> None:
    """A page whose name was made to lead here."""
    for host, status in (("evil.example", 421), ("model.example:80", 200), ("[", 421)):
        assert guarded.ask("/health", headers={"Host": host}).status_code == status


def test_a_body_that_is_too_large(guarded: Running) -> None:
    """Whether its length was announced or not."""
    data = b" " * (LIMIT + 1)

    def pieces() -> Iterator[bytes]:
        yield data

    for content in (data, pieces()):
        answer = httpx.post(
            f"{guarded.url}/v1/completions",
            content=content,
            headers=bearer(SECRET) | {"Content-Type": "application/json"},
        )
        assert answer.status_code == 413
        assert str(LIMIT) in answer.json()["error"]["message"]


def test_a_body_that_does_not_arrive(guarded: Running) -> None:
    port = int(guarded.url.rpartition(":")[2])
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {SECRET}\r\n"
        "Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    )
    start = monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 408")
    assert monotonic() - start < 5


def test_pages_of_the_listed_origin_only(guarded: Running) -> None:
    asked = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
    }
    with httpx.Client(base_url=guarded.url) as client:
        for origin, allowed in (("https://page.example", True), ("https://evil.example", False)):
            answer = client.options("/v1/completions", headers={"Origin": origin, **asked})
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed
            assert (answer.status_code == 200) is allowed
            shown = client.get("/health", headers={"Origin": origin}).headers
            assert (shown.get("access-control-allow-origin") == origin) is allowed
        assert "Retry-After" in shown["access-control-expose-headers"]


def test_request_ids_come_back(guarded: Running) -> None:
    given = {"X-Request-Id": "mine-1"}
    assert guarded.ask("/health", headers=given).headers["x-request-id"] == "mine-1"
    long = {"X-Request-Id": "x" * 1000}
    assert len(guarded.ask("/health", headers=long).headers["x-request-id"]) == 32


def test_the_log_has_a_label_and_neither_key_nor_prompt(
    guarded: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        guarded.ask("/v1/completions", {"prompt": "a private matter"}, headers=bearer(SECRET))
        guarded.ask("/v1/completions", {"prompt": 1.5, "private": 1}, headers=bearer(SECRET))
        until(lambda: "400" in caplog.text)
    ours = [one.getMessage() for one in caplog.records if one.name.startswith(("mkc", "uvicorn"))]
    assert any(" alice POST /v1/completions 200 " in line for line in ours)
    assert not [line for line in ours if "private" in line or SECRET in line]


def test_an_error_that_nobody_expected_is_an_answer(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = fake_model(checkpoint, FakeBackend(context=128))
    said = "private"
    with running(opening(model)) as server:

        def broken(*arguments: object, **options: object) -> None:
            raise ZeroDivisionError(said)

        model.tokenizer.encode = broken  # type: ignore[assignment, method-assign]
        answer = server.ask("/tokenize", {"prompt": "x"})
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "ZeroDivisionError" in answer.text + caplog.text
        assert said not in answer.text + caplog.text
        assert server.ask("/health").status_code == 200


def test_without_keys_everyone_is_let_in_and_no_origin(fake: Running) -> None:
    answer = fake.ask("/v1/completions", BODY, headers={"Origin": "https://page.example"})
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_what_a_page_can_send_unasked_is_refused(fake: Running, media: str) -> None:
    """A browser asks before it sends JSON to another site, and is told no."""
    answer = httpx.post(
        f"{fake.url}/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": media}
    )
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]
