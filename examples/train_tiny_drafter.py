"""Trains the DFlash2 drafter of the small model on what the small model says.

    python -m examples.train_tiny_drafter --target models/tiny --out models/tiny/drafter \
        --checkpoint drafter.npz

First the target answers questions, which are kept in a file beside the checkpoint; then the drafter
learns to continue these answers from what the target's layers show. As with `train_tiny`, a run
that was ended goes on as if it had not been.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from examples.muon import Arrays
from examples.tiny_drafter import BLOCK
from examples.tiny_drafter import DRAFT_CONFIG
from examples.tiny_drafter import EMBEDDING
from examples.tiny_drafter import Answers
from examples.tiny_drafter import Pupil
from examples.tiny_drafter import blocks_of
from examples.tiny_drafter import initial_draft_tensor
from examples.tiny_drafter import pupil
from examples.tiny_folder import TRAINING_FILE
from examples.tiny_folder import write_tensors
from examples.tiny_outputs import Speaker
from examples.tiny_outputs import load_rows
from examples.tiny_outputs import save_rows
from examples.tiny_text import write_json
from examples.train_tiny import STEPS_HELP
from examples.train_tiny import WEIGHTS
from examples.train_tiny import Settings
from examples.train_tiny import State
from examples.train_tiny import restore
from examples.train_tiny import run_steps
from examples.train_tiny import tensors_of
from examples.train_tiny import training_step
from mkc.ir.graph import Graph
from mkc.ir.reference import stack_params
from mkc.runtime.checkpoint import Checkpoint

CONVERSATIONS = 4096
TEST_CONVERSATIONS = 96
DRAFTS = BLOCK - 1
STEPS = [1500]


def answers(target: Path, settings: Settings, file: Path, *, held_out: bool) -> Answers:
    """What the target says, from `file` if it is there, else in a new file."""
    if not file.exists():
        speaker = Speaker(target, length=settings.length)
        if held_out:
            even = {task: 1.0 for task in WEIGHTS if task != "small_talk"}
            rows = speaker.rows("tests", rows=TEST_CONVERSATIONS, weights=even, held_out=True)
        else:
            name = f"outputs/{settings.seed}"
            rows = speaker.rows(name, rows=CONVERSATIONS, weights=WEIGHTS)
        save_rows(file, rows)
    return Answers.of(load_rows(file))


def initial_state(graph: Graph, settings: Settings) -> State:
    """Random weights of the drafter; the embedding is the target's."""
    rng = np.random.default_rng(settings.seed)
    tensors = {
        name: initial_draft_tensor(rng, name, param.type.shape)
        for key, param in sorted(graph.params.items())
        for name in param.tensor_names()
    }
    weights = stack_params(graph, tensors, "float32")
    del weights[EMBEDDING]
    return State(step=0, weights=weights, means=settings.optimiser.initial(weights), seconds=0.0)


def train(
    settings: Settings,
    taught: Pupil,
    learned: Answers,
    tests: Answers,
    checkpoint: Path,
    *,
    until: int | None = None,
    say: Callable[[str], None] = print,
) -> State:
    """Trains up to step `until`, by default to the end, and saves the checkpoint there.

    Args:
      taught: for `settings.rows` conversations of `settings.length`.
      learned, tests: conversations to learn from, and to look at now and then.
    """
    shape = {"rows": settings.rows, "blocks": blocks_of(settings.length), "drafts": DRAFTS}

    def batch(step: int) -> dict[str, Array]:
        return learned.blocks(np.random.default_rng((settings.seed, step)), **shape)

    unseen = [tests.blocks(np.random.default_rng(one), **shape) for one in range(settings.tests)]
    accepted = jax.jit(taught.accepted)

    def look(weights: Arrays) -> str:
        right = np.concatenate([np.asarray(accepted(weights, one)).ravel() for one in unseen])
        possible = np.concatenate([np.asarray(one["counted"]).sum(-1).ravel() for one in unseen])
        return f"{right.mean():.2f} of {possible.mean():.2f} drafts right"

    fresh = not checkpoint.exists()
    return run_steps(
        initial_state(taught.drafter, settings) if fresh else restore(checkpoint),
        settings.steps if until is None else until,
        training_step(taught.loss, settings),
        batch,
        checkpoint,
        look=look if unseen else None,
        say=say,
    )


def write_drafter(
    folder: Path, taught: Pupil, weights: Arrays, config: Mapping[str, Any] = DRAFT_CONFIG
) -> None:
    """Writes config and weights; embedding and LM head are the target's."""
    own = {key: one for key, one in taught.drafter.params.items() if key != EMBEDDING}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    tensors = tensors_of(replace(taught.drafter, params=own), weights)
    write_tensors(folder / "model.safetensors", tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the small model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to go on from")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help=STEPS_HELP)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
    settings = Settings(seed=given.seed, steps=given.steps[-1])
    tests, learned = (
        answers(given.target, settings, given.checkpoint.with_suffix(suffix), held_out=held_out)
        for suffix, held_out in ((".tests.npz", True), (".outputs.npz", False))
    )
    target = Checkpoint.open(given.target)
    taught = pupil(target, rows=settings.rows, length=settings.length)
    for steps in given.steps:
        state = train(
            replace(settings, steps=steps),
            taught,
            learned,
            tests,
            given.checkpoint,
            say=partial(print, flush=True),
        )
        write_drafter(given.out, taught, state.weights)
    facts = {
        "steps": given.steps,
        "seed": given.seed,
        "conversations": CONVERSATIONS,
        "rows": settings.rows,
        "length": settings.length,
        "blocks": blocks_of(settings.length),
        "minutes": round(state.seconds / 60),
    }
    write_json(given.out / TRAINING_FILE, facts)
    print(f"{given.out}: {state.step} steps in {facts['minutes']} minutes")


if __name__ == "__main__":
    main()
