"""Training: it learns, and a run that was ended goes on as if it had not been."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.muon import orthogonal
from examples.tiny_family import TINY
from examples.tiny_family import WEIGHTS
from examples.tiny_family import Family
from examples.tiny_folder import CONFIG
from examples.tiny_folder import write_model
from examples.tiny_text import Teacher
from examples.tiny_text import write_text_files
from examples.train_tiny import Settings
from examples.train_tiny import State
from examples.train_tiny import batch_of
from examples.train_tiny import initial_state
from examples.train_tiny import loss_of
from examples.train_tiny import rate_share
from examples.train_tiny import row_graph
from examples.train_tiny import tensors_of
from examples.train_tiny import train
from mkc.runtime.checkpoint import Checkpoint
from models.qwen38 import MODEL

SHIPPED = Path(__file__).parents[2] / "models" / "tiny"
SETTINGS = Settings(seed=3, steps=40, rows=2, length=64, tests=0)


def small() -> Family:
    """The model with two narrow layers."""
    config: dict[str, Any] = deepcopy(CONFIG)
    config["text_config"] |= {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    return replace(TINY, config=config)


@cache
def teacher() -> Teacher:
    return Teacher(SHIPPED)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> State:
    """A run without interruption."""
    file = tmp_path_factory.mktemp("whole") / "train.npz"
    return train(SETTINGS, teacher(), file, family=small(), say=lambda _: None)


def flat(state: State) -> dict[str, np.ndarray]:
    leaves = jax.tree.leaves_with_path({"weights": state.weights, "means": state.means})
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def test_loss_falls(whole: State) -> None:
    graph = row_graph(SETTINGS, small())
    batch = batch_of(teacher().rows(Random("other"), rows=2, length=64, weights=WEIGHTS))
    loss = jax.jit(lambda weights: loss_of(graph, weights, batch))
    before = float(loss(initial_state(graph, SETTINGS).weights))
    assert before == pytest.approx(np.log(768), rel=0.05), "nothing is known at first"
    assert float(loss(whole.weights)) < 0.9 * before


def test_a_run_goes_on_as_if_it_had_not_ended(whole: State, tmp_path: Path) -> None:
    file = tmp_path / "train.npz"
    train(SETTINGS, teacher(), file, family=small(), until=7, say=lambda _: None)
    ended = train(SETTINGS, teacher(), file, family=small(), say=lambda _: None)
    assert ended.step == whole.step == SETTINGS.steps
    found, wanted = flat(ended), flat(whole)
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if not np.array_equal(found[key], wanted[key])] == []
    assert not list(tmp_path.glob("*unfinished*"))


def test_another_seed_is_another_run() -> None:
    graph = row_graph(SETTINGS, small())
    one = flat(initial_state(graph, SETTINGS))
    other = flat(initial_state(graph, replace(SETTINGS, seed=4)))
    assert any(not np.array_equal(one[key], other[key]) for key in one)


def test_learning_rate() -> None:
    shares = [float(rate_share(jnp.int32(step), 1000)) for step in (0, 20, 39, 399, 700, 999)]
    assert shares == pytest.approx([1 / 40, 21 / 40, 1, 1, 0.5, 1 / 600], abs=2e-3)


def test_muon_step_is_nearly_orthogonal() -> None:
    matrix = jax.random.normal(jax.random.key(0), (2, 48, 32))
    singular = np.linalg.svd(np.asarray(orthogonal(matrix)), compute_uv=False)
    assert singular.min() > 0.6 and singular.max() < 1.3  # what its coefficients give


def test_folder(whole: State, tmp_path: Path) -> None:
    """What is written is a checkpoint of the model, with the weights of the run."""
    write_text_files(tmp_path, seed=0)
    tensors = tensors_of(row_graph(SETTINGS, small()), whole.weights)
    write_model(tmp_path, tensors, small().config)
    report = Checkpoint.open(tmp_path).check(MODEL.trace(small().config, batch=1, context=16))
    assert report.extra == ()
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == tensors.keys()
    for name, array in tensors.items():
        assert np.array_equal(np.asarray(stored[name]).view(np.uint8), array.view(np.uint8)), name
