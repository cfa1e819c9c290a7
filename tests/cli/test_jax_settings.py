"""What JAX is told before it runs anything."""

from __future__ import annotations

import os
from json import loads
from pathlib import Path

import jax
import pytest

import models
from mkc.cli import jax_settings
from mkc.ir.graph import Graph
from models.qwen38 import MODEL
from tests.passes.lowering import full_size


def test_where_compiled_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax_settings.cache_folder() is None, "these tests tell JAX another place"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("MKC_CACHE", raising=False)
    assert jax_settings.cache_folder() == Path.home() / ".cache" / "mkc" / "xla"
    monkeypatch.setenv("MKC_CACHE", "~/elsewhere")
    assert jax_settings.cache_folder() == Path.home() / "elsewhere"
    monkeypatch.setenv("MKC_CACHE", "off")
    assert jax_settings.cache_folder() is None


def shipped() -> Graph:
    config = Path(list(models.__path__)[0], "tiny", "config.json").read_text()
    return MODEL.trace(loads(config), batch=1, context=64)


@pytest.mark.parametrize(
    ("large", "given", "threads"),
    [(False, None, "1"), (True, None, None), (False, "4", "4")],
    ids=["small", "large", "the user's own"],
)
def test_a_small_model_runs_in_one_thread(
    large: bool, given: str | None, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPROC", given or "")
    if given is None:
        monkeypatch.delenv("NPROC")
    told: dict[str, bool] = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    jax_settings.choose_threads(full_size() if large else shipped())
    assert os.environ.get("NPROC") == threads
    assert told == ({} if large else {"jax_cpu_enable_async_dispatch": False})


def test_where_a_small_model_runs_is_what_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPROC", "1")
    monkeypatch.setenv("JAX_CPU_ENABLE_ASYNC_DISPATCH", "1")
    told: dict[str, bool] = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    jax_settings.choose_threads(shipped())
    assert told == {}
