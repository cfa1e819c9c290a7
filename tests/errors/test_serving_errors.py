"""Serving: requests that are refused, and servers that cannot start."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from mkc.errors import ApiKeyError
from mkc.errors import BootCheckError
from mkc.errors import EngineError
from mkc.errors import NotServingError
from mkc.errors import QueueFullError
from mkc.errors import RequestBodyError
from mkc.errors import RequestFieldError
from mkc.errors import RequestTimeoutError
from mkc.errors import ServedModelError
from mkc.errors import ServerOptionError
from mkc.runtime.request import Request
from serve.boot import boot_check
from serve.building import check_model
from serve.engine import Engine
from serve.schemas.base import read_body
from serve.schemas.base import read_object
from serve.schemas.completions import CompletionRequest
from tests.errors.command import Command
from tests.errors.expect import refused
from tests.runtime.fake_backend import FakeBackend
from tests.runtime.text.checkpoints import byte_level_checkpoint
from tests.serve.running import fake_model
from tests.serve.running import opening
from tests.serve.running import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_level_checkpoint(tmp_path)
    return tmp_path


def test_field_that_would_be_ignored() -> None:
    with refused(RequestFieldError, "field 'suffix'", "not supported", "only fields", "Leave"):
        read_body(CompletionRequest, {"prompt": "x", "suffix": "y"}, lenient=False)


def test_field_with_a_wrong_value() -> None:
    with refused(RequestFieldError, "field 'n'", "wrong kind or range", "valid integer", "Correct"):
        read_body(CompletionRequest, {"prompt": "x", "n": "2"}, lenient=False)
    with refused(RequestFieldError, "field 'prompt' is missing", "a value"):
        read_body(CompletionRequest, {}, lenient=False)


def test_body_that_is_no_object() -> None:
    with refused(RequestBodyError, "body is no JSON", "an object", "Correct"):
        read_object(b"{")
    with refused(RequestBodyError, "body is a list", "a JSON object"):
        read_object(b"[]")


def test_model_that_is_not_served(folder: Path) -> None:
    model = fake_model(folder, FakeBackend())
    with refused(ServedModelError, "model 'gpt'", "expected 'fake'", "/v1/models"):
        check_model(model, "gpt")


def test_full_queue(folder: Path) -> None:
    engine = Engine(opening(fake_model(folder, FakeBackend())), queue_size=0)
    engine.start()
    until(lambda: engine.model is not None)

    async def scenario() -> None:
        engine.submit([Request(tokens=[1], max_tokens=60)], owner="a")
        with refused(QueueFullError, "are waiting", "more than 0", "room", "Try again in"):
            for _ in range(1000):
                engine.submit([Request(tokens=[1], max_tokens=60)], owner="a")

    asyncio.run(scenario())
    engine.drain()
    assert engine.join(60)


def test_server_without_a_model() -> None:
    with refused(NotServingError, "is loading", "ready", "/health"):
        Engine(opening).ready_model()  # type: ignore[arg-type]


def test_what_a_client_reads_of_keys_time_and_crashes() -> None:
    with refused(ApiKeyError, "no API key", "'Authorization: Bearer KEY'", "Ask"):
        raise ApiKeyError(problem="there is no API key")
    with refused(RequestTimeoutError, "longer than 2.5 s", "fewer tokens", "--request-timeout"):
        raise RequestTimeoutError(seconds=2.5, what="the request")
    with refused(EngineError, "has failed (ValueError)", "finish", "try it again"):
        raise EngineError(problem="ValueError")


def test_options_that_contradict_each_other(command: Command) -> None:
    command.refused(
        ServerOptionError,
        "only one of --ssl-keyfile and --ssl-certfile",
        "both",
        argv="serve --ssl-keyfile key.pem",
    )
    command.refused(
        ServerOptionError, "keys cannot be read", "on each line", argv="serve --api-key-file keys"
    )


def test_address_that_is_taken(command: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        command.refused(
            ServerOptionError,
            "cannot listen at http://127.0.0.1",
            "nobody else uses",
            "--port",
            argv=f"serve --port {other.getsockname()[1]}",
        )


def test_boot_check_finds_another_backend_or_scheme(folder: Path) -> None:
    model = fake_model(folder, FakeBackend())
    with refused(BootCheckError, "backend that runs is 'reference'", "expected 'tpu'"):
        boot_check(model, backend="tpu", scheme=None)
    with refused(BootCheckError, "scheme that runs is 'none'", "expected 'block'"):
        boot_check(model, backend="reference", scheme="block")
