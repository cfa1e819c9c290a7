"""`mkc bench` with a backend that needs no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from typer.testing import Result

from mkc.cli import generation
from mkc.cli.main import app
from mkc.errors import PromptLengthError
from mkc.ir.graph import Graph
from mkc.runtime.backends import OpenedBackend
from mkc.runtime.checkpoint import Checkpoint
from tests.runtime.fake_backend import FakeBackend

FLOOR_US = 12.5


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(
        choice: generation.ModelChoice, graph: Graph, checkpoint: Checkpoint
    ) -> OpenedBackend:
        backend = FakeBackend(batch=graph.batch, context=graph.context, rounds=4)
        backend.name = choice.backend.value
        floor = FLOOR_US if choice.backend is generation.BackendChoice.TPU else None
        return OpenedBackend(
            backend=backend, description="no model", not_finite=(), step_floor_us=floor
        )

    monkeypatch.setattr(generation, "open_backend", opened)


def test_json(folder: Path) -> None:
    sizes = ["--batch", "1", "--batch", "2", "--prompt-tokens", "8", "--prompt-tokens", "20"]
    result = invoke(str(folder), "--context", "64", *sizes, "--output-tokens", "9", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["backend"] == "reference"
    assert any("not of a TPU" in one for one in found["notes"])
    assert any("not measured" in one for one in found["notes"]), "the warm-up"
    assert [(one["batch"], one["prompt_tokens"]) for one in found["runs"]] == [
        (1, 8),
        (1, 20),
        (2, 8),
        (2, 20),
    ]
    for run in found["runs"]:
        assert (run["launches"], run["rounds"], run["rounds_per_launch"]) == (2, 8, 4.0)
        assert run["speculation"] == {
            "scheme": "none",
            "tokens_per_round": 1.0,
            "drafted": 0,
            "accepted": 0,
        }
        assert run["decode_tokens_per_second"] > 0
        assert 0 < run["host_share"] < 1
        assert run["predicted_floor_round_us"] is None


def test_sampled_rounds_are_launched_one_by_one(folder: Path) -> None:
    options = ["--context", "64", "--prompt-tokens", "8", "--output-tokens", "9", "--json"]
    found = json.loads(invoke(str(folder), *options, "--temperature", "1").stdout)
    assert found["runs"][0]["rounds_per_launch"] == 1.0
    assert found["runs"][0]["temperature"] == 1.0


def test_table(folder: Path) -> None:
    result = invoke(str(folder), "--context", "64", "--prompt-tokens", "8", "--output-tokens", "9")
    assert result.exit_code == 0, result.output
    for part in ("reference backend", "1 x 8", "decode, tokens/s", "host per launch, ms"):
        assert part in result.stdout
    assert "not of a TPU" in result.stdout
    assert "predicted floor" not in result.stdout


def test_the_predicted_floor_stands_beside_the_measured_round_of_a_tpu(folder: Path) -> None:
    options = ["--context", "64", "--prompt-tokens", "8", "--output-tokens", "9"]
    result = invoke(str(folder), *options, "--backend", "tpu")
    assert f"{FLOOR_US}" in result.stdout
    assert "predicted floor of a round" in result.stdout
    assert "not of a TPU" not in result.stdout
    found = json.loads(invoke(str(folder), *options, "--backend", "tpu", "--json").stdout)
    assert found["runs"][0]["predicted_floor_round_us"] == FLOOR_US


def test_a_prompt_that_the_context_does_not_hold(folder: Path) -> None:
    result = invoke(str(folder), "--context", "64", "--prompt-tokens", "64")
    assert isinstance(result.exception, PromptLengthError)
