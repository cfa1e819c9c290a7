"""Generation with the golden models: recorded tokens, states, and what a slot remembers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mkc.runtime.backends.backend import Backend
from mkc.runtime.generate import Generator
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.request import Delta
from mkc.runtime.request import FinishReason
from mkc.runtime.request import Request
from mkc.runtime.sampling import Array
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.token_masks import pack_mask
from tests.goldens import golden_case
from tests.runtime.backends import BATCH
from tests.runtime.backends import backend_of
from tests.runtime.constraints import Constraint

# The kernel of the larger model takes half a minute to compile for the interpreter.
LANE_REFERENCE = pytest.param("qwen38_lane", "reference", 1, id="lane-reference")
MINI_REFERENCE = pytest.param("qwen38_mini", "reference", 1, id="mini-reference")
LANE_KERNEL = pytest.param("qwen38_lane", "interpret", 1, id="lane-interpret")
MINI_KERNEL = pytest.param(
    "qwen38_mini", "interpret", 1, id="mini-interpret", marks=pytest.mark.long
)
LANE_RANKS = pytest.param(
    "qwen38_lane", "interpret", 2, id="lane-interpret-2-ranks", marks=pytest.mark.long
)
GOLDENS = [LANE_REFERENCE, MINI_REFERENCE, LANE_KERNEL, MINI_KERNEL]
BACKENDS = [LANE_REFERENCE, LANE_KERNEL, LANE_RANKS]

PROMPTS = ((3, 1, 4, 1, 5), tuple(range(20, 43)), (7,) * 17)
SAMPLINGS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.95, seed=5),
    SamplingParams(temperature=1.2, frequency_penalty=0.3, seed=6, alternatives=2),
)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    name, kind, ranks = request.param
    found = backend_of(name, kind, ranks=ranks)
    assert found.name == kind
    for slot in range(found.batch):
        found.reset(slot)
    return found


def on(cases: list[Any]) -> pytest.MarkDecorator:
    """Runs a test on backends."""
    params = [pytest.param(one.values, id=one.id, marks=one.marks) for one in cases]
    return pytest.mark.parametrize("backend", params, indirect=True)


def remembered(backend: Backend, slot: int, positions: int) -> Mapping[str, bytes]:
    """The bits of a slot that has seen so many positions; cache rows beyond them do not count."""
    found = {}
    for key, state in backend.state(slot).items():
        rows = state[:, :positions] if ".kv." in key else state
        found[key] = rows.tobytes()
    return found


def run_for(generator: Generator, sequence: int, tokens: int) -> list[int]:
    """Runs until a sequence has emitted at least so many tokens; these, of this sequence."""
    emitted: list[int] = []
    while len(emitted) < tokens:
        for delta in generator.rounds(1):
            if delta.sequence == sequence:
                emitted += delta.tokens
    return emitted


@pytest.mark.parametrize(("name", "kind", "ranks"), GOLDENS)
def test_greedy_tokens_are_the_recorded_ones(name: str, kind: str, ranks: int) -> None:
    case = golden_case(name)
    expected = case.expected["decode.tokens"].tolist()
    generator = Generator(backend_of(name, kind, ranks=ranks))
    prompt = case.expected["prompt"].tolist()
    output = generator.generate(Request(tokens=prompt, max_tokens=len(expected)))
    assert list(output.tokens) == expected
    assert output.finish.reason is FinishReason.LENGTH


@pytest.mark.parametrize(("name", "kind", "ranks"), [LANE_REFERENCE, LANE_KERNEL])
def test_stop_ids_end_a_launch_of_several_rounds(name: str, kind: str, ranks: int) -> None:
    case = golden_case(name)
    expected = case.expected["decode.tokens"].tolist()
    stop = next(one for place, one in enumerate(expected) if place == expected.index(one) >= 2)
    generator = Generator(backend_of(name, kind, ranks=ranks), stop_ids={stop})
    output = generator.generate(Request(tokens=case.expected["prompt"].tolist(), max_tokens=20))
    assert list(output.tokens) == expected[: expected.index(stop) + 1]
    assert output.finish.stop == stop


@on(BACKENDS)
def test_a_sequence_is_the_same_alone_and_among_others(backend: Backend) -> None:
    """Tokens, log-probabilities and states, bit for bit, whichever slot it has."""
    requests = [
        Request(tokens=prompt, sampling=sampling, max_tokens=9 + 3 * place)
        for place, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True))
    ]
    alone = [list(Generator(backend).run([request])) for request in requests]
    together = list(Generator(backend).run(requests))
    for number, deltas in enumerate(alone):
        mine = [one for one in together if one.sequence == number]
        assert joined(mine) == joined(deltas)


def joined(deltas: list[Delta]) -> tuple[list[int], list[Any], list[Any]]:
    """What a sequence emitted, however many tokens came with one delta."""
    return (
        [token for one in deltas for token in one.tokens],
        [entry for one in deltas for entry in one.logprobs],
        [entry for one in deltas for entry in one.alternatives],
    )


@on(BACKENDS)
def test_states_are_the_same_alone_and_among_others(backend: Backend) -> None:
    request = Request(tokens=PROMPTS[1])
    generator = Generator(backend)
    number = generator.add(request)
    tokens = run_for(generator, number, 6)
    seen = len(request.tokens) + len(tokens) - 1
    expected = remembered(backend, generator.slot(number), seen)
    generator.cancel(number)

    others = [generator.add(Request(tokens=PROMPTS[place])) for place in (0, 2)]
    run_for(generator, others[1], 3)
    generator.cancel(others[0])
    number = generator.add(request)
    late = generator.add(Request(tokens=PROMPTS[0], sampling=SAMPLINGS[1]))
    assert run_for(generator, number, 6) == tokens
    assert late in generator.running
    assert remembered(backend, generator.slot(number), seen) == expected


@on(BACKENDS)
def test_what_an_idle_slot_remembers_does_not_change(backend: Backend) -> None:
    """While other slots are prefilled, stepped, launched, saved, restored and reset."""
    backend.prefill(1, PROMPTS[1], 0)
    seen = len(PROMPTS[1])
    before = remembered(backend, 1, seen)
    assert any(any(bits) for bits in before.values())
    backend.prefill(0, PROMPTS[0], 0)
    backend.step([7, 0, 0], [5, 0, 0], [True, False, False])
    assert remembered(backend, 1, seen) == before
    backend.greedy_rounds([7, 0, 8], [6, 0, 0], [True, False, True], rounds=[3] * BATCH)
    kept = backend.save(0, start=0, end=9)
    backend.restore(2, [kept])
    backend.reset(0)
    backend.greedy_rounds([7, 0, 8], [0, 0, 9], [True, False, True], rounds=[4] * BATCH)
    assert remembered(backend, 1, seen) == before
    # And it goes on as if nothing had happened.
    logits = backend.step([0, 9, 0], [0, seen, 0], [False, True, False]).logits[1]
    backend.reset(1)
    backend.prefill(1, PROMPTS[1], 0)
    again = backend.step([0, 9, 0], [0, seen, 0], [False, True, False]).logits[1]
    assert_array_equal(logits, again)


@on(BACKENDS)
def test_a_restored_slot_is_the_saved_one(backend: Backend) -> None:
    """In two parts, into another slot, while the first one has gone on."""
    first, rest = PROMPTS[1][:16], PROMPTS[1][16:]
    backend.prefill(0, first, 0)
    chain = [backend.save(0, start=0, end=16)]
    logits = backend.prefill(0, rest, 16)
    seen = len(PROMPTS[1])
    chain.append(backend.save(0, start=16, end=seen))
    expected = remembered(backend, 0, seen)
    assert sum(one.bytes for one in chain) > 0
    backend.prefill(2, PROMPTS[2], 0)
    backend.restore(2, chain)
    assert remembered(backend, 2, seen) == expected
    backend.step([1, 0, 0], [seen, 0, 0], [True, False, False])
    backend.restore(1, chain[:1])
    assert_array_equal(backend.prefill(1, rest, 16), logits)
    assert remembered(backend, 1, seen) == expected


@on(BACKENDS)
def test_a_reset_slot_remembers_nothing(backend: Backend) -> None:
    fresh = backend.prefill(1, PROMPTS[0], 0)
    backend.step([0, 5, 0], [0, 5, 0], [False, True, False])
    backend.reset(1)
    assert not any(any(bits) for bits in remembered(backend, 1, 0).values())
    assert_array_equal(backend.prefill(1, PROMPTS[0], 0), fresh)


@on(BACKENDS)
def test_rounds_of_one_launch_are_steps(backend: Backend) -> None:
    backend.prefill(0, PROMPTS[0], 0)
    only = [True, False, False]
    emitted = backend.greedy_rounds([9, 0, 0], [5, 0, 0], only, rounds=[3] * BATCH)[:, 0]
    state = remembered(backend, 0, 8)
    backend.reset(0)
    backend.prefill(0, PROMPTS[0], 0)
    tokens = [9]
    for place in range(3):
        result = backend.step([tokens[-1], 0, 0], [5 + place, 0, 0], [True, False, False])
        assert result.next_token[0] == np.argmax(result.logits[0])
        tokens.append(int(result.next_token[0]))
    assert tokens[1:] == emitted.tolist()
    assert remembered(backend, 0, 8) == state


@on(BACKENDS)
def test_each_slot_of_a_launch_ends_by_itself(backend: Backend) -> None:
    """By its rounds or its own stop id: it then remembers what it was fed, and no more."""

    def launch(*, rounds: list[int], stop_ids: list[list[int]]) -> Array:
        for slot, prompt in enumerate(PROMPTS):
            backend.reset(slot)
            backend.prefill(slot, prompt, 0)
        places = [len(prompt) for prompt in PROMPTS]
        return backend.greedy_rounds([9] * 3, places, [True] * 3, rounds=rounds, stop_ids=stop_ids)

    full = launch(rounds=[4] * 3, stop_ids=[])
    stop = int(full[1, 1])
    assert full[0, 1] != stop
    shorter = launch(rounds=[1, 2, 3], stop_ids=[])
    seen = [len(prompt) + fed for prompt, fed in zip(PROMPTS, (1, 2, 3), strict=True)]
    expected = [remembered(backend, slot, seen[slot]) for slot in range(BATCH)]
    stopped = launch(rounds=[1, 4, 3], stop_ids=[[], [stop], []])
    assert len(shorter) == len(stopped) == 3
    for slot, fed in enumerate((1, 2, 3)):
        assert_array_equal(shorter[:fed, slot], full[:fed, slot])
        assert_array_equal(stopped[:fed, slot], full[:fed, slot])
        assert remembered(backend, slot, seen[slot]) == expected[slot]


@on(BACKENDS)
def test_masks_of_allowed_tokens(backend: Backend) -> None:
    """The largest logit of the allowed tokens, of each slot; others are minus infinity."""
    free = backend.step([1, 2, 3], [0, 0, 0], [True] * 3)
    allowed = np.arange(backend.vocab) % 7 == 3
    expected = np.where(allowed, free.logits[1], -np.inf)
    for slot in range(BATCH):
        backend.reset(slot)
    masks = [None, pack_mask(allowed), None]
    masked = backend.step([1, 2, 3], [0, 0, 0], [True] * 3, masks=masks)
    assert_array_equal(masked.logits, [free.logits[0], expected, free.logits[2]])
    assert_array_equal(masked.next_token[[0, 2]], free.next_token[[0, 2]])
    assert masked.next_token[1] == expected.argmax()
    places = [1, 1, 1]
    emitted = backend.greedy_rounds([1, 2, 3], places, [True] * 3, rounds=[2] * 3, masks=masks)
    assert allowed[emitted[:, 1]].all()


@on(BACKENDS)
def test_a_constraint_decides_what_a_greedy_sequence_says(backend: Backend) -> None:
    """As when the host masks the logits, which it does for a sequence with a bias."""
    outputs = []
    for bias in ({}, {0: 0.0}):
        constraint = Constraint(lambda output: np.arange(backend.vocab) % 3 == len(output) % 3)
        request = Request(
            tokens=PROMPTS[0],
            sampling=SamplingParams(logit_bias=bias),
            constraint=constraint,
            max_tokens=6,
        )
        outputs.append(Generator(backend).generate(request).tokens)
    assert outputs[0] == outputs[1]
    assert [token % 3 for token in outputs[0]] == [0, 1, 2, 0, 1, 2]


@on(BACKENDS)
def test_the_prefix_cache_changes_no_bit(backend: Backend) -> None:
    """Logits and all states, recurrent ones included, behind a prompt that was partly known."""
    shared = list(range(60, 94))
    requests = [Request(tokens=[*shared, last], max_tokens=9) for last in (3, 4)]

    def run(cache: PrefixCache | None) -> tuple[list[int], Mapping[str, bytes], int]:
        generator = Generator(Recorder(backend), prefix_cache=cache, chunk_rows=16)
        generator.generate(requests[0])
        number = generator.add(requests[1])
        cached = generator.statistics(number).cached_tokens
        tokens = run_for(generator, number, 4)
        seen = len(shared) + len(tokens)
        state = remembered(backend, generator.slot(number), seen)
        generator.cancel(number)
        return tokens, state, cached

    plain_logits.clear()
    without = run(None)
    expected = plain_logits.copy()
    plain_logits.clear()
    with_cache = run(PrefixCache(rows=16, max_bytes=1 << 30))
    assert (without[2], with_cache[2]) == (0, 32)
    assert with_cache[:2] == without[:2]
    # Three chunks of both prompts without the cache; with it the second prompt has one.
    assert [len(expected), len(plain_logits)] == [6, 4]
    assert_array_equal(plain_logits[-1], expected[-1])


plain_logits: list[Array] = []


class Recorder:
    """Passes everything on to a backend, and keeps the logits of every prefill."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def prefill(self, slot: int, tokens: Any, position: int) -> Array:
        plain_logits.append(self._backend.prefill(slot, tokens, position))
        return plain_logits[-1]


@on([LANE_REFERENCE])
def test_a_small_prefix_cache_evicts_and_changes_nothing(backend: Backend) -> None:
    prompts = [[first, *range(100, 130)] for first in (1, 2, 1, 3, 2, 1)]
    requests = [Request(tokens=prompt, max_tokens=2) for prompt in prompts]
    checkpoint = 1_300_000  # bytes; there is room for two
    cache = PrefixCache(rows=16, max_bytes=2 * checkpoint)
    plain = Generator(backend, chunk_rows=16)
    cached = Generator(backend, prefix_cache=cache)
    expected = [plain.generate(request).tokens for request in requests]
    assert [cached.generate(request).tokens for request in requests] == expected
    assert cache.statistics.evictions > 0
    assert cache.statistics.hits > 0
    assert cache.bytes <= cache.max_bytes


def test_slots() -> None:
    """The tests above use three slots by number."""
    assert BATCH == 3
