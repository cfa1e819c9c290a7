"""The server as a process: sockets, signals, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from pathlib import Path
from types import FrameType

import uvicorn
from prometheus_client import disable_created_metrics

from mkc.errors import MkcError
from mkc.errors import ServerOptionError
from serve.app import make_app
from serve.connection import BoundedConnection
from serve.context import Server
from serve.engine import Engine
from serve.engine import OpenModel
from serve.engine import State
from serve.metrics import Metrics
from serve.model import ServedModel
from serve.settings import Settings

log = logging.getLogger("mkc.serve")

CRASHED = 70  # exit status: the engine failed twice
BACKLOG = 2048
POLL = 0.05  # seconds
LAST_ANSWERS = 1.0  # seconds for answers to reach their clients
LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the server listens.

    Attributes:
      uds: path of a Unix socket, instead of host and port.
      key_file, certificate, authorities: of TLS; the last one makes clients show a certificate.
      drain_seconds: for running requests after SIGTERM.
      stall_seconds: for a client to take what has been sent; then its connection ends.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    key_file: Path | None = None
    certificate: Path | None = None
    authorities: Path | None = None
    drain_seconds: float = 300.0
    stall_seconds: float = 60.0

    @property
    def is_local(self) -> bool:
        """Only this machine can reach it."""
        return self.uds is not None or self.host in LOOPBACK

    @property
    def url(self) -> str:
        if self.uds is not None:
            return f"unix:{self.uds}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.certificate else ''}://{host}:{self.port}"


class HttpServer(uvicorn.Server):
    """Ends when the engine does; SIGTERM and Ctrl-C drain it first, a second one does not wait."""

    def __init__(self, config: uvicorn.Config, engine: Engine, *, drain_seconds: float) -> None:
        super().__init__(config)
        self.engine = engine
        self._drain_seconds = drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.engine.state in (State.LOADING, State.READY):
            log.info("ending: no more requests, %d are left", self.engine.running)
            # Not here: the handler may have interrupted what holds the engine's lock.
            threading.Thread(target=self.engine.drain, daemon=True).start()
            if self.engine.model is None:  # nothing runs, and loading cannot be interrupted
                self.should_exit = True
        else:
            self.should_exit = self.force_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.ensure_future(self._follow_engine())
        await super().serve(sockets)
        ending.cancel()

    async def _follow_engine(self) -> None:
        while self.engine.state in (State.LOADING, State.READY):
            await asyncio.sleep(POLL)
        left = self._drain_seconds
        while self.engine.state is State.DRAINING and left > 0:
            await asyncio.sleep(POLL)
            left -= POLL
        if self.engine.state is State.FAILED:
            await asyncio.sleep(LAST_ANSWERS)
        self.force_exit = left <= 0
        self.should_exit = True


def run(
    open_model: OpenModel,
    settings: Settings,
    place: Place,
    *,
    queue_size: int,
    rounds: int,
    banner: Callable[[ServedModel, str], str],
) -> int:
    """Serves until it is told to end. Returns the exit status.

    Args:
      open_model, queue_size, rounds: of `Engine`.
      banner: what is said once requests are taken, of the model and the URL.

    Raises:
      ServerOptionError: it cannot listen there.
      MkcError: the model cannot be opened.
    """
    disable_created_metrics()  # type: ignore[no-untyped-call]
    listening = _listen(place)
    url = place.url if place.uds else replace(place, port=listening.getsockname()[1]).url

    def announce(model: ServedModel) -> None:
        print(banner(model, url), file=sys.stderr, flush=True)

    engine = Engine(
        open_model, queue_size=queue_size, rounds=rounds, metrics=Metrics(), on_ready=announce
    )
    app = make_app(Server(engine=engine, settings=settings))
    config = uvicorn.Config(
        app,
        http=BoundedConnection,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=None,
        ssl_keyfile=place.key_file,
        ssl_certfile=place.certificate,
        ssl_ca_certs=str(place.authorities) if place.authorities else None,
    )
    http = HttpServer(config, engine, drain_seconds=place.drain_seconds)
    engine.start()
    asyncio.run(http.serve(sockets=[listening]), loop_factory=config.get_loop_factory())
    return _status(engine)


def _status(engine: Engine) -> int:
    """How it ended. Raises the error of a model that could not be opened."""
    if engine.state is State.FAILED:
        if isinstance(engine.error, MkcError):
            raise engine.error
        return CRASHED
    if not engine.join(LAST_ANSWERS):
        os._exit(128 + signal.SIGTERM)  # the engine's thread is in a call that does not end
    return 0


def _listen(place: Place) -> socket.socket:
    try:
        if place.uds is not None:
            found = socket.socket(socket.AF_UNIX)
            if place.uds.is_socket():  # of a server that has ended
                place.uds.unlink()
            found.bind(str(place.uds))
            place.uds.chmod(0o600)
        else:
            family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
            found = socket.socket(family)
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # Connections inherit it. Nothing above TCP sees that a client has stopped reading.
            stall = round(1000 * place.stall_seconds)
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall)
            found.bind((place.host, place.port))
        found.listen(BACKLOG)  # who comes before the application is there waits
    except OSError as error:
        raise ServerOptionError(
            problem=f"cannot listen at {place.url} ({error.strerror})",
            expected="an address of this machine that nobody else uses",
            hint="Choose another --host or --port",
        ) from error
    return found
