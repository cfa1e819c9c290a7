"""What each process of `test_distributed_kernel.py` runs: a kernel's session, all but its launches.

Pallas interprets remote copies only between devices of one process. Everything around a launch is
ordinary JAX and runs here: weights and states placed part by part, prefill with its collectives,
saved and restored slots, logits that come together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import jax
import numpy as np

import mkc
from mkc.codegen_pallas.source import kernel_source
from mkc.ir.graph import Graph
from mkc.passes.p10_shard import Shard
from mkc.passes.p70_lower import Lower
from mkc.passes.pipeline import Pipeline
from mkc.runtime.backends.backend import Backend
from mkc.runtime.backends.kernel import KernelBackend
from mkc.runtime.distributed import Channel
from mkc.runtime.distributed import Launch
from mkc.runtime.distributed import LeadingBackend
from mkc.runtime.distributed import follow
from mkc.runtime.distributed import is_leader
from mkc.runtime.distributed import join
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel import mesh_of
from mkc.targets import load_target
from tests.errors.small_model import Sizes
from tests.errors.small_model import decoder
from tests.goldens import golden_case
from tests.runtime.distributed_model import random_weights

TARGET = "tpu7x"
RANKS = 2
BATCH = 2
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3]  # more than one block of 16
CHUNK = 16
SMALL = "small"


def subject(name: str) -> tuple[Graph, dict[str, Any]]:
    """A graph of BATCH sequences and its weights by name."""
    if name == SMALL:
        function = partial(decoder, Sizes())
        graph = mkc.trace(function, name=name, batch=BATCH, context=64)
        return graph, random_weights(graph)
    case = golden_case(name)
    return case.graph(batch=BATCH), dict(case.weights())


def kernel_backend(name: str) -> KernelBackend:
    """Over the first RANKS devices of all processes."""
    graph, weights = subject(name)
    target = load_target(TARGET)
    pipeline = Pipeline(shard=Shard(ranks=RANKS), lower=Lower(logits=True, rounds=2))
    lowered = pipeline.run(graph, target)
    session = KernelSession(
        lowered=lowered,
        source=kernel_source(lowered.program, lowered.steps, target=target),
        mesh=mesh_of(jax.devices()[:RANKS]),
        interpret=True,
    )
    session.load_weights(lambda one: weights[one])
    return KernelBackend(session)


def use(backend: Backend) -> dict[str, str]:
    """Prefills, saves, restores and resets slots: what came out, as digests of the bits."""
    found = {}
    first = backend.prefill(0, PROMPT[:CHUNK], 0)
    saved = backend.save(0, start=0, end=CHUNK)
    found["logits"] = digest(backend.prefill(0, PROMPT[CHUNK:], CHUNK))
    rest = backend.save(0, start=CHUNK, end=len(PROMPT))
    backend.restore(1, [saved])
    found["continued"] = digest(backend.prefill(1, PROMPT[CHUNK:], CHUNK))
    found |= {f"state {key}": digest(one) for key, one in backend.state(0).items()}
    found |= {f"copy of {key}": digest(one) for key, one in backend.state(1).items()}
    backend.reset(0)
    found["again"] = digest(backend.prefill(0, PROMPT[:CHUNK], 0))
    backend.restore(0, [saved, rest])
    found |= {f"restored {key}": digest(one) for key, one in backend.state(0).items()}
    assert found["again"] == digest(first)
    return found


def digest(array: Any) -> str:
    found = np.ascontiguousarray(array)
    assert found.any(), "nothing but zeros"
    return blake2b(found.tobytes(), digest_size=8).hexdigest()


def main(arguments: Sequence[str]) -> None:
    coordinator, processes, process, name = arguments
    join(Launch(coordinator=coordinator, processes=int(processes), process=int(process)))
    backend = kernel_backend(name)
    tapes = [one for one in backend.session.program.operands if one.role == "tape"]
    for tape in tapes:
        placed = backend.session.operands[tape.name]
        assert [one.data.shape for one in placed.addressable_shards] == [tape.shape]
        assert placed.shape[0] == RANKS * tape.shape[0]
    if not is_leader():
        follow(backend, Channel())
        return
    leading = LeadingBackend(backend, Channel())
    print(json.dumps(use(leading)))
    leading.close()


if __name__ == "__main__":
    main(sys.argv[1:])
