"""The engine with a backend that makes tokens up: who runs when, and how it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mkc.errors import BackendError
from mkc.errors import EngineError
from mkc.errors import NotServingError
from mkc.errors import PromptTokenError
from mkc.errors import QueueFullError
from mkc.errors import RequestFieldError
from mkc.errors import RequestTimeoutError
from mkc.runtime.generate import Generator
from mkc.runtime.request import Delta
from mkc.runtime.request import Request
from mkc.runtime.sampling import Array
from mkc.runtime.sampling import SamplingParams
from serve.engine import Engine
from serve.engine import State
from serve.ticket import Ticket
from tests.runtime.fake_backend import FakeBackend
from tests.serve.running import SECONDS
from tests.serve.running import fake_model
from tests.serve.running import opening
from tests.serve.running import until


class Steps(FakeBackend):
    """Notes its calls, and can be held, or made to fail.

    Attributes:
      calls: "prefill" and "round" in order.
      held: launches wait while it is set to be held.
      broken: the next launch fails.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []
        self.free = threading.Event()
        self.free.set()
        self.waiting = threading.Event()
        self.broken = False

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        self.calls.append("prefill")
        return super().prefill(slot, tokens, position)

    def greedy_rounds(self, *arguments: Any, **options: Any) -> Array:
        if not self.free.is_set():
            self.waiting.set()
            assert self.free.wait(SECONDS)
        if self.broken:
            raise ZeroDivisionError("what a user wrote")
        self.calls.append("round")
        return super().greedy_rounds(*arguments, **options)


@contextmanager
def started(folder: Path, backend: FakeBackend, **options: Any) -> Iterator[Engine]:
    """An engine that is ready; it is drained at the end."""
    engine = Engine(opening(fake_model(folder, backend)), **options)
    engine.start()
    until(lambda: engine.model is not None)
    try:
        yield engine
    finally:
        engine.drain()
        assert engine.join(SECONDS)


def ask(length: int = 8, *, prompt: int = 3, first: int = 1, **options: Any) -> Request:
    tokens = [first + place for place in range(prompt)]
    return Request(tokens=tokens, max_tokens=length, **options)


async def answered(ticket: Ticket) -> list[int]:
    """Tokens of the first sequence."""
    return [token async for index, delta in ticket.deltas() if index == 0 for token in delta.tokens]


def submit(engine: Engine, *requests: Request, owner: str = "a", **options: Any) -> Ticket:
    return engine.submit(requests, owner=owner, **options)


def alone(request: Request) -> list[int]:
    return list(Generator(FakeBackend(context=128), stop_ids=()).generate(request).tokens)


def in_loop(scenario: Callable[[], Awaitable[None]]) -> None:
    """Runs a scenario, for at most `SECONDS`."""

    async def bounded() -> None:
        await asyncio.wait_for(scenario(), SECONDS)  # type: ignore[arg-type]

    asyncio.run(bounded())


def test_more_requests_than_slots_get_what_each_gets_alone(checkpoint: Path) -> None:
    """Greedy and sampled ones, of different lengths, join and leave between rounds."""
    requests = [
        ask(
            4 + 3 * (place % 4),
            first=place,
            ignore_eos=True,
            sampling=SamplingParams(temperature=float(place % 2), seed=place),
        )
        for place in range(10)
    ]
    expected = [alone(one) for one in requests]
    with started(checkpoint, FakeBackend(batch=3, context=128)) as engine:

        async def scenario() -> None:
            tickets = [submit(engine, one) for one in requests]
            assert await asyncio.gather(*map(answered, tickets)) == expected

        in_loop(scenario)
        assert engine.running == engine.waiting == 0


def test_chunks_of_a_prompt_alternate_with_rounds(checkpoint: Path) -> None:
    """A running stream waits for one chunk at most, however long another one's prompt is."""
    backend = Steps(batch=2, context=128)  # chunks have 8 tokens
    with started(checkpoint, backend) as engine:

        async def scenario() -> None:
            backend.free.clear()
            stream = submit(engine, ask(60, ignore_eos=True))
            assert backend.waiting.wait(SECONDS)
            backend.calls.clear()
            other = submit(engine, ask(2, prompt=40))
            backend.free.set()
            await answered(other)
            chunks = [place for place, one in enumerate(backend.calls) if one == "prefill"]
            assert len(chunks) == 5
            between = zip(chunks[:-1], chunks[1:], strict=True)
            assert all("round" in backend.calls[one:other] for one, other in between)
            stream.close()

        in_loop(scenario)


def test_a_closed_ticket_frees_its_slot_within_a_round(checkpoint: Path) -> None:
    backend = Steps(batch=1, context=128)
    with started(checkpoint, backend) as engine:

        async def scenario() -> None:
            backend.free.clear()
            ticket = submit(engine, ask(100, ignore_eos=True))
            assert backend.waiting.wait(SECONDS)  # in a launch
            backend.calls.clear()
            ticket.close()
            backend.free.set()
            await answered(submit(engine, ask(2)))
            # The launch that was under way, and then it is the other one's turn.
            assert backend.calls == ["round", "prefill", "round"]

        in_loop(scenario)
        assert engine.running == 0


def test_a_ticket_that_is_closed_in_the_queue_never_runs(checkpoint: Path) -> None:
    backend = Steps(batch=1, context=128)
    with started(checkpoint, backend) as engine:

        async def scenario() -> None:
            backend.free.clear()
            first = submit(engine, ask(5))
            assert backend.waiting.wait(SECONDS)
            second = submit(engine, ask(5, prompt=9))
            second.close()
            backend.free.set()
            await answered(first)

        in_loop(scenario)
        assert backend.calls.count("prefill") == 1


def test_a_full_queue_says_when_to_come_back(checkpoint: Path) -> None:
    backend = Steps(batch=1, context=128)
    with started(checkpoint, backend, queue_size=2) as engine:

        async def scenario() -> None:
            backend.free.clear()
            running = submit(engine, ask(5))
            assert backend.waiting.wait(SECONDS)
            queued = submit(engine, ask(5), ask(5))
            with pytest.raises(QueueFullError) as refused:
                submit(engine, ask(5))
            assert refused.value.retry_after >= 1
            with pytest.raises(RequestFieldError, match="at most 3"):
                submit(engine, *[ask(5)] * 4)  # which will never have room
            backend.free.set()
            await answered(running)
            await answered(queued)
            assert len(await answered(submit(engine, ask(5)))) == 5

        in_loop(scenario)


def test_a_crash_answers_everyone_and_the_model_is_opened_once_more(checkpoint: Path) -> None:
    backend = Steps(batch=1, context=128)
    opened: list[str] = []
    ended: list[State] = []

    def open_model(say: Callable[[str], None]) -> Any:
        opened.append("opened")
        backend.broken = False
        backend.slots[0] = [1, 2]  # whatever the crash has left
        return fake_model(checkpoint, backend)

    engine = Engine(open_model, on_end=ended.append)
    engine.start()
    until(lambda: engine.model is not None)

    async def scenario() -> None:
        for crash in (1, 2):
            backend.free.clear()
            backend.waiting.clear()
            tickets = [submit(engine, ask(5)), submit(engine, ask(5))]
            assert backend.waiting.wait(SECONDS)
            backend.broken = True
            backend.free.set()
            for one in tickets:
                with pytest.raises(EngineError, match="ZeroDivisionError") as failed:
                    await answered(one)
                assert "a user wrote" not in str(failed.value)
            if crash == 1:
                until(lambda: engine.model is not None)
                assert await answered(submit(engine, ask(5))) == alone(ask(5, ignore_eos=True))

    in_loop(scenario)
    assert engine.join(SECONDS)
    assert opened == ["opened"] * 2
    assert ended == [State.FAILED]
    assert b'engine_restarts_total{model_name="fake"} 1.0' in engine.metrics.text()


class Unable(Steps):
    """Cannot clear a slot.

    Attributes:
      unable: the next time.
    """

    unable = False

    def reset(self, slot: int) -> None:
        if self.unable:
            self.unable = False
            raise ZeroDivisionError
        super().reset(slot)


def test_a_crash_while_a_request_joins_answers_it_too(checkpoint: Path) -> None:
    """And the one that was refused before it, and the one that waits behind it."""
    backend = Unable(batch=2, context=128)
    nothing = ask(4, prompt=0)
    with started(checkpoint, backend) as engine:

        async def scenario() -> None:
            backend.free.clear()
            first = submit(engine, ask(5))
            assert backend.waiting.wait(SECONDS)
            refused, joins, waits = (submit(engine, one) for one in (nothing, ask(5), ask(5)))
            backend.unable = True
            backend.free.set()
            with pytest.raises(PromptTokenError):
                await answered(refused)
            for one in (first, joins, waits):
                with pytest.raises(EngineError):
                    await answered(one)
            until(lambda: engine.model is not None)
            assert len(await answered(submit(engine, ask(5)))) == 5

        in_loop(scenario)


def test_a_model_that_does_not_open_is_not_tried_again() -> None:
    error = BackendError(backend="tpu", problem="there is no TPU", hint="Buy one")
    opened: list[str] = []

    def open_model(say: Callable[[str], None]) -> Any:
        opened.append("opened")
        raise error

    engine = Engine(open_model)
    engine.start()
    assert engine.join(SECONDS)
    assert (engine.state, engine.error, opened) == (State.FAILED, error, ["opened"])


def test_draining_finishes_what_was_taken_and_takes_no_more(checkpoint: Path) -> None:
    backend = Steps(batch=1, context=128)
    with started(checkpoint, backend) as engine:

        async def scenario() -> None:
            backend.free.clear()
            running, queued = submit(engine, ask(5)), submit(engine, ask(6))
            assert backend.waiting.wait(SECONDS)
            engine.drain()
            with pytest.raises(NotServingError, match="draining"):
                submit(engine, ask(5))
            backend.free.set()
            assert len(await answered(running)) == 5
            assert len(await answered(queued)) == 6

        in_loop(scenario)
        assert engine.join(SECONDS)
        assert engine.state is State.STOPPED


def test_requests_before_the_model_is_open_are_refused(checkpoint: Path) -> None:
    go = threading.Event()

    def open_model(say: Callable[[str], None]) -> Any:
        say("reading")
        assert go.wait(SECONDS)
        return fake_model(checkpoint, FakeBackend())

    engine = Engine(open_model)
    engine.start()
    until(lambda: engine.stage == "reading")
    with pytest.raises(NotServingError, match="loading"):
        engine.ready_model()
    go.set()
    until(lambda: engine.state is State.READY)
    engine.drain()
    assert engine.join(SECONDS)


def test_time_is_up(checkpoint: Path) -> None:
    backend = Steps(batch=1, context=128)
    with started(checkpoint, backend) as engine:

        async def scenario() -> None:
            backend.free.clear()
            with pytest.raises(RequestTimeoutError, match=r"0\.05 s"):
                await answered(submit(engine, ask(5), seconds=0.05))
            backend.free.set()
            assert len(await answered(submit(engine, ask(5)))) == 5

        in_loop(scenario)
        assert engine.running == 0


def test_an_error_of_one_sequence_is_not_one_of_another(checkpoint: Path) -> None:
    """A bias that removes every token."""
    nothing = SamplingParams(logit_bias={token: float("-inf") for token in range(420)})
    with started(checkpoint, FakeBackend(batch=2, context=128)) as engine:

        async def scenario() -> None:
            good, bad = submit(engine, ask(9)), submit(engine, ask(9, sampling=nothing), ask(9))
            with pytest.raises(Exception, match="no token is allowed"):
                await answered(bad)
            assert len(await answered(good)) == 9

        in_loop(scenario)
        until(lambda: engine.running == 0)  # the bad one's neighbour is cancelled


def test_prompts_that_begin_alike_are_read_once(checkpoint: Path) -> None:
    backend = FakeBackend(batch=2, context=128)
    with started(checkpoint, backend) as engine:

        async def scenario() -> None:
            async def last(ticket: Ticket) -> Delta:
                return [delta async for _, delta in ticket.deltas()][-1]

            await last(submit(engine, ask(2, prompt=20)))
            finish = (await last(submit(engine, ask(2, prompt=20)))).finish
            assert finish is not None
            assert finish.statistics.cached_tokens == 16

        in_loop(scenario)
        until(lambda: b'prefix_cache_hits_total{model_name="fake"} 16.0' in engine.metrics.text())
        assert b'prefix_cache_queries_total{model_name="fake"} 40.0' in engine.metrics.text()
