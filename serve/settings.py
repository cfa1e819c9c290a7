"""How a server behaves."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field

from serve.keys import ApiKeys


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `mkc serve` was told, apart from what to serve.

    Attributes:
      keys: without any, every request is let in.
      open_metrics: /metrics and /load need no key.
      max_body_bytes: of a request.
      body_seconds: for a body to arrive.
      request_seconds: for everything that one request asks for.
      lenient: unknown fields are ignored, and named in a header of the answer.
      force_usage: streams always end with the usage.
      log_requests: one line per request, without anything that was said in it.
      request_ids: the header X-Request-Id is taken over and sent back.
      origins: of pages that may ask from a browser; none by default.
      hosts: values of the header Host that are let in; empty for all.
    """

    keys: ApiKeys = field(default_factory=ApiKeys)
    open_metrics: bool = False
    max_body_bytes: int = 8 << 20
    body_seconds: float = 30.0
    request_seconds: float | None = 600.0
    lenient: bool = False
    force_usage: bool = False
    log_requests: bool = False
    request_ids: bool = False
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
