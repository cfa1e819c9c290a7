"""Leading and following in one process: the same calls in the same order, the same results."""

from __future__ import annotations

import gc
from collections import deque
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mkc.errors import ProcessOptionError
from mkc.runtime.backends.backend import Backend
from mkc.runtime.distributed import Launch
from mkc.runtime.distributed import LeadingBackend
from mkc.runtime.distributed.calls import Call
from mkc.runtime.distributed.following import Follower
from mkc.runtime.generate import Generator
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.request import Request
from mkc.runtime.sampling import SamplingParams
from tests.runtime.fake_backend import FakeBackend


class Queue:
    """Messages that the follower reads later."""

    def __init__(self) -> None:
        self.waiting: deque[bytes] = deque()

    def send(self, message: bytes) -> None:
        self.waiting.append(message)

    def receive(self) -> bytes:
        return self.waiting.popleft()


def test_calls_survive_the_way() -> None:
    mask = np.array([1, 2**32 - 1], np.uint32)
    call = Call(
        name="step",
        arguments=[np.int32(3), [1, 2], (True, False)],
        options={"masks": [None, mask], "rounds": np.array([1, 2])},
        forgotten=[4],
    )
    found = Call.decode(call.encode())
    assert (found.name, found.arguments, found.forgotten) == (
        "step",
        [3, [1, 2], [True, False]],
        [4],
    )
    nothing, restored = found.options["masks"]
    assert nothing is None
    assert restored.dtype == np.uint32
    assert_array_equal(restored, mask)
    assert_array_equal(found.options["rounds"], [1, 2])


def test_a_leading_backend_is_a_backend() -> None:
    """For type checkers too."""
    inner = FakeBackend()
    leading: Backend = LeadingBackend(inner, Queue())
    for name in ("name", "batch", "context", "vocab", "prefill_rows", "rounds_per_launch"):
        assert getattr(leading, name) == getattr(inner, name)
    public = {name for name in vars(Backend) if not name.startswith("_")}
    assert {name for name in public if hasattr(leading, name)} == public


def test_the_follower_remembers_what_the_leader_does() -> None:
    """Greedy and sampled sequences with a prefix cache that evicts."""
    queue, inner, other = Queue(), FakeBackend(batch=2), FakeBackend(batch=2)
    leading = LeadingBackend(inner, queue)
    cache = PrefixCache(rows=4, max_bytes=80)
    generator = Generator(leading, prefix_cache=cache)
    prompts = [[1, *range(10, 18)], [2, *range(10, 18)], [1, *range(10, 19)], [3, 4]]
    requests = [
        Request(
            tokens=prompt,
            max_tokens=3,
            sampling=SamplingParams(temperature=0.7 * (number % 2), seed=1),
        )
        for number, prompt in enumerate(prompts)
    ]
    list(generator.run(requests))
    assert cache.statistics.hits > 0
    assert cache.statistics.evictions > 0
    leading.prefill(0, [5, 6], 0)
    leading.close()
    leading.close()
    sent = [Call.decode(message).name for message in queue.waiting]
    assert sent.count("close") == 1
    assert {"prefill", "step", "greedy_rounds", "reset", "save", "restore"} <= set(sent)

    follower = Follower(other)
    follower.run(queue.receive)
    assert not queue.waiting
    assert other.slots == inner.slots


def test_snapshots_that_nobody_needs_are_forgotten() -> None:
    queue = Queue()
    leading = LeadingBackend(FakeBackend(batch=2), queue)
    leading.prefill(0, [1, 2, 3, 4], 0)
    first = leading.save(0, start=0, end=4)
    second = leading.save(0, start=0, end=4)
    leading.restore(1, [second])
    del second
    gc.collect()
    leading.reset(1)
    leading.restore(1, [first])
    leading.close()
    follower = Follower(FakeBackend(batch=2))
    follower.run(queue.receive)
    assert list(follower.snapshots) == [0]
    assert follower.backend.state(1)["tokens"].tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    "options",
    [
        {"coordinator": "host:1"},
        {"processes": 2, "process": 0},
        {"coordinator": "host", "processes": 2, "process": 0},
        {"coordinator": "host:99999", "processes": 2, "process": 0},
        {"coordinator": "host:1", "processes": 2, "process": 2},
        {"coordinator": "host:1", "processes": 0, "process": 0},
        {"timeout": 0},
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(ProcessOptionError):
        Launch(**options)
