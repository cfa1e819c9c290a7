"""Many clients at once, half of which leave early, between requests that make no sense.

    python -m bench.serve_load                     # 64 clients for 2 minutes
    python -m bench.serve_load --seconds 5 --clients 8

Every answer that completes has to be the one that the same request gets alone; refusals have to be
those that were asked for; afterwards no row is taken, and memory has not grown.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from typing import Any
from urllib.request import urlopen

from bench.serve_process import Connection
from bench.serve_process import ServerProcess
from bench.serve_process import started

PATH = "/v1/completions"
LEAVING = 0.5  # of the requests that make sense
CHUNK_TOKENS = 10  # more than a chunk has, so that most clients leave in the middle
MALFORMED = 0.1  # of all requests
FORMED = 0.25  # of the requests that make sense
GROWTH = 0.05  # of memory, from a quarter of the time on
SETTLE_SECONDS = 10.0
WORDS = ("What is", "Once", "12 + 7", "The cat", "Write", "print(", "Grüße", "Add 30 and")
FORMS: tuple[dict[str, Any], ...] = (
    {"guided_regex": "([A-Za-z ,]{1,30}[.!?] )+"},
    {"guided_json": {"type": "array", "items": {"type": "integer"}, "maxItems": 20}},
    {"guided_json": {"type": "object", "properties": {"text": {"type": "string"}}}},
)
BAD: tuple[tuple[bytes | dict[str, Any], int], ...] = (
    (b"{", 400),
    (b"[]", 400),
    ({"prompt": "x", "unknown": 1}, 400),
    ({"prompt": "x", "temperature": "hot"}, 400),
    ({"prompt": [10**6]}, 400),
    ({"prompt": "x", "max_tokens": 10**6}, 400),
    ({"prompt": "x", "model": "another"}, 404),
)


@dataclass(kw_only=True)
class Result:
    """What happened.

    Attributes:
      counts: requests by how they ended.
      problems: what must not happen.
      tokens: that clients received.
      seconds: that the load took.
      memory: bytes of the server, over time.
    """

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    memory: list[int] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """How much memory grew from a quarter of the time to the end, as a part of it."""
        if len(self.memory) < 4:
            return 0.0
        begin = self.memory[len(self.memory) // 4]
        return self.memory[-1] / begin - 1


def requests(seed: int, count: int) -> list[dict[str, Any]]:
    """Streaming requests, greedy and sampled ones with seeds, of many lengths, some with a form."""
    chosen = random.Random(seed)
    found: list[dict[str, Any]] = []
    for _ in range(count):
        body = {
            "prompt": " ".join(chosen.choices(WORDS, k=chosen.randint(1, 30))),
            "max_tokens": chosen.randint(1, 120),
            "ignore_eos": chosen.random() < 0.7,
            "temperature": chosen.choice((0.0, 0.0, 0.7, 1.3)),
            "seed": chosen.randrange(1000),
            "stream": True,
        }
        if chosen.random() < FORMED:
            body |= {"ignore_eos": False, **chosen.choice(FORMS)}
        found.append(body)
    return found


async def text_of(
    server: ServerProcess, body: dict[str, Any], *, leave_after: int | None
) -> str | None:
    """The streamed text; None when the client left.

    Args:
      leave_after: so many chunks.
    """
    connection = Connection(server)
    try:
        reply = await connection.post(PATH, body)
        if reply.status != 200:
            raise AssertionError(f"status {reply.status}")
        text = []
        number = 0
        async for line in reply.lines:
            if line == b"[DONE]":
                return "".join(text)
            number += 1
            if leave_after is not None and number > leave_after:
                return None
            chunk = json.loads(line)
            if "error" in chunk:
                raise AssertionError(str(chunk["error"]))
            text += [one["text"] for one in chunk["choices"]]
        raise AssertionError("the stream ended without [DONE]")
    finally:
        connection.close()


async def refusal_of(server: ServerProcess, body: bytes | dict[str, Any]) -> int:
    """The status of a request that makes no sense."""
    connection = Connection(server)
    try:
        return (await connection.post(PATH, body)).status
    finally:
        connection.close()


async def client(
    server: ServerProcess,
    pool: Sequence[tuple[dict[str, Any], str]],
    end: float,
    chosen: random.Random,
    result: Result,
) -> None:
    """Asks until time is up."""
    while time.monotonic() < end:
        if chosen.random() < MALFORMED:
            body, expected = chosen.choice(BAD)
            status = await refusal_of(server, body)
            result.counts["refused"] += 1
            if status != expected:
                result.problems.append(f"status {status}, not {expected}, for {body!r}")
            continue
        request, expected_text = chosen.choice(pool)
        longest = request["max_tokens"] // CHUNK_TOKENS
        leave = chosen.randint(0, longest) if chosen.random() < LEAVING else None
        try:
            text = await text_of(server, request, leave_after=leave)
        except (AssertionError, OSError, asyncio.IncompleteReadError) as error:
            result.problems.append(f"{type(error).__name__}: {error}")
            continue
        result.counts["left" if text is None else "completed"] += 1
        if text is not None and text != expected_text:
            result.problems.append(f"another text than alone: {request}")


async def watch(server: ServerProcess, end: float, result: Result) -> None:
    """Notes the server's memory."""
    while server.pid is not None and time.monotonic() < end:
        result.memory.append(server.resident_bytes)
        await asyncio.sleep(0.5)


async def run_load(
    server: ServerProcess, *, clients: int, seconds: float, seed: int, different: int
) -> Result:
    """The whole load; what went wrong is in `problems`.

    Args:
      different: requests to choose from; each is asked alone first.
    """
    pool = []
    for request in requests(seed, different):
        text = await text_of(server, request, leave_after=None)
        assert text is not None
        pool.append((request, text))
    result = Result()
    begin = time.monotonic()
    end = begin + seconds
    await asyncio.gather(
        watch(server, end, result),
        *(client(server, pool, end, random.Random(seed + n), result) for n in range(clients)),
    )
    result.seconds = time.monotonic() - begin
    await _settle(server, result)
    return result


async def _settle(server: ServerProcess, result: Result) -> None:
    """Rows and queue have to become empty, and the server has to be well."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        with urlopen(f"http://127.0.0.1:{server.port}/load") as answer:
            state = json.load(answer)
        if not (state["running"] or state["waiting"]):
            return
        if time.monotonic() > end:
            result.problems.append(f"rows are still taken: {state}")
            return
        await asyncio.sleep(0.1)


def main() -> int:
    """Prints what happened; status 1 when something did that must not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--different", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="more options of mkc serve, behind --")
    given = parser.parse_args()
    with started("--context", "512", *given.options) as server:
        result = asyncio.run(
            run_load(
                server,
                clients=given.clients,
                seconds=given.seconds,
                seed=given.seed,
                different=given.different,
            )
        )
    if given.seconds >= 60 and result.growth > GROWTH:
        result.problems.append(f"memory grew by {100 * result.growth:.1f} %")
    print(f"{given.clients} clients, {result.seconds:.0f} s: {dict(result.counts)}")
    print(f"memory {result.memory[-1] / 1e6:.0f} MB, growth {100 * result.growth:+.1f} %")
    for problem, count in Counter(result.problems).most_common(10):
        print(f"problem, {count} times: {problem}")
    return int(bool(result.problems))


if __name__ == "__main__":
    sys.exit(main())
