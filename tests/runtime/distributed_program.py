"""What each process of `test_distributed_generation.py` runs; process 0 prints its tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import jax

from mkc.runtime.backends.backend import Backend
from mkc.runtime.backends.reference import ReferenceBackend
from mkc.runtime.distributed import Channel
from mkc.runtime.distributed import Launch
from mkc.runtime.distributed import LeadingBackend
from mkc.runtime.distributed import follow
from mkc.runtime.distributed import is_leader
from mkc.runtime.distributed import join
from mkc.runtime.generate import Generator
from mkc.runtime.kernel import mesh_of
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.request import Request
from mkc.runtime.sampling import SamplingParams
from tests.runtime.distributed_model import small_graph
from tests.runtime.distributed_model import small_weights

BATCH = 3
ROUNDS = 4
PREFIX_ROWS = 16
SHARED = list(range(20, 53))  # two chunks of the prefix cache and one token


def generate(backend: Backend) -> dict[str, Any]:
    """Greedy and sampled sequences beside each other, more of them than slots."""
    cache = PrefixCache(rows=PREFIX_ROWS, max_bytes=1 << 30)
    generator = Generator(backend, prefix_cache=cache)
    requests = [
        Request(tokens=[3, 1, 4, 1, 5], max_tokens=9),
        Request(tokens=SHARED, sampling=SamplingParams(temperature=0.8, top_p=0.95, seed=7)),
        Request(tokens=[7] * 17, sampling=SamplingParams(temperature=1.2, seed=6, alternatives=2)),
        Request(tokens=[*SHARED, 9], max_tokens=12),
    ]
    tokens: dict[int, list[int]] = {}
    logprobs: list[float] = []
    for delta in generator.run(requests):
        tokens.setdefault(delta.sequence, []).extend(delta.tokens)
        logprobs += [one.logprob for entry in delta.alternatives for one in entry]
    cache.clear()
    backend.reset(0)  # says which snapshots are forgotten
    hits = cache.statistics.hit_tokens
    return {"tokens": list(tokens.values()), "logprobs": logprobs, "hits": hits}


class FailingBackend(ReferenceBackend):
    """Fails in its first launch."""

    def greedy_rounds(self, *arguments: Any, **options: Any) -> Any:
        raise MemoryError("no room")


def main(arguments: Sequence[str]) -> None:
    coordinator, processes, process, kind = arguments
    launch = Launch(coordinator=coordinator, processes=int(processes), process=int(process))
    jax.config.update("jax_enable_compilation_cache", True)
    join(launch)
    weights = small_weights()
    backend = (FailingBackend if kind == "failing" else ReferenceBackend)(
        small_graph(BATCH),
        lambda name: weights[name],
        rounds_per_launch=ROUNDS,
        mesh=mesh_of(jax.devices()),
    )
    if not is_leader():
        follow(backend, Channel())
        return
    leading = LeadingBackend(backend, Channel())
    print(json.dumps(generate(leading)))
    leading.close()


if __name__ == "__main__":
    main(sys.argv[1:])
