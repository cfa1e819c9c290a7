"""Trains the drafter of a small model on what the small model says.

    python -m examples.train_tiny_drafter --target models/tiny --out models/tiny/drafter \
        --checkpoint drafter.npz
    python -m examples.train_tiny_drafter --family kimi_tiny --target models/kimi_tiny \
        --out models/kimi_tiny/drafter --checkpoint drafter.npz --taught

First the target answers questions, which are kept in a file beside the checkpoint (with --taught,
the right answers are); then the drafter learns to continue these answers from what the target's
layers show. As with `train_tiny`, a run that was ended goes on as if it had not been.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jax
import numpy as np
from jax import Array

from examples.muon import Arrays
from examples.tiny_dflash2 import DFLASH2
from examples.tiny_drafter import BLOCK
from examples.tiny_drafter import Answers
from examples.tiny_drafter import Pupil
from examples.tiny_drafter import blocks_of
from examples.tiny_drafter import pupil
from examples.tiny_dspark import DSPARK
from examples.tiny_family import FAMILIES
from examples.tiny_family import Family
from examples.tiny_folder import TRAINING_FILE
from examples.tiny_folder import write_tensors
from examples.tiny_outputs import Speaker
from examples.tiny_outputs import load_rows
from examples.tiny_outputs import save_rows
from examples.tiny_text import Teacher
from examples.tiny_text import write_json
from examples.train_tiny import STEPS_HELP
from examples.train_tiny import Settings
from examples.train_tiny import State
from examples.train_tiny import restore
from examples.train_tiny import run_steps
from examples.train_tiny import tensors_of
from examples.train_tiny import training_step
from mkc.ir.reference import stack_params
from mkc.runtime.checkpoint import Checkpoint

CONVERSATIONS = 4096
TEST_CONVERSATIONS = 96
DRAFTS = BLOCK - 1
STEPS = [1500]
HELP = "learn from right answers, not from those of the target, which take long to make"
KINDS = {"tiny": DFLASH2, "kimi_tiny": DSPARK}


def answers(
    target: Path,
    family: Family,
    settings: Settings,
    file: Path,
    *,
    held_out: bool,
    taught: bool = False,
) -> Answers:
    """What is to be drafted, from `file` if it is there, else in a new file.

    Args:
      taught: the right answers rather than those of the target.
    """
    if not file.exists():
        weights = family.weights
        if held_out:
            weights = {task: 1.0 for task in weights if task != "small_talk"}
        name = "tests" if held_out else f"outputs/{settings.seed}"
        count = TEST_CONVERSATIONS if held_out else CONVERSATIONS
        if taught:
            teacher = Teacher(target, family.markup)
            shape = {"rows": count, "length": settings.length}
            rows = teacher.rows(Random(name), weights=weights, held_out=held_out, **shape)
        else:
            speaker = Speaker(target, family, length=settings.length)
            rows = speaker.rows(name, rows=count, weights=weights, held_out=held_out)
        save_rows(file, rows)
    return Answers.of(load_rows(file))


def initial_state(taught: Pupil, settings: Settings) -> State:
    """Random weights of the drafter; the embedding may be the target's."""
    rng = np.random.default_rng(settings.seed)
    graph, kind = taught.drafter, taught.kind
    tensors = {
        name: kind.initial_tensor(rng, name, param.type.shape)
        for key, param in sorted(graph.params.items())
        for name in param.tensor_names()
    }
    weights = stack_params(graph, tensors, "float32")
    weights.pop(kind.embedding, None)
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
        initial_state(taught, settings) if fresh else restore(checkpoint),
        settings.steps if until is None else until,
        training_step(taught.loss, settings),
        batch,
        checkpoint,
        look=look if unseen else None,
        say=say,
    )


def write_drafter(
    folder: Path, taught: Pupil, weights: Arrays, config: Mapping[str, Any] | None = None
) -> None:
    """Writes config and weights, without those of the target."""
    own = {key: one for key, one in taught.drafter.params.items() if key in weights}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config or taught.kind.config)
    tensors = tensors_of(replace(taught.drafter, params=own), weights)
    write_tensors(folder / "model.safetensors", tensors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default="tiny", help="which of the models")
    parser.add_argument("--target", type=Path, required=True, help="folder of the small model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to go on from")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help=STEPS_HELP)
    parser.add_argument("--taught", action="store_true", help=HELP)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
    settings = Settings(seed=given.seed, steps=given.steps[-1])
    tests, learned = (
        answers(
            given.target,
            FAMILIES[given.family],
            settings,
            given.checkpoint.with_suffix(suffix),
            held_out=held_out,
            taught=given.taught,
        )
        for suffix, held_out in ((".tests.npz", True), (".outputs.npz", False))
    )
    target = Checkpoint.open(given.target)
    taught = pupil(target, KINDS[given.family], rows=settings.rows, length=settings.length)
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
        "answers": "right ones" if given.taught else "the model's own",
        "rows": settings.rows,
        "length": settings.length,
        "blocks": blocks_of(settings.length),
        "minutes": round(state.seconds / 60),
    }
    write_json(given.out / TRAINING_FILE, facts)
    print(f"{given.out}: {state.step} steps in {facts['minutes']} minutes")


if __name__ == "__main__":
    main()
