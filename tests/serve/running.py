"""A server in this process, with a real model or with a fake backend."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import uvicorn

from mkc.runtime.backends import Backend
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.text import load_chat
from mkc.runtime.text import load_tokenizer
from serve.app import make_app
from serve.context import Server
from serve.engine import Engine
from serve.engine import OpenModel
from serve.model import ServedModel
from serve.process import HttpServer
from serve.settings import Settings

SECONDS = 60  # for anything that is waited for
NAME = "fake"


def fake_model(folder: Path, backend: Backend, *, scheme: str = "none") -> ServedModel:
    """A fake backend with the tokenizer and the template in `folder`."""
    tokenizer = load_tokenizer(folder, vocab=backend.vocab)
    return ServedModel(
        name=NAME,
        aliases=("other-name",),
        backend=backend,
        tokenizer=tokenizer,
        chat=load_chat(folder, tokenizer),
        sampling=SamplingParams(),
        description="no model",
        scheme=scheme,
        fingerprint="none",
        prefix_cache=PrefixCache(rows=backend.prefill_rows, max_bytes=1 << 20),
    )


def opening(model: ServedModel) -> OpenModel:
    """Opens what is open already."""
    return lambda say: model


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server that can be asked.

    Attributes:
      http: of the whole process; close what you open.
    """

    url: str
    engine: Engine
    http: HttpServer

    def ask(self, path: str, body: object = None, **options: object) -> httpx.Response:
        """One request: POST with a body, GET without."""
        with httpx.Client(base_url=self.url, timeout=SECONDS) as client:
            if body is None:
                return client.get(path, **options)  # type: ignore[arg-type]
            return client.post(path, json=body, **options)  # type: ignore[arg-type]


@contextmanager
def running(
    open_model: OpenModel,
    settings: Settings | None = None,
    *,
    queue_size: int = 256,
    rounds: int = 1,
    wait: bool = True,
) -> Iterator[Running]:
    """Serves at a free port until the block ends.

    Args:
      wait: until the model is open.
    """
    engine = Engine(open_model, queue_size=queue_size, rounds=rounds)
    app = make_app(Server(engine=engine, settings=settings or Settings()))
    config = uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="off")
    http = HttpServer(config, engine, drain_seconds=SECONDS)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve()), daemon=True)
    engine.start()
    thread.start()
    until(lambda: http.started)
    if wait:
        until(lambda: engine.model is not None)
    port = http.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(url=f"http://127.0.0.1:{port}", engine=engine, http=http)
    finally:
        engine.drain()
        thread.join(SECONDS)
        assert not thread.is_alive(), "the server does not end"


def until(holds: Callable[[], bool]) -> None:
    """Waits for something that another thread does."""
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.002)
