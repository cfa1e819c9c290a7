"""What the server costs: batched throughput, and time per streamed token.

    python -m bench.serve_speed

Both are measured with the small model without drafts. Rates are those of a server with eight rows,
asked by one client and by eight, and of a server with one row, asked by one client. The overhead is
the time per token of one streaming client, which reads from a socket in another process, less that
of the same loop without a server. Processor times, which a busy machine disturbs less, are below
them; they include those of XLA's threads.

The speed of a machine changes, so everything is measured in turn, several times, and compared with
what ran next to it: of these ratios and differences the median counts. Its spread, the middle half,
says how far to trust it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from bench.serve_process import Connection
from bench.serve_process import ServerProcess
from bench.serve_process import started
from mkc.cli.generation import BackendChoice
from mkc.cli.generation import ModelChoice
from mkc.cli.generation import open_session
from mkc.runtime.generate import Generator
from mkc.runtime.request import Request

ROWS = 8
TOKENS = 200
CONTEXT = 256
PROMPT = [10 + place for place in range(8)]
WANTED_RATIO = 3.0
WANTED_OVERHEAD_MS = 0.3


async def stream(server: ServerProcess) -> tuple[float, float]:
    """Times of the first and of the last token of one streamed answer."""
    connection = Connection(server)
    body = {
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "draft": False,
    }
    reply = await connection.post("/v1/completions", body)
    assert reply.status == 200
    times = [time.perf_counter() async for _ in reply.lines]
    connection.close()
    return times[0], times[-1]


def rate(server: ServerProcess, clients: int) -> float:
    """Tokens per second of clients that ask at once, prompts included."""

    async def ask() -> None:
        await asyncio.gather(*(stream(server) for _ in range(clients)))

    start = time.perf_counter()
    asyncio.run(ask())
    return clients * TOKENS / (time.perf_counter() - start)


def streamed_ms(server: ServerProcess) -> tuple[float, float]:
    """Time per token of one stream, and the server's processor time, in milliseconds."""
    before = server.cpu_seconds
    first, last = asyncio.run(stream(server))
    return 1e3 * (last - first) / (TOKENS - 1), 1e3 * (server.cpu_seconds - before) / TOKENS


def direct_ms(generator: Generator) -> tuple[float, float]:
    """The same of the loop alone."""
    number = generator.add(Request(tokens=PROMPT, max_tokens=TOKENS, ignore_eos=True, draft=False))
    generator.prefill(number)
    start, processor = time.perf_counter(), time.process_time()
    while number in generator.running:
        generator.rounds(1)
    passed, used = time.perf_counter() - start, time.process_time() - processor
    return 1e3 * passed / (TOKENS - 1), 1e3 * used / TOKENS


def open_generator() -> Generator:
    """Eight rows, as the server has them."""
    choice = ModelChoice(
        model=None,
        weights=None,
        revision=None,
        packed=None,
        backend=BackendChoice.REFERENCE,
        target="tpu7x",
        tp=None,
        context=CONTEXT,
        spec="none",
    )
    return open_session(choice, quiet=True, slots=ROWS).generator


@dataclass(frozen=True, kw_only=True)
class Middle:
    """The middle of several measurements: the median, and a quarter of them on either side."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, measured: Sequence[float]) -> Middle:
        low, median, high = quantiles(measured, n=4, method="inclusive")
        return cls(low=low, median=median, high=high)

    def __format__(self, form: str) -> str:
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def verdict(measured: Middle, wanted: float, *, at_least: bool) -> str:
    """Whether the median is good enough."""
    good = measured.median >= wanted if at_least else measured.median <= wanted
    return f"{'at least' if at_least else 'below'} {wanted:g}: {'yes' if good else 'NO'}"


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="at least 2")
    repeats = parser.parse_args().repeats
    options: Sequence[str] = ("--context", str(CONTEXT), "--spec", "none", "--rows")
    generator = open_generator()
    direct_ms(generator)
    with started(*options, str(ROWS)) as server, started(*options, "1") as narrow:
        rate(server, ROWS)
        rate(narrow, 1)
        one, alone, many, streams, loops = [], [], [], [], []
        for _ in range(repeats):  # alternately: the machine is not always equally busy
            one.append(rate(server, 1))
            alone.append(rate(narrow, 1))
            many.append(rate(server, ROWS))
            streams.append(streamed_ms(server))
            loops.append(direct_ms(generator))
    print(f"tokens/s of {ROWS} rows with {ROWS} clients: {Middle.of(many):.0f}")
    for what, found in ((f"{ROWS} rows with one client", one), ("one row", alone)):
        ratio = Middle.of([a / b for a, b in zip(many, found, strict=True)])
        print(
            f"tokens/s of {what}: {Middle.of(found):.0f}, ratio {ratio:.2f}, "
            f"{verdict(ratio, WANTED_RATIO, at_least=True)}"
        )
    for name, place in (("time", 0), ("processor time", 1)):
        streamed, loop = ([one[place] for one in runs] for runs in (streams, loops))
        overhead = Middle.of([a - b for a, b in zip(streamed, loop, strict=True)])
        print(
            f"{name} per token: streamed {Middle.of(streamed):.3f} ms, "
            f"loop alone {Middle.of(loop):.3f} ms, overhead {overhead:.3f} ms, "
            f"{verdict(overhead, WANTED_OVERHEAD_MS, at_least=False)}"
        )


if __name__ == "__main__":
    main()
