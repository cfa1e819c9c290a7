"""How fast a backend generates: times of the calls, of the host, and of the first token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace
from time import perf_counter

import numpy as np

from mkc.runtime.backends.backend import Backend
from mkc.runtime.backends.timed import TimedBackend
from mkc.runtime.backends.timed import timed
from mkc.runtime.generate import Generator
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request
from mkc.runtime.request import SequenceStatistics
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.text import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is generated.

    Attributes:
      batch: sequences at once.
      prompt_tokens, output_tokens: of each sequence.
      sampling: the seeds are replaced, so that the sequences differ.
    """

    batch: int
    prompt_tokens: int
    output_tokens: int
    sampling: SamplingParams = SamplingParams()

    def requests(self, vocab: int) -> list[Request]:
        """Prompts of random tokens that are the same every time; outputs have their full length."""
        tokens = np.random.default_rng(0).integers(vocab, size=(self.batch, self.prompt_tokens))
        return [
            Request(
                tokens=prompt.tolist(),
                sampling=replace(self.sampling, seed=number),
                max_tokens=self.output_tokens,
                ignore_eos=True,
            )
            for number, prompt in enumerate(tokens)
        ]


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One run of a load. Times are in seconds.

    Attributes:
      first_token: from adding a request to its first token, while nothing else runs: the slowest.
      prefill: from the first request to the first token of the last one.
      decode: from there to the last token of all.
      outside: part of `decode` outside the calls of the backend.
      launches: calls of the backend in `decode`; `rounds` steps ran in them.
      tokens: emitted, first tokens included.
      decoded: emitted in `decode`.
      drafted, accepted: as in `SequenceStatistics`, of all sequences.
      rounds_of_sequences: rounds in which a sequence emitted something, over all sequences.
    """

    first_token: float
    prefill: float
    decode: float
    outside: float
    launches: int
    rounds: int
    tokens: int
    decoded: int
    drafted: int
    accepted: int
    rounds_of_sequences: int

    @property
    def decode_rate(self) -> float:
        """Tokens per second of `decode`, of all sequences together."""
        return self.decoded / self.decode

    @property
    def whole_rate(self) -> float:
        """Tokens per second, prompts included in the time."""
        return self.tokens / (self.prefill + self.decode)

    @property
    def outside_per_launch(self) -> float:
        """Seconds of the host per launch."""
        return self.outside / self.launches

    @property
    def tokens_per_round(self) -> float:
        """Of one sequence: 1 without speculation."""
        return self.decoded / self.rounds_of_sequences


def measure(
    backend: Backend,
    load: Load,
    *,
    tokenizer: Tokenizer | None = None,
    warm_up: bool = True,
    clock: Callable[[], float] = perf_counter,
) -> Measurement:
    """Runs a load on an idle backend; all of its slots are free before and after.

    Args:
      tokenizer: makes text of the tokens; without it the host has less to do.
      warm_up: run it once before it is measured, so that nothing is compiled in the measured time.
      clock: seconds.
    """
    assert load.output_tokens >= 2, "there is nothing to decode after the first token"
    measured = timed(backend, clock=clock)
    for _ in range(2 if warm_up else 1):
        generator = Generator(measured, tokenizer=tokenizer, clock=clock)
        found = _run(generator, measured, load, clock)
    return found


def _run(
    generator: Generator, backend: TimedBackend, load: Load, clock: Callable[[], float]
) -> Measurement:
    start = clock()
    first_token = 0.0
    for request in load.requests(backend.vocab):
        added = clock()
        generator.prefill(generator.add(request))
        first_token = max(first_token, clock() - added)
    decoding = clock()
    backend.take_times()
    ended: list[SequenceStatistics] = []
    while generator.running:
        for delta in generator.rounds():
            if delta.finish is not None:
                assert delta.finish.reason is FinishReason.LENGTH, str(delta.finish.error)
                ended.append(delta.finish.statistics)
    decode = clock() - decoding
    times = backend.take_times()
    tokens = sum(one.output_tokens for one in ended)
    return Measurement(
        first_token=first_token,
        prefill=decoding - start,
        decode=decode,
        outside=decode - times.seconds,
        launches=times.launches,
        rounds=times.rounds,
        tokens=tokens,
        decoded=tokens - load.batch,
        drafted=sum(one.drafted for one in ended),
        accepted=sum(one.accepted for one in ended),
        rounds_of_sequences=sum(one.rounds for one in ended),
    )
