"""Requests that a generator answers together, and what the fake backend says to a prompt."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mkc.runtime.generate import Generator
from mkc.runtime.request import Delta
from mkc.runtime.request import Output
from mkc.runtime.request import Request
from tests.runtime.fake_backend import scrambled

PROMPT = (5, 6, 7)


def greedy(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """What the backend says after a prompt, by its definition."""
    history = list(prompt)
    for _ in range(count):
        history.append(int(np.argmax(scrambled(history))))
    return tuple(history[len(prompt) :])


def generate(generator: Generator, requests: Sequence[Request]) -> list[Output]:
    """All requests together; the output of each."""
    parts: dict[int, list[Delta]] = {}
    for delta in generator.run(requests):
        parts.setdefault(delta.sequence, []).append(delta)
    outputs = []
    for deltas in (parts[number] for number in sorted(parts)):
        finish = deltas[-1].finish
        assert finish is not None
        assert all(one.finish is None for one in deltas[:-1])
        outputs.append(
            Output(
                tokens=tuple(token for one in deltas for token in one.tokens),
                events=tuple(event for one in deltas for event in one.events),
                text="".join(one.text for one in deltas),
                logprobs=tuple(entry for one in deltas for entry in one.logprobs),
                alternatives=tuple(entry for one in deltas for entry in one.alternatives),
                finish=finish,
            )
        )
    return outputs
