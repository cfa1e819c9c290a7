"""Measuring generation, with a clock that only the backend and the host move."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mkc.runtime.measure import Load
from mkc.runtime.measure import measure
from mkc.runtime.sampling import Array
from mkc.runtime.sampling import SamplingParams
from tests.runtime.fake_backend import FakeBackend
from tests.runtime.fake_backend import scrambled


class Watch:
    """Seconds that pass only when somebody says so; every look takes a little."""

    def __init__(self, *, look: float) -> None:
        self.now = 0.0
        self._look = look

    def __call__(self) -> float:
        self.now += self._look
        return self.now


class Working(FakeBackend):
    """Logits of one slot take a second."""

    def __init__(self, watch: Watch, *, batch: int = 1, rounds: int = 1) -> None:
        super().__init__(batch=batch, rounds=rounds, logits=self._work)
        self._watch = watch

    def _work(self, history: Sequence[int]) -> Array:
        self._watch.now += 1.0
        return scrambled(history)


def test_rounds_and_launches_and_the_rates_of_tokens() -> None:
    """9 tokens: one of the prompt, then two launches of four rounds of a second each."""
    watch = Watch(look=0.0)
    load = Load(batch=1, prompt_tokens=8, output_tokens=9)
    found = measure(Working(watch, rounds=4), load, clock=watch)
    assert (found.launches, found.rounds, found.tokens, found.decoded) == (2, 8, 9, 8)
    assert (found.first_token, found.prefill, found.decode) == (1.0, 1.0, 8.0)
    assert (found.decode_rate, found.whole_rate) == (1.0, 1.0)
    assert found.outside == 0.0
    assert found.tokens_per_round == 1.0
    assert (found.drafted, found.accepted) == (0, 0)


def test_sequences_at_once() -> None:
    """Three sequences, a second each in every round; sampling takes one round per launch."""
    watch = Watch(look=0.0)
    sampled = Load(
        batch=3, prompt_tokens=4, output_tokens=5, sampling=SamplingParams(temperature=1)
    )
    found = measure(Working(watch, batch=3, rounds=4), sampled, clock=watch)
    assert (found.launches, found.rounds, found.decoded) == (4, 4, 12)
    assert (found.first_token, found.prefill, found.decode) == (1.0, 3.0, 12.0)
    assert found.tokens_per_round == 1.0, "of one sequence"


def test_time_between_the_calls_is_the_host_s() -> None:
    """Each look at the clock takes 0.25 s, and two of them enclose a call: 0.25 s belong to it."""
    watch = Watch(look=0.25)
    found = measure(Working(watch), Load(batch=1, prompt_tokens=4, output_tokens=5), clock=watch)
    assert found.launches == 4
    assert found.decode - found.outside == pytest.approx(4 * 1.25 + 0.25)  # and one reset
    assert found.outside > 0


def test_the_warm_up_is_not_measured() -> None:
    watch = Watch(look=0.0)
    load = Load(batch=1, prompt_tokens=8, output_tokens=9)
    backend = Working(watch, rounds=4)
    assert measure(backend, load, clock=watch) == measure(backend, load, clock=watch, warm_up=False)
    assert backend.fed == 3 * 8, "the warm-up, and two runs"


def test_outputs_have_their_full_length_and_prompts_differ() -> None:
    load = Load(batch=2, prompt_tokens=16, output_tokens=2)
    first, second = load.requests(vocab=100)
    assert first.ignore_eos
    assert first.max_tokens == 2
    assert first.tokens != second.tokens
    assert load.requests(vocab=100)[0].tokens == first.tokens
