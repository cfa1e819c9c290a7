"""The step `races` of `mkc verify`: what is run in place of a large model, and what it notices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mkc.cli import races
from mkc.cli.lookup import model_graph
from mkc.cli.lookup import registered_models
from mkc.cli.races import LARGEST_BYTES
from mkc.cli.races import Found
from mkc.cli.races import Reduced
from mkc.cli.races import find_races
from mkc.cli.reduced import Lower
from mkc.cli.reduced import SmallPlan
from mkc.cli.speculation import registered_drafters
from mkc.cli.speculation import scheme_round
from mkc.driver import CompileRequest
from mkc.driver import CompileResult
from mkc.driver import compile_graph
from mkc.ir.mxfp4 import bad_scale
from mkc.ir.types import DType
from tests.passes.lowering import TARGET
from tests.passes.lowering import dense_graph

PAIRS = [("qwen38", "dflash2"), ("kimi_k3", "dspark")]
CHOSEN = Reduced(config=None, draft=None, scheme=None)


@pytest.fixture(scope="module")
def dense() -> CompileResult:
    return compile_graph(CompileRequest(graph=dense_graph(), target=TARGET, tp=1, aot=False))


@pytest.mark.parametrize("name", sorted(registered_models()))
def test_small_models_are_small(name: str) -> None:
    config = races._small_config(registered_models()[name])
    assert config is not None
    graph = model_graph(name, batch=1, context=64, config_path=config)
    assert races._weight_bytes(graph) <= LARGEST_BYTES


@pytest.mark.parametrize("name", sorted(registered_models()))
def test_small_models_have_the_types_of_the_large_ones(name: str) -> None:
    small = races._small_config(registered_models()[name])
    graphs = [model_graph(name, batch=1, context=64, config_path=one) for one in (small, None)]
    found, expected = ({one.type.dtype for one in graph.params.values()} for graph in graphs)
    assert found == expected


def test_random_weights_are_of_the_types_of_the_graph() -> None:
    config = races._small_config(registered_models()["kimi_k3"])
    graph = model_graph("kimi_k3", batch=1, context=64, config_path=config)
    load = races._weights(graph)
    for param in graph.params.values():
        name = param.tensor_name(0)
        tensor = load(name)
        assert tensor.shape == param.tensor_type.shape
        if param.type.dtype is DType.E8M0:
            assert bad_scale(tensor) is None
        else:
            assert len(np.unique(tensor)) > tensor.size**0.3, f"{name}: all alike"


@pytest.mark.parametrize(("name", "scheme"), PAIRS)
def test_small_drafters_fit_small_models(name: str, scheme: str) -> None:
    config = races._small_config(registered_models()[name])
    draft = races._small_config(registered_drafters()[scheme])
    graph = scheme_round(name, scheme, draft, batch=1, context=64, config_path=config).graph
    assert races._weight_bytes(graph) <= LARGEST_BYTES


def test_every_drafter_has_a_pair() -> None:
    assert {scheme for _, scheme in PAIRS} == registered_drafters().keys()


def chosen(
    model: str, reduced: Reduced, result: CompileResult, monkeypatch: pytest.MonkeyPatch
) -> tuple[Found, list[tuple[str, ...]]]:
    """What is run in place of a model that is too large, and the configs it is compiled from."""
    monkeypatch.setattr(races, "_run_all", lambda _, what: Found(ran=True, ground=what))
    sizes = iter((LARGEST_BYTES + 1, 0))
    monkeypatch.setattr(races, "_weight_bytes", lambda _: next(sizes))
    configs = []

    def lower(config: Path | None, draft: Path | None) -> Lower:
        configs.append(tuple(one.name for one in (config, draft) if one is not None))
        return lambda mesh, options: small(result)

    return find_races(model, result, lower, reduced=reduced), configs


def small(result: CompileResult) -> SmallPlan:
    """What is interpreted of a plan."""
    return SmallPlan(graph=result.graph, lowered=result.lowered, source=result.kernel_source)


def test_a_large_model_is_reduced(dense: CompileResult, monkeypatch: pytest.MonkeyPatch) -> None:
    found, configs = chosen("qwen38", CHOSEN, dense, monkeypatch)
    assert configs == [("qwen38_small.json",)]
    assert found == Found(ran=True, ground="reduced to qwen38_small.json")


def test_a_large_pair_is_reduced(dense: CompileResult, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = replace(CHOSEN, scheme="dflash2")
    _, configs = chosen("qwen38", pair, dense, monkeypatch)
    assert configs == [("qwen38_small.json", "dflash2_qwen38_small.json")]


def test_a_config_that_is_named_is_taken(
    dense: CompileResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Reduced(config=Path("mine.json"), draft=Path("draft.json"), scheme="dflash2")
    _, configs = chosen("qwen38", pair, dense, monkeypatch)
    assert configs == [("mine.json", "draft.json")]


def test_without_a_small_config_it_is_skipped(
    dense: CompileResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, configs = chosen("model.py:decoder", CHOSEN, dense, monkeypatch)
    assert found.ran is None
    assert "--races-config" in found.ground
    assert configs == []


def test_memory_that_nobody_has_written(dense: CompileResult) -> None:
    """Half of a product is left out: what is there instead is multiplied with weights."""
    old = "m.v_mul[:, 0:"
    line = next(one for one in dense.kernel_source.splitlines() if old in one)
    source = dense.kernel_source.replace(line, line.replace("[:, 0:", "[0:0, 0:").split(" = ")[0])
    assert source != dense.kernel_source
    found = races._run(replace(small(dense), source=source), "edited")
    assert found.ran is False
    assert "memory that nobody has written" in found.ground
    assert races._run(small(dense), "sound").ran
