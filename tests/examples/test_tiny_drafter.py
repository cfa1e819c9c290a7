"""The drafter's training: it sees what rounds see, it learns, and a run goes on after an end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from examples.tiny_dflash2 import DFLASH2
from examples.tiny_dflash2 import DRAFT_CONFIG
from examples.tiny_dflash2 import EMBEDDING
from examples.tiny_dflash2 import MASK
from examples.tiny_drafter import Answers
from examples.tiny_drafter import Pupil
from examples.tiny_drafter import blocks_of
from examples.tiny_drafter import pupil
from examples.tiny_family import WEIGHTS
from examples.tiny_folder import DRAFTER_FOLDER
from examples.tiny_outputs import Speaker
from examples.tiny_outputs import load_rows
from examples.tiny_outputs import save_rows
from examples.tiny_text import END_OF_TURN
from examples.tiny_text import HIDDEN_TOKENS
from examples.tiny_text import Rows
from examples.tiny_text import Teacher
from examples.train_tiny import Settings
from examples.train_tiny import State
from examples.train_tiny_drafter import DRAFTS
from examples.train_tiny_drafter import initial_state
from examples.train_tiny_drafter import train
from examples.train_tiny_drafter import write_drafter
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.ir.reference import compile_step
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.rows import with_rows_per_sequence
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.rounds import Anchors
from mkc.runtime.rounds import first_inputs
from mkc.spec import DRAFT_NAMESPACE
from mkc.spec import block_round
from models.dflash2 import DRAFTER
from models.qwen38 import MODEL

SHIPPED = Path(__file__).parents[2] / "models" / "tiny"
LENGTH = 64
TOLERANCE = 1e-3  # of logits
SETTINGS = Settings(seed=3, steps=40, rows=2, length=LENGTH, tests=0)


def small() -> dict[str, Any]:
    """The drafter with one narrow layer."""
    return DRAFT_CONFIG | {
        "intermediate_size": 32,
        "layer_types": ["sliding_attention"],
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
    }


@cache
def target() -> Checkpoint:
    return Checkpoint.open(SHIPPED)


@cache
def taught() -> Pupil:
    return pupil(target(), DFLASH2, rows=SETTINGS.rows, length=LENGTH, config=small())


@cache
def conversations() -> Rows:
    """Some with right answers, which are those of the target nearly always."""
    tasks = {"addition": 1.0, "next_date": 1.0, "weekday": 1.0}
    return Teacher(SHIPPED).rows(Random(1), rows=8, length=LENGTH, weights=tasks)


def run(file: Path, said: list[str], until: int | None = None) -> State:
    answers = Answers.of(conversations())
    return train(SETTINGS, taught(), answers, answers, file, until=until, say=said.append)


@pytest.fixture(scope="module")
def said() -> list[str]:
    """What the run without interruption says."""
    return []


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, said: list[str]) -> State:
    """A run without interruption."""
    return run(tmp_path_factory.mktemp("whole") / "draft.npz", said)


# Blocks.


def test_blocks_are_of_answers() -> None:
    """What is wanted is what the conversation goes on with, up to the end of the turn."""
    rows = conversations()
    end = Teacher(SHIPPED).special(END_OF_TURN)
    shape = {"rows": 4, "blocks": 32, "drafts": DRAFTS}
    found = Answers.of(rows).blocks(np.random.default_rng(0), **shape)
    given = {name: np.asarray(one) for name, one in found.items()}
    shortened = 0
    for row, tokens in enumerate(given["tokens"]):
        (number,) = (one for one, other in enumerate(rows.tokens) if np.array_equal(other, tokens))
        for block, place in enumerate(given["anchors"][row]):
            counted = int(given["counted"][row, block].sum())
            assert 1 <= counted <= DRAFTS, "there is something to draft"
            assert rows.learned[number, place : place + counted + 1].all()
            wanted = given["wanted"][row, block, :counted]
            assert np.array_equal(wanted, tokens[place + 1 : place + 1 + counted])
            assert end not in wanted[:-1]
            assert counted == DRAFTS or wanted[-1] == end
            shortened += counted < DRAFTS
    assert shortened, "some blocks reach over the end"


def test_rows_without_an_answer_are_left_out() -> None:
    rows = conversations()
    silent = rows.learned.copy()
    silent[2] = 0
    answers = Answers.of(replace(rows, learned=silent))
    assert np.array_equal(answers.tokens, np.delete(rows.tokens, 2, axis=0))


def test_the_mask_is_a_token_that_no_conversation_has() -> None:
    assert DRAFT_CONFIG["dflash_config"]["mask_token_id"] == MASK
    assert Teacher(SHIPPED).special(HIDDEN_TOKENS[0]) == MASK
    rows = conversations()
    assert not np.any((rows.tokens == MASK) & (rows.positions >= 0))


# What it sees.


def test_training_sees_what_a_round_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped drafter in rounds, with caches and all, and as training evaluates it; in f32."""
    # Compiling takes most of the time here, and is twice as fast without.
    monkeypatch.setitem(COMPILER_OPTIONS, "xla_backend_optimization_level", 0)
    rows = conversations()
    (_, row, _, end), *_ = rows.tasks
    anchors = np.flatnonzero(rows.learned[row, :end])[1:9]
    learned = evaluated(row, anchors)
    drafted = set()
    for number, found in enumerate(drafted_in_rounds(row, anchors)):
        assert learned["drafts"][number].tolist() == found["tokens"].tolist()
        drafted.add(tuple(found["tokens"][1:]))
        for place in range(1, DRAFTS + 1):
            logits, candidates = learned["logits"][number, place], found["candidates"][place]
            best = logits[candidates]
            assert np.all(np.diff(best) <= TOLERANCE), "the best ones first"
            assert best[-1] >= np.delete(logits, candidates).max() - TOLERANCE
    assert len(drafted) == len(anchors), "they depend on the place"


def evaluated(row: int, anchors: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """What training makes of blocks in one conversation."""
    one = pupil(target(), DFLASH2, rows=1, length=LENGTH)
    own = {key: param for key, param in one.drafter.params.items() if key != EMBEDDING}
    shipped = Checkpoint.open(SHIPPED / DRAFTER_FOLDER)
    tensors = {name: shipped.load(name) for name in shipped.tensors}
    weights = stack_params(replace(one.drafter, params=own), tensors, "float32")
    given = {
        "tokens": jnp.asarray(conversations().tokens[[row]]),
        "positions": jnp.asarray(conversations().positions[[row]]),
        "anchors": jnp.asarray(anchors[None], jnp.int32),
    }
    assert anchors.size == blocks_of(LENGTH)
    found = jax.jit(one.evaluate)(weights, given)
    return {name: np.asarray(array[0]) for name, array in found.items()}


def drafted_in_rounds(row: int, anchors: NDArray[Any]) -> Iterator[dict[str, NDArray[Any]]]:
    """What rounds draft that emit the token at an anchor, one after the other."""
    shipped, tokens = Checkpoint.open(SHIPPED / DRAFTER_FOLDER), conversations().tokens[row]
    scheme = block_round(MODEL, target().config, DRAFTER, shipped.config, batch=1, context=LENGTH)
    tensors = {name: target().load(name) for name in target().tensors}
    tensors |= {DRAFT_NAMESPACE + name: shipped.load(name) for name in shipped.tensors}
    states = initial_states(scheme.graph, "float32")
    remembered = initial_states(scheme.prefill, "float32").keys()
    read = compile_step(scheme.prefill, tensors, rounding="float32")
    step = compile_step(scheme.graph, tensors, rounding="float32")
    greedy = {
        "temperature": np.zeros(1, np.float32),
        "top_k": np.zeros(1, np.int32),
        "top_p": np.ones(1, np.float32),
        "min_p": np.zeros(1, np.float32),
        "seed": np.zeros((1, 2), np.int32),
    }
    for place in range(anchors[-1]):
        position = np.array([place])
        if place + 1 in anchors:
            given = first_inputs(scheme, Anchors(tokens=tokens[position], positions=position))
            where = given.pop("positions")
            found = step(given.pop("tokens"), where, states, {**given, **greedy}).outputs
            assert int(found["emitted"][0]) == tokens[place + 1], "the target says so itself"
            yield {name: np.asarray(one) for name, one in found.items()}
        after = read(tokens[position], position, {key: states[key] for key in remembered})
        states |= after.states


# Learning.


def test_it_learns(whole: State, said: list[str]) -> None:
    losses = [float(line.split()[3]) for line in said]
    assert len(losses) == 2 and losses[1] < 0.7 * losses[0]
    batch = Answers.of(conversations()).blocks(
        np.random.default_rng(9), rows=2, blocks=blocks_of(LENGTH), drafts=DRAFTS
    )
    accepted = jax.jit(taught().accepted)
    first = initial_state(taught(), SETTINGS).weights
    before, after = (np.asarray(accepted(weights, batch)) for weights in (first, whole.weights))
    assert before.mean() < 0.1 < after.mean()
    assert np.all(after <= np.asarray(batch["counted"]).sum(axis=-1))


def test_the_selector_learns(whole: State) -> None:
    first = initial_state(taught(), SETTINGS).weights
    moved = [key for key in first if not np.array_equal(first[key], whole.weights[key])]
    assert moved == list(first)


def test_a_run_goes_on_as_if_it_had_not_ended(whole: State, tmp_path: Path) -> None:
    file = tmp_path / "draft.npz"
    run(file, [], until=7)
    ended = run(file, [])
    assert ended.step == whole.step == SETTINGS.steps
    for key, wanted in whole.weights.items():
        assert np.array_equal(ended.weights[key], wanted), key


# Files.


def test_folder(whole: State, tmp_path: Path) -> None:
    """What is written are the tensors that rounds ask for, without embedding and LM head."""
    write_drafter(tmp_path, taught(), whole.weights, small())
    folder = Checkpoint.open(tmp_path)
    assert folder.config == small()
    scheme = block_round(MODEL, target().config, DRAFTER, folder.config, batch=1, context=16)
    wanted = {
        name.removeprefix(DRAFT_NAMESPACE): one.type.shape
        for key, one in scheme.graph.params.items()
        if key.startswith(DRAFT_NAMESPACE)
        for name in one.tensor_names()
    }
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: one.shape for name, one in stored.items()} == wanted


@pytest.fixture(scope="module")
def speaker() -> Speaker:
    return Speaker(SHIPPED, length=96)


def test_answers_are_the_targets_own(speaker: Speaker) -> None:
    """Each answer is what plain evaluation of the whole conversation predicts, token by token."""
    rows = speaker.rows("test", rows=3, weights=WEIGHTS)
    graph = with_rows_per_sequence(MODEL.trace(target().config, batch=1, context=96), 96)
    tensors = {name: target().load(name) for name in target().tensors}
    read = compile_step(graph, tensors)
    answered = 0
    for row, tokens in enumerate(rows.tokens):
        found = read(tokens, rows.positions[row], initial_states(graph)).outputs["next_token"]
        said = np.flatnonzero(rows.learned[row])
        assert np.array_equal(np.asarray(found)[said - 1], tokens[said])
        answered += len(said)
    assert answered > 20
    end = speaker.teacher.special(END_OF_TURN)
    assert all(rows.tokens[row, stop - 1] == end for _, row, _, stop in rows.tasks)
    assert sum(stop - start for _, _, start, stop in rows.tasks) == rows.learned.sum()


def test_the_name_decides_what_is_asked(speaker: Speaker, tmp_path: Path) -> None:
    first = speaker.rows("a", rows=2, weights=WEIGHTS)
    again = speaker.rows("a", rows=2, weights=WEIGHTS)
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, speaker.rows("b", rows=2, weights=WEIGHTS).tokens)
    save_rows(tmp_path / "rows.npz", first)
    loaded = load_rows(tmp_path / "rows.npz")
    assert loaded.tasks == first.tasks
    assert np.array_equal(loaded.tokens, first.tokens)
    assert np.array_equal(loaded.learned, first.learned)
