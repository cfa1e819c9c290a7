"""Figures for Prometheus, under vLLM's names where it has them."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client import Counter
from prometheus_client import Gauge
from prometheus_client import Histogram
from prometheus_client import generate_latest

from mkc.runtime.backends.timed import CallTimes
from mkc.runtime.generate import Generator
from mkc.runtime.prefix_cache import PrefixCacheStatistics
from mkc.runtime.request import Finish

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 1, 2.5)
ROUND_SECONDS = (0.0002, 0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1)
TOKENS = (1, 8, 32, 128, 512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True, kw_only=True)
class SequenceTimes:
    """When things happened to one sequence, in seconds of one clock."""

    submitted: float
    added: float
    first_token: float
    ended: float


class Metrics:
    """All figures of one server.

    Attributes:
      acceptance: rounds of a sequence that accepted 0, 1, ... drafts.
      rounds: that have run.
      round_seconds: measured time of a round, the mean of the last turn; 0 before the first one.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.model_name = ""
        self.acceptance: list[int] = []
        self.rounds = 0
        self.round_seconds = 0.0
        self._seen_drafted = 0
        self._seen_cache = (0, 0)
        self._running = self._gauge("num_requests_running", "Sequences that have a slot.")
        self._waiting = self._gauge("num_requests_waiting", "Sequences in the queue.")
        self._usage = self._gauge("kv_cache_usage_perc", "Used part of all positions, 0 to 1.")
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of ended sequences.")
        self._generated = self._counter("generation_tokens", "Generated tokens.")
        self._success = self._counter("request_success", "Ended sequences.", "finished_reason")
        self._queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = self._counter("prefix_cache_hits", "Prompt tokens found.")
        self._preemptions = self._counter("num_preemptions", "Always 0: nothing is preempted.")
        self._drafts = self._counter("spec_decode_num_drafts", "Rounds with drafts.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Verified drafts.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted drafts.")
        self._accepted_at = self._counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by place.", "position"
        )
        self._first = self._histogram("time_to_first_token_seconds", SECONDS)
        self._between = self._histogram("inter_token_latency_seconds", TOKEN_SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", SECONDS)
        self._queued = self._histogram("request_queue_time_seconds", SECONDS)
        self._prefill = self._histogram("request_prefill_time_seconds", SECONDS)
        self._decode = self._histogram("request_decode_time_seconds", SECONDS)
        self._prompt_tokens = self._histogram("request_prompt_tokens", TOKENS)
        self._output_tokens = self._histogram("request_generation_tokens", TOKENS)
        self._round = self._histogram("round_seconds", ROUND_SECONDS, own=True)
        self._predicted = self._gauge(
            "predicted_round_seconds",
            "Predicted least time of a round; NaN where no prediction applies.",
            own=True,
        )
        self._restarts = self._counter("engine_restarts", "Restarts after a crash.", own=True)
        self._cancelled = self._counter("requests_cancelled", "Cancelled sequences.", own=True)

    def serve(self, model_name: str, *, step_floor_us: float | None) -> None:
        """Says what is served; before that there are no figures."""
        self.model_name = model_name
        predicted = float("nan") if step_floor_us is None else step_floor_us / 1e6
        self._predicted.labels(model_name).set(predicted)
        # Looked up once: these are for every token, or for every turn.
        self._generated_here = self._generated.labels(model_name)
        self._between_here = self._between.labels(model_name)
        self._round_here = self._round.labels(model_name)
        for one in (self._prompt, self._generated, self._preemptions, self._queries, self._hits):
            one.labels(model_name).inc(0)
        for one in (self._drafts, self._drafted, self._accepted, self._restarts, self._cancelled):
            one.labels(model_name).inc(0)

    def text(self) -> bytes:
        """In the text format of Prometheus."""
        return generate_latest(self.registry)

    def load(self, *, running: int, waiting: int, usage: float) -> None:
        """Where the engine stands."""
        self._running.labels(self.model_name).set(running)
        self._waiting.labels(self.model_name).set(waiting)
        self._usage.labels(self.model_name).set(usage)

    def restarted(self) -> None:
        """The engine begins anew after a crash."""
        self._restarts.labels(self.model_name).inc()

    def turn(self, times: CallTimes, generator: Generator) -> None:
        """What one turn of the engine took.

        Args:
          times: of this turn.
          generator: for its counters since the engine began.
        """
        if times.rounds:
            self.rounds += times.rounds
            self.round_seconds = times.round_seconds / times.rounds
            self._round_here.observe(self.round_seconds)
        if generator.drafted != self._seen_drafted:
            self._count_drafts(generator)
        if generator.prefix_cache is not None:
            self._count_cache(generator.prefix_cache.statistics)

    def forget_engine(self) -> None:
        """The counters of the engine begin at zero again."""
        self.acceptance = []
        self._seen_drafted = 0
        self._seen_cache = (0, 0)

    def tokens(self, count: int, seconds: float | None) -> None:
        """New tokens of a sequence, `seconds` after those before them."""
        self._generated_here.inc(count)
        if seconds is not None:
            self._between_here.observe(seconds / count)

    def first_token(self, seconds: float) -> None:
        """The time to the first token of a sequence."""
        self._first.labels(self.model_name).observe(seconds)

    def ended(self, finish: Finish, times: SequenceTimes) -> None:
        """A sequence has ended by itself."""
        name = self.model_name
        self._success.labels(name, finish.reason.value).inc()
        self._prompt.labels(name).inc(finish.statistics.prompt_tokens)
        self._whole.labels(name).observe(times.ended - times.submitted)
        self._queued.labels(name).observe(times.added - times.submitted)
        self._prefill.labels(name).observe(times.first_token - times.added)
        self._decode.labels(name).observe(times.ended - times.first_token)
        self._prompt_tokens.labels(name).observe(finish.statistics.prompt_tokens)
        self._output_tokens.labels(name).observe(finish.statistics.output_tokens)

    def cancelled(self) -> None:
        """A sequence was cancelled."""
        self._cancelled.labels(self.model_name).inc()

    def _count_cache(self, statistics: PrefixCacheStatistics) -> None:
        seen = (statistics.prompt_tokens, statistics.hit_tokens)
        if seen != self._seen_cache:
            self._queries.labels(self.model_name).inc(seen[0] - self._seen_cache[0])
            self._hits.labels(self.model_name).inc(seen[1] - self._seen_cache[1])
            self._seen_cache = seen

    def _count_drafts(self, generator: Generator) -> None:
        before = self.acceptance or [0] * len(generator.draft_rounds)
        new = [now - then for now, then in zip(generator.draft_rounds, before, strict=True)]
        self.acceptance = list(generator.draft_rounds)
        name = self.model_name
        self._drafts.labels(name).inc(sum(new))
        self._drafted.labels(name).inc(generator.drafted - self._seen_drafted)
        self._seen_drafted = generator.drafted
        self._accepted.labels(name).inc(sum(count * rounds for count, rounds in enumerate(new)))
        for place in range(len(new) - 1):
            accepted = sum(new[place + 1 :])
            self._accepted_at.labels(name, str(place)).inc(accepted)

    def _gauge(self, name: str, what: str, *, own: bool = False) -> Gauge:
        return Gauge(_named(name, own), what, ["model_name"], registry=self.registry)

    def _counter(self, name: str, what: str, *labels: str, own: bool = False) -> Counter:
        return Counter(_named(name, own), what, ["model_name", *labels], registry=self.registry)

    def _histogram(self, name: str, buckets: tuple[float, ...], *, own: bool = False) -> Histogram:
        words = name.replace("_", " ").capitalize()
        return Histogram(
            _named(name, own),
            f"{words}.",
            ["model_name"],
            buckets=buckets,
            registry=self.registry,
        )


def _named(name: str, own: bool) -> str:
    return f"mkc:{name}" if own else f"vllm:{name}"
