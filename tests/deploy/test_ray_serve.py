"""The Ray Serve file: how it asks for replicas, and that a replica answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.runtime import distributed_model
from tests.runtime.distributed_model import CONTEXT
from tests.runtime.distributed_model import write_small_checkpoint

MODEL = f"{distributed_model.__file__}:decoder"


class Posted:
    """A request with a JSON body."""

    def __init__(self, body: Any) -> None:
        self._body = body

    async def json(self) -> Any:
        return self._body


def test_replicas_take_whole_hosts(ray_serve: ModuleType) -> None:
    found = ray_serve.app(
        {"weights": "folder", "replicas": "3", "cpus": "8", "tpus": "4", "backend": "tpu"}
    )
    assert found.target is ray_serve.Replica
    assert found.options["num_replicas"] == 3
    assert found.options["max_ongoing_requests"] == found.options["max_replicas_per_node"] == 1
    assert found.options["ray_actor_options"] == {"num_cpus": 8, "resources": {"TPU": 4}}
    (choice,) = found.arguments
    assert (choice.weights, choice.backend.value, choice.launch) == ("folder", "tpu", None)


def test_a_replica_answers(
    ray_serve: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    folder = write_small_checkpoint(tmp_path / "checkpoint")
    application = ray_serve.app({"weights": str(folder), "model": MODEL, "context": str(CONTEXT)})

    async def ask(*bodies: Any) -> list[Any]:
        replica = application.target(*application.arguments)
        return list(await asyncio.gather(*(replica(Posted(body)) for body in bodies)))

    messages = [{"role": "user", "content": "the cat"}]
    body = {"messages": messages, "max_tokens": 5, "temperature": 0}
    first, second, sampled, long, bad = asyncio.run(
        ask(
            body,
            body,
            {**body, "temperature": 1.5, "seed": 4},
            {**body, "max_tokens": CONTEXT},
            {"prompt": "the cat"},
        )
    )
    assert first.status_code == 200, first.content
    assert first.content["output_tokens"] == 5
    assert first.content == second.content
    assert first.content["reasoning"]  # the template opens a thought
    assert sampled.content["reasoning"] != first.content["reasoning"]
    assert long.status_code == 400
    assert "error[E330]" in long.content["error"]
    assert bad.status_code == 400
    assert "messages" in bad.content["error"]
