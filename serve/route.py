"""What an endpoint is."""

from __future__ import annotations

from collections.abc import Awaitable
from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from serve.context import Server
from serve.schemas.base import Answer
from serve.schemas.base import Body

type Handler = Callable[[Server, HttpRequest], Awaitable[Response]]


@dataclass(frozen=True, kw_only=True)
class Route:
    """An endpoint.

    Attributes:
      paths: all of them do the same.
      body: None for GET.
      answer: None for what is no JSON.
      streams: the answer may also be server-sent events.
    """

    handler: Handler
    paths: tuple[str, ...]
    body: type[Body] | None
    answer: type[Answer] | None
    streams: bool = False

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"
