"""Ray is not installed here: a stand-in with what `deploy/ray_serve.py` uses of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import field
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

# Of `ray.serve.deployment` in Ray 2.40 and later, as far as the file uses them.
OPTIONS = {"num_replicas", "max_ongoing_requests", "max_replicas_per_node", "ray_actor_options"}
ACTOR_OPTIONS = {"num_cpus", "num_gpus", "resources", "memory", "runtime_env"}


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What was asked of Ray."""

    target: Any
    options: dict[str, Any]
    arguments: tuple[Any, ...] = field(default=())

    def bind(self, *arguments: Any) -> Deployment:
        return Deployment(target=self.target, options=self.options, arguments=arguments)


def deployment(**options: Any) -> Callable[[Any], Deployment]:
    assert set(options) <= OPTIONS
    assert set(options.get("ray_actor_options", {})) <= ACTOR_OPTIONS
    return lambda target: Deployment(target=target, options=options)


@dataclass(frozen=True)
class JSONResponse:
    """Of Starlette."""

    content: Any
    status_code: int = 200


@pytest.fixture
def ray_serve(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module `deploy.ray_serve` over the stand-in."""
    stand_ins: dict[str, dict[str, Any]] = {
        "ray": {"serve": None},
        "ray.serve": {"deployment": deployment, "Application": Deployment},
        "starlette": {},
        "starlette.requests": {"Request": object},
        "starlette.responses": {"JSONResponse": JSONResponse},
    }
    for name, contents in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["ray"], "serve", sys.modules["ray.serve"])
    monkeypatch.delitem(sys.modules, "deploy.ray_serve", raising=False)
    return import_module("deploy.ray_serve")
