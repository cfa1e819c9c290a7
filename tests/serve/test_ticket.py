"""What waits for a client that is slower than the engine, or does not read at all."""

from __future__ import annotations

import asyncio
import socket
from json import dumps
from json import loads
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from mkc.errors import EngineError
from mkc.errors import RequestTimeoutError
from mkc.runtime.request import Delta
from mkc.runtime.request import Finish
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request
from mkc.runtime.request import SequenceStatistics
from mkc.runtime.sampling import TokenLogprob
from mkc.runtime.text import ContentDelta
from mkc.runtime.text import ReasoningDelta
from serve.process import Place
from serve.process import _listen
from serve.ticket import MOST_APART
from serve.ticket import Ticket
from tests.runtime.fake_backend import FakeBackend
from tests.serve.running import SECONDS
from tests.serve.running import fake_model
from tests.serve.running import opening
from tests.serve.running import running
from tests.serve.running import until
from tests.serve.test_process import in_thread
from tests.serve.test_serving_engine import Steps

DONE = Finish(reason=FinishReason.STOP, statistics=SequenceStatistics(prompt_tokens=1))


def ticket(sequences: int = 1, *, seconds: float | None = None) -> tuple[Ticket, list[Ticket]]:
    """A ticket, and the tickets that were cancelled. Called in an event loop."""
    cancelled: list[Ticket] = []
    requests = [Request(tokens=[1])] * sequences
    return Ticket(requests, owner="a", seconds=seconds, cancel=cancelled.append), cancelled


def delta(token: int, text: str = "", *, finish: Finish | None = None) -> Delta:
    events = (ContentDelta(text=text),) if text else ()
    chosen = TokenLogprob(token=token, logprob=-float(token))
    logprobs, others = (chosen,), ((chosen,),)
    return Delta(
        sequence=0,
        tokens=(token,),
        events=events,
        logprobs=logprobs,
        alternatives=others,
        finish=finish,
    )


async def taken(one: Ticket) -> list[tuple[int, Delta]]:
    return [arrival async for arrival in one.deltas()]


def test_what_a_slow_client_has_not_taken_is_joined() -> None:
    """Nothing is lost, in order, for each sequence; the number of things that wait is bounded."""

    async def scenario() -> None:
        one, _ = ticket(2)
        count = 10 * MOST_APART + 7
        for token in range(count):
            for index in (0, 1):
                one.arrive((index, delta(token, f"{index}{token} ")))
                assert sum(map(len, one._pending.values())) < 2 * MOST_APART
        for index in (0, 1):
            one.arrive((index, delta(count, "end", finish=DONE)))
        found = await taken(one)
        assert [index for index, _ in found] == [0, 1]
        for index, whole in found:
            assert whole.tokens == tuple(range(count + 1))
            assert whole.text == "".join(f"{index}{token} " for token in range(count)) + "end"
            assert len(whole.events) == 1
            assert [entry.token for entry in whole.logprobs] == list(whole.tokens)
            assert [tops[0].token for tops in whole.alternatives] == list(whole.tokens)
            assert whole.finish is DONE

    asyncio.run(scenario())


def test_a_fast_client_gets_deltas_as_they_come() -> None:
    async def scenario() -> None:
        one, _ = ticket()
        arrivals = one.deltas()
        for token in range(3):
            given = delta(token, "x")
            one.arrive((0, given))
            assert (await anext(arrivals))[1] is given
        await arrivals.aclose()  # type: ignore[attr-defined]

    asyncio.run(scenario())


def test_thoughts_and_content_stay_apart_when_joined() -> None:
    async def scenario() -> None:
        one, _ = ticket()
        kinds = [ReasoningDelta, ReasoningDelta, ContentDelta]
        for place, kind in enumerate(kinds):
            events = (kind(text=str(place)),)
            one.arrive((0, Delta(sequence=0, tokens=(place,), events=events)))
        one.arrive((0, Delta(sequence=0, finish=DONE)))
        ((_, whole),) = await taken(one)
        assert whole.events == (ReasoningDelta(text="01"), ContentDelta(text="2"))

    asyncio.run(scenario())


def test_an_error_comes_behind_what_arrived_before_it() -> None:
    async def scenario() -> None:
        one, cancelled = ticket()
        one.arrive((0, delta(5, "x")))
        one.arrive(EngineError(problem="ZeroDivisionError"))
        arrivals = one.deltas()
        assert (await anext(arrivals))[1].tokens == (5,)
        with pytest.raises(EngineError):
            await anext(arrivals)
        assert cancelled == [one]

    asyncio.run(scenario())


def test_time_is_up_while_the_client_reads_nothing() -> None:
    """The sequences end although nobody takes the error."""

    async def scenario() -> None:
        one, cancelled = ticket(seconds=0.01)
        one.arrive((0, delta(5, "x")))
        arrivals = one.deltas()
        await anext(arrivals)  # and now the client reads no more
        await asyncio.sleep(0.05)
        assert cancelled == [one]
        one.arrive((0, delta(6, "y")))
        assert not one._pending
        with pytest.raises(RequestTimeoutError):
            await anext(arrivals)

    asyncio.run(scenario())


BUFFER = 16 << 10  # bytes at each end of a connection
BODY: dict[str, Any] = {
    "prompt": "hello",
    "max_tokens": 100,
    "n": 4,
    "seed": 3,
    "temperature": 1,
    "ignore_eos": True,
    "logprobs": 20,
}


def unread(url: str, body: dict[str, Any]) -> socket.socket:
    """Asks for a stream, and has a small buffer for the answer."""
    place = urlsplit(url)
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    found.settimeout(SECONDS)
    found.connect((place.hostname, place.port))
    data = dumps(body | {"stream": True}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    found.sendall(head.encode() + data)
    return found


def everything(client: socket.socket) -> str:
    """The rest of what comes, without the lengths of its chunks."""
    found = b""
    while data := client.recv(BUFFER):
        found += data
    return found.decode()


def texts(stream: str) -> dict[int, str]:
    """The text of each choice."""
    found: dict[int, str] = {}
    for line in stream.splitlines():
        if line.startswith("data: {"):
            for one in loads(line[6:])["choices"]:
                found[one["index"]] = found.get(one["index"], "") + one["text"]
    return found


def test_a_client_that_reads_late_gets_everything(checkpoint: Path) -> None:
    """More than the buffers of its connection hold; meanwhile another one is answered."""
    model = fake_model(checkpoint, FakeBackend(batch=4, context=128))
    with running(opening(model)) as server:
        listening = server.http.servers[0].sockets[0]
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)  # connections inherit it
        late = unread(server.url, BODY)
        until(lambda: server.engine.running > 0)
        until(lambda: server.engine.running == 0)  # all of it has been generated
        whole = server.ask("/v1/completions", BODY).json()["choices"]
        stream = everything(late)
        late.close()
    assert "data: [DONE]" in stream[-40:]
    assert texts(stream) == {one["index"]: one["text"] for one in whole}
    # It stood still: what waited was joined.
    assert stream.count("data: {") < BODY["n"] * BODY["max_tokens"] / 2


def test_a_client_that_reads_nothing_is_cut_off(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends after a while, and with it what was kept for it."""
    tickets: list[Ticket] = []

    def noted(*arguments: Any, **options: Any) -> Ticket:
        tickets.append(Ticket(*arguments, **options))
        return tickets[-1]

    def listening(place: Place) -> socket.socket:
        found = _listen(place)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        return found

    monkeypatch.setattr("serve.engine.Ticket", noted)
    monkeypatch.setattr("serve.process._listen", listening)
    backend, status = Steps(batch=4, context=128), list[int]()
    place = Place(port=0, stall_seconds=0.5)
    with in_thread(checkpoint, backend, place, status) as url:
        client = unread(url, BODY)
        until(lambda: bool(tickets))
        until(lambda: tickets[0].closed)
        with pytest.raises(ConnectionError):
            everything(client)
        client.close()
        backend.broken = True
        for _ in range(2):
            until(lambda: httpx.get(f"{url}/health").status_code == 200)
            httpx.post(f"{url}/v1/completions", json={"prompt": "hello", "temperature": 0})
