"""What the routes share."""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from uuid import uuid4

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mkc.errors import RequestBodyError
from mkc.runtime.request import Request
from serve.engine import Engine
from serve.gate import OWNER
from serve.model import ServedModel
from serve.schemas.base import Answer
from serve.schemas.base import Body
from serve.schemas.base import read_body
from serve.schemas.base import read_object
from serve.settings import Settings
from serve.ticket import Ticket

IGNORED = "X-Mkc-Ignored-Fields"
JSON = "application/json"


@dataclass(frozen=True, kw_only=True)
class Server:
    """The engine and how it is offered.

    Attributes:
      created: seconds since 1970.
    """

    engine: Engine
    settings: Settings
    created: int = field(default_factory=lambda: int(time.time()))

    async def read[T: Body](self, http: HttpRequest, kind: type[T]) -> Asked[T]:
        """A request's body.

        Raises:
          RequestBodyError, RequestFieldError: what is wrong with it.
          NotServingError: there is no model now.
        """
        model = self.engine.ready_model()
        media = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != JSON:  # what a browser sends to another site without asking is none
            raise RequestBodyError(
                problem=f"has the content type {media!r}", expected=f"content type '{JSON}'"
            )
        value = read_object(await http.body())
        body, ignored = read_body(kind, value, lenient=self.settings.lenient)
        headers = {IGNORED: ", ".join(sorted(ignored))[:1024]} if ignored else {}
        return Asked(body=body, model=model, headers=_ascii(headers), http=http)

    async def submit(self, http: HttpRequest, requests: Sequence[Request]) -> Ticket:
        """Queues the sequences of a request. Raises `MkcError`."""
        await run_in_threadpool(self._check, requests)
        return self.engine.submit(
            requests, owner=http.scope[OWNER], seconds=self.settings.request_seconds
        )

    def _check(self, requests: Sequence[Request]) -> None:
        for one in requests:
            self.engine.check(one)


@dataclass(frozen=True, kw_only=True)
class Asked[T: Body]:
    """A request that has been read.

    Attributes:
      model: what is served now.
      headers: of the answer.
    """

    body: T
    model: ServedModel
    headers: Mapping[str, str]
    http: HttpRequest

    def answer(self, body: Answer) -> Response:
        """The whole answer."""
        return Response(body.json_bytes(), headers=dict(self.headers), media_type=JSON)


def new_id(prefix: str) -> str:
    """An id that nothing else has: `chatcmpl-...`."""
    return f"{prefix}-{uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def _ascii(headers: dict[str, Any]) -> dict[str, str]:
    return {name: value.encode("unicode_escape").decode() for name, value in headers.items()}
