"""What every request passes before a route sees it, and what is said about it afterwards."""

from __future__ import annotations

import asyncio
import logging
import traceback
from hmac import compare_digest
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from starlette.datastructures import Headers
from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp
from starlette.types import Message
from starlette.types import Receive
from starlette.types import Scope
from starlette.types import Send

from mkc.errors import ApiKeyError
from mkc.errors import MkcError
from mkc.errors import RequestTimeoutError
from serve.failures import INTERNAL
from serve.failures import answer_of
from serve.failures import failure
from serve.failures import headers_of
from serve.failures import status_of
from serve.settings import Settings

log = logging.getLogger("mkc.serve")

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version"})
OPEN_PREFIX = "/static/"  # of the page, which holds nothing secret
METRICS_PATHS = frozenset({"/metrics", "/load"})
REQUEST_ID = "X-Request-Id"
LONGEST_ID = 128
OWNER = "mkc.owner"  # key of the scope: whose request it is
CLOSED = 499  # status in the log when the client has gone before the answer
TOO_LARGE = 413
FORBIDDEN_HOST = 421


class BodyTooLargeError(Exception):
    """More bytes than the server takes."""


class Gate:
    """Keys, hosts, limits of the body, request ids, the log, and errors that nobody expected."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send, self._settings)
        try:
            await self._pass(exchange)
        finally:
            if self._settings.log_requests:
                exchange.log()

    async def _pass(self, exchange: _Exchange) -> None:
        try:
            refusal = self._refusal(exchange)
            if refusal is not None:
                await exchange.answer(refusal)
                return
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except BodyTooLargeError:
            await exchange.answer(_too_large(self._settings.max_body_bytes))
        except MkcError as error:
            await exchange.answer(error_response(error))
        except Exception as error:
            # No message, and no values: they could hold what a user wrote.
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s: %s\n%s", exchange.id, type(error).__name__, frames)
            message = f"the server failed with {type(error).__name__}; see its log"
            await exchange.answer(_response(INTERNAL, message))

    def _refusal(self, exchange: _Exchange) -> Response | None:
        """The answer to a request that is not let in."""
        settings = self._settings
        if settings.hosts and _host_name(exchange.headers.get("host", "")) not in settings.hosts:
            return _response(FORBIDDEN_HOST, "the Host header names another server", code="host")
        length = exchange.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > settings.max_body_bytes:
            return _too_large(settings.max_body_bytes)
        if settings.keys and self._needs_key(exchange.path):
            owner = settings.keys.owner(exchange.bearer) if exchange.bearer else None
            if owner is None:
                problem = "the API key is not known" if exchange.bearer else "there is no API key"
                return error_response(ApiKeyError(problem=problem))
            exchange.scope[OWNER] = owner
        return None

    def _needs_key(self, path: str) -> bool:
        if path in METRICS_PATHS:
            return not self._settings.open_metrics
        return path not in OPEN_PATHS and not path.startswith(OPEN_PREFIX)


class _Exchange:
    """One request and its answer.

    Attributes:
      id: of the request.
      bearer: the key that came with it; empty without one.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, settings: Settings) -> None:
        self.scope = scope
        self.headers = Headers(scope=scope)
        self.path: str = scope["path"]
        self._settings = settings
        self._receive = receive
        self._send = send
        self._status = 0
        self._bytes = 0
        self._body_done = False
        self._start = perf_counter()
        self.id = self._request_id()
        scheme, _, key = self.headers.get("authorization", "").partition(" ")
        self.bearer = key.strip() if compare_digest(scheme.lower().encode(), b"bearer") else ""
        client = scope.get("client")
        scope[OWNER] = client[0] if client else ""

    async def receive(self) -> Message:
        """The next message, while the body keeps within its limits."""
        if self._body_done:
            return await self._receive()
        seconds = self._settings.body_seconds
        try:
            async with asyncio.timeout_at(self._deadline(seconds)):
                message = await self._receive()
        except TimeoutError as error:
            raise RequestTimeoutError(seconds=seconds, what="the request's body") from error
        self._bytes += len(message.get("body", b""))
        self._body_done = not message.get("more_body", False)
        if self._bytes > self._settings.max_body_bytes:
            raise BodyTooLargeError
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if self._settings.request_ids:
                MutableHeaders(scope=message)[REQUEST_ID] = self.id
        await self._send(message)

    async def answer(self, response: Response) -> None:
        """Answers, unless an answer has begun already."""
        if not self._status:
            await response(self.scope, self.receive, self.send)

    def log(self) -> None:
        """One line, without anything that was said."""
        log.info(
            "%s %s %s %s %d %.1f ms",
            self.id,
            self.scope[OWNER],
            self.scope["method"],
            self.path.encode("unicode_escape").decode(),
            self._status or CLOSED,
            1e3 * (perf_counter() - self._start),
        )

    def _deadline(self, seconds: float) -> float:
        return asyncio.get_running_loop().time() + seconds - (perf_counter() - self._start)

    def _request_id(self) -> str:
        given = self.headers.get(REQUEST_ID, "") if self._settings.request_ids else ""
        usable = given.isascii() and given.isprintable() and 0 < len(given) <= LONGEST_ID
        return given if usable else uuid4().hex


def error_response(error: MkcError, headers: dict[str, str] | None = None) -> Response:
    """The answer that tells of an error of the user, or of the server's state."""
    return Response(
        answer_of(error).json_bytes(),
        status_code=status_of(error),
        headers=headers_of(error) | (headers or {}),
        media_type="application/json",
    )


def _response(status: int, message: str, **options: Any) -> Response:
    body = failure(status, message, **options)
    return Response(body.json_bytes(), status_code=status, media_type="application/json")


def _too_large(limit: int) -> Response:
    message = f"the request body is too large; expected at most {limit} bytes"
    return _response(TOO_LARGE, message, code="too_large")


def _host_name(header: str) -> str:
    """`localhost` of `localhost:8000`; empty when it is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""
