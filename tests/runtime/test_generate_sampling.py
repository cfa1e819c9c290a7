"""How the generation loop samples: seeds, log probabilities, constraints, penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mkc.runtime.generate import Generator
from mkc.runtime.request import Request
from mkc.runtime.sampling import Array
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.sampling import log_probabilities
from tests.runtime.constraints import Constraint
from tests.runtime.fake_backend import VOCAB
from tests.runtime.fake_backend import FakeBackend
from tests.runtime.fake_backend import scrambled
from tests.runtime.generated import PROMPT
from tests.runtime.generated import generate
from tests.runtime.generated import greedy


def test_a_seed_decides_everything() -> None:
    sampling = SamplingParams(temperature=1.0, seed=11)
    request = Request(tokens=PROMPT, sampling=sampling, max_tokens=12)
    one, two = (Generator(FakeBackend()).generate(request).tokens for _ in range(2))
    other = Request(tokens=PROMPT, sampling=SamplingParams(temperature=1.0, seed=12), max_tokens=12)
    assert one == two
    assert one != Generator(FakeBackend()).generate(other).tokens


def test_without_a_seed_each_request_gets_its_own() -> None:
    seeds = iter([1, 2])
    generator = Generator(FakeBackend(batch=2), new_seed=lambda: next(seeds))
    free = Request(tokens=PROMPT, sampling=SamplingParams(temperature=1.0), max_tokens=12)
    seeded = [
        Request(tokens=PROMPT, sampling=SamplingParams(temperature=1.0, seed=seed), max_tokens=12)
        for seed in (1, 2)
    ]
    found = [one.tokens for one in generate(generator, [free, free])]
    assert found == [one.tokens for one in generate(Generator(FakeBackend()), seeded)]
    assert found[0] != found[1]


def test_log_probabilities_of_every_token() -> None:
    request = Request(tokens=PROMPT, sampling=SamplingParams(alternatives=3), max_tokens=4)
    output = Generator(FakeBackend(rounds=4)).generate(request)
    assert output.tokens == greedy(PROMPT, 4)
    history = list(PROMPT)
    for token, chosen, best in zip(
        output.tokens, output.logprobs, output.alternatives, strict=True
    ):
        expected = log_probabilities(scrambled(history), np.arange(VOCAB))
        assert (chosen.token, chosen.logprob) == (token, expected[token])
        assert [one.token for one in best] == np.argsort(-expected)[:3].tolist()
        history.append(token)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_constraint_is_asked_before_each_token_and_told_each(temperature: float) -> None:
    """One round per launch; the backend masks for a greedy sequence, the host for another."""
    asked: list[list[int]] = []

    def odd_after_even(output: Sequence[int]) -> Array:
        asked.append(list(output))
        return np.arange(VOCAB) % 2 == len(output) % 2

    backend, constraint = FakeBackend(rounds=4), Constraint(odd_after_even)
    request = Request(
        tokens=PROMPT,
        sampling=SamplingParams(temperature=temperature, seed=1),
        constraint=constraint,
        max_tokens=5,
    )
    output = Generator(backend).generate(request)
    assert [token % 2 for token in output.tokens] == [0, 1, 0, 1, 0]
    assert asked == [list(output.tokens[:count]) for count in range(5)]
    assert constraint.output == list(output.tokens)
    assert backend.launches == [1] * 4


def test_a_constraint_binds_its_own_sequence_only() -> None:
    """A greedy, a sampled and a free sequence in the same launches."""

    def even() -> Constraint:
        return Constraint(lambda output: np.arange(VOCAB) % 2 == 0)

    free = Request(tokens=(9,), max_tokens=6)
    requests = [
        Request(tokens=PROMPT, constraint=even(), max_tokens=6),
        free,
        Request(
            tokens=PROMPT,
            sampling=SamplingParams(temperature=1.0, seed=1),
            constraint=even(),
            max_tokens=6,
        ),
    ]
    greedy_one, unbound, sampled = generate(Generator(FakeBackend(batch=3, rounds=4)), requests)
    assert all(token % 2 == 0 for token in (*greedy_one.tokens, *sampled.tokens))
    assert unbound.tokens == greedy((9,), 6)


def test_a_repetition_penalty_remembers_the_prompt_and_the_output() -> None:
    """Strong enough, no token comes twice, and none of the prompt at all."""
    sampling = SamplingParams(repetition_penalty=1e6, presence_penalty=1e6)
    output = Generator(FakeBackend()).generate(
        Request(tokens=PROMPT, sampling=sampling, max_tokens=50)
    )
    assert len(set(output.tokens)) == 50
