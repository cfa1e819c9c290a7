"""Kernels that run rounds, in the interpreter, beside the reference backend: through the generator.

A kernel takes long to compile here, so one test does everything with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mkc.ir.graph import StateKind
from mkc.runtime.backends import kernel_rounds
from mkc.runtime.finish_round import forced_tokens
from mkc.runtime.generate import Generator
from mkc.runtime.request import Request
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.text import ChatRequest
from mkc.runtime.text import load_chat
from mkc.runtime.text import load_tokenizer
from tests.goldens import golden_case
from tests.runtime.constraints import Constraint
from tests.runtime.rounds_backends import KIMI
from tests.runtime.rounds_backends import LANE
from tests.runtime.rounds_backends import MINI
from tests.runtime.rounds_backends import SHIPPED
from tests.runtime.rounds_backends import TINY
from tests.runtime.rounds_backends import RoundsBackend
from tests.runtime.rounds_backends import draft
from tests.runtime.rounds_backends import interpreted
from tests.runtime.rounds_backends import reference

STATE_RELATIVE_RMS = 0.03  # as in tests.kernel.harness
CHUNK, LENGTH = 16, 14
OTHER = list(range(100, 131))
QUESTIONS = ("What is 12 + 7?", "What is 38 + 45?")


@pytest.mark.parametrize(
    ("name", "ranks", "batch"),
    [
        (TINY, 1, 2),
        pytest.param(KIMI, 1, 2, marks=pytest.mark.long),
        pytest.param(TINY, 2, 2, marks=pytest.mark.long),
        pytest.param(MINI, 1, 1, marks=pytest.mark.long),
        pytest.param(LANE, 1, 2, marks=pytest.mark.long),
        pytest.param(LANE, 2, 2, marks=pytest.mark.long),
    ],
)
def test_the_kernel_does_what_the_reference_does(name: str, ranks: int, batch: int) -> None:
    """Prompts; launches with the drafter's drafts, with right ones and with a wrong one; states."""
    prompts, sampling = prompts_of(name)[:batch], name in SHIPPED
    backends = [
        reference(name, batch=batch, sampling=sampling),
        interpreted(name, ranks=ranks, batch=batch, sampling=sampling),
    ]
    truth = plain_tokens(backends[0], prompts)
    seen: list[Any] = []
    states = []
    for backend in backends:
        own = generator(backend)
        numbers = [own.add(Request(tokens=one, max_tokens=40)) for one in prompts]
        for number in numbers:
            own.prefill(number)
        deltas = [own.rounds(1)]
        last = batch - 1
        at = len(deltas[0][last].tokens)
        wrong = (truth[last][at + 4] + 1) % backend.vocab
        rows = [*truth[last][at : at + 4], wrong]
        draft(backend, last, rows, len(prompts[last]) + at)
        deltas += [own.rounds(2), own.rounds()]
        seen.append([[list(delta.tokens) for delta in one] for one in deltas])
        seen.append([own.statistics(one).accepted for one in numbers])
        ends = [own._running[one].position for one in numbers]
        states.append([backend.state(own.slot(one)) for one in numbers])
        for number in numbers:
            own.cancel(number)
    assert seen[:2] == seen[2:]
    assert seen[1][last] >= 3, "the drafts that are right"
    if name in SHIPPED:
        assert seen[1][0] > 0, "drafts of a trained drafter"
    for slot in range(batch):
        tokens = [token for one in seen[0] for token in one[slot]]
        assert tokens == truth[slot][1 : 1 + len(tokens)]
    kinds = backends[0].scheme.graph.states
    for slot, end in enumerate(ends):
        for key, wanted in states[0][slot].items():
            rows_of = slice(0, end if kinds[key].kind is StateKind.KV_CACHE else None)
            mine = np.asarray(states[1][slot][key], np.float32)[:, rows_of]
            other = np.asarray(wanted, np.float32)[:, rows_of]
            difference = np.sqrt(np.mean((mine - other) ** 2))
            assert difference < STATE_RELATIVE_RMS * other.std(), f"{key}, slot {slot}"
    assert constrained(backends[1], prompts) == constrained(backends[0], prompts)
    assert backends[1].draws == sampling
    found = sampled(backends[1], prompts)
    if sampling:
        assert found == sampled(backends[0], prompts), "the same draws, in rounds with drafts"


def test_the_host_finishes_what_the_kernel_leaves_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So hot that the nucleus has more tokens than are exchanged: rounds emit nothing, the host
    chooses, and they run again. A greedy sequence beside it notices nothing."""
    forced: list[list[int]] = []

    def noted(batch: int, rows: int, chosen: Mapping[int, Any]) -> Any:
        forced.extend(one.tolist() for one in chosen.values())
        return forced_tokens(batch, rows, chosen)

    monkeypatch.setattr(kernel_rounds, "forced_tokens", noted)
    hot = SamplingParams(temperature=6.0, top_p=0.95, seed=3)
    requests = [
        Request(tokens=one, max_tokens=6, sampling=choice)
        for one, choice in zip(prompts_of(TINY), (hot, SamplingParams()), strict=True)
    ]
    found: list[dict[int, list[int]]] = []
    for open_backend in (reference, partial(interpreted, ranks=1)):
        tokens: dict[int, list[int]] = {}
        for delta in generator(open_backend(TINY, batch=2, sampling=True)).run(requests):
            tokens.setdefault(delta.sequence, []).extend(delta.tokens)
        found.append(tokens)
    assert found[0] == found[1]
    assert len(forced) >= 3
    assert [token for one in forced for token in one][:5] == found[0][0][1:6]


def prompts_of(name: str) -> list[list[int]]:
    if name in SHIPPED:
        chat = load_chat(SHIPPED[name], load_tokenizer(SHIPPED[name]))
        asked = [ChatRequest(messages=[{"role": "user", "content": one}]) for one in QUESTIONS]
        return [list(chat.encode(one).ids) for one in asked]
    return [golden_case(name).expected["prompt"].tolist()[:20], OTHER]


def sampled(
    backend: RoundsBackend, prompts: Sequence[list[int]]
) -> list[tuple[list[int], tuple[int, int]]]:
    """Tokens, drafts and accepted ones of a greedy sequence and one that samples, which are the
    same alone and beside the other."""
    choices = [SamplingParams(), SamplingParams(temperature=0.8, seed=5)]
    requests = [
        Request(tokens=one, max_tokens=LENGTH, sampling=choice)
        for one, choice in zip(prompts, choices, strict=False)
    ]
    alone = [list(generator(backend).generate(one).tokens) for one in requests]
    together: dict[int, list[int]] = {}
    counts: dict[int, tuple[int, int]] = {}
    for delta in generator(backend).run(requests):
        together.setdefault(delta.sequence, []).extend(delta.tokens)
        if delta.finish is not None:
            found = delta.finish.statistics
            counts[delta.sequence] = found.drafted, found.accepted
    assert list(together.values()) == alone
    assert counts[0][0] > 0, "a greedy sequence drafts"
    drafted = [one[0] > 0 for number, one in counts.items() if number]
    assert drafted == [backend.draws] * len(drafted)
    return [(together[number], counts[number]) for number in together]


def constrained(
    backend: RoundsBackend, prompts: Sequence[list[int]]
) -> list[tuple[list[int], int]]:
    """Tokens and drafts of sequences with masks that depend on what was emitted; the last one
    samples if the backend can. Every token is allowed, and a greedy one is that of plain steps."""

    def allowed(output: Sequence[int]) -> NDArray[Any]:
        found: NDArray[Any] = np.arange(backend.vocab) % 4 != sum(output) % 4
        return found

    def request(prompt: list[int], choice: SamplingParams, *, wanted: bool = True) -> Request:
        own = Constraint(allowed)
        return Request(
            tokens=prompt, max_tokens=LENGTH, sampling=choice, constraint=own, draft=wanted
        )

    last = SamplingParams(temperature=0.8, seed=5) if backend.draws else SamplingParams()
    choices = [*[SamplingParams()] * (len(prompts) - 1), last]
    pairs = list(zip(prompts, choices, strict=True))
    found: dict[int, list[int]] = {}
    drafted = {}
    for delta in generator(backend).run(request(*one) for one in pairs):
        found.setdefault(delta.sequence, []).extend(delta.tokens)
        if delta.finish is not None:
            drafted[delta.sequence] = delta.finish.statistics.drafted
    for number, (prompt, choice) in enumerate(pairs):
        tokens = found[number]
        assert all(one % 4 != sum(tokens[:place]) % 4 for place, one in enumerate(tokens))
        assert drafted[number] > 0
        if choice.temperature == 0.0:
            plain = generator(backend).generate(request(prompt, choice, wanted=False))
            assert tokens == list(plain.tokens)
    return [(found[number], drafted[number]) for number in sorted(found)]


def plain_tokens(backend: RoundsBackend, prompts: Sequence[list[int]]) -> list[list[int]]:
    own = generator(backend)
    own.drafts = False
    return [list(own.generate(Request(tokens=one, max_tokens=40)).tokens) for one in prompts]


def generator(backend: RoundsBackend) -> Generator:
    for slot in range(backend.batch):
        backend.reset(slot)
    return Generator(backend, chunk_rows=CHUNK, stop_ids=())
