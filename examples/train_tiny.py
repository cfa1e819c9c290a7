"""Trains a small model that comes with mkc, and writes it as a Hugging Face folder.

    python -m examples.train_tiny --out models/tiny --checkpoint train.npz
    python -m examples.train_tiny --family kimi_tiny --out models/kimi_tiny --checkpoint train.npz

The model is the graph of `models/`, evaluated by `mkc.ir.reference` over many rows of a sequence
and differentiated by JAX. A step is a function of the seed and its number, and all that a
run remembers is in its checkpoint file: started again, it goes on as if it had not been ended.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from examples.dense_experts import expert_mlp
from examples.muon import Arrays
from examples.muon import Optimiser
from examples.muon import global_norm
from examples.mxfp4_rounding import encoded as mxfp4
from examples.mxfp4_rounding import rounded
from examples.parallel_delta import delta_rule
from examples.tiny_family import FAMILIES
from examples.tiny_family import TINY
from examples.tiny_family import Family
from examples.tiny_folder import TRAINING_FILE
from examples.tiny_folder import write_model
from examples.tiny_text import Rows
from examples.tiny_text import Teacher
from examples.tiny_text import write_json
from mkc.ir.graph import Graph
from mkc.ir.ops import DeltaRule
from mkc.ir.ops_experts import ExpertMlp
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from mkc.ir.rows import with_rows_per_sequence
from mkc.ir.types import DType

WARM_UP = 40  # steps until the learning rate is full
DECAY = 0.6  # share of the steps in which it falls to zero again
GRADIENT_LIMIT = 1.0  # on the norm
STEPS = [1000, 3600, 7200]
STEPS_HELP = "ends of schedules: the learning rate falls to zero up to each, then is full again"
REPORT_STEPS = 20
TEST_STEPS = 100
CHECKPOINT_SECONDS = 120.0
# The same values as the ops' own, with cheaper gradients.
MEANINGS = {DeltaRule: delta_rule, ExpertMlp: expert_mlp}

# (weights, batch) -> what is to become small
type Loss = Callable[[Arrays, dict[str, Array]], Array]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides a run, besides this code.

    Attributes:
      steps: number of the last one; the learning rate is zero there.
      rows: conversations in a batch.
      length: tokens of each.
      tests: batches of unseen items to look at now and then; they change nothing.
    """

    seed: int = 0
    steps: int = STEPS[-1]
    rows: int = 8
    length: int = 128
    tests: int = 6
    optimiser: Optimiser = Optimiser()


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything that training changes. Weights by parameter, stacked as `stack_params` does."""

    step: int
    weights: Arrays
    means: dict[str, Arrays]
    seconds: float


def row_graph(settings: Settings, family: Family = TINY) -> Graph:
    """The model for a whole batch at once."""
    graph = family.model.trace(family.config, batch=settings.rows, context=settings.length)
    return with_rows_per_sequence(graph, settings.length)


def initial_state(graph: Graph, settings: Settings, family: Family = TINY) -> State:
    """Random weights."""
    rng = np.random.default_rng(settings.seed)
    tensors = {
        name: family.initial_tensor(rng, name, param.tensor_type.shape)
        for _, param in sorted(graph.params.items())
        for name in param.tensor_names()
    }
    weights = stack_params(graph, tensors, "float32")
    return State(step=0, weights=weights, means=settings.optimiser.initial(weights), seconds=0.0)


def stored(graph: Graph, weights: Arrays, encoded: str = "") -> Arrays:
    """Weights as a checkpoint rounds them; gradients pass as if nothing was rounded.

    Args:
      encoded: part of the names of matrices in MXFP4; empty for none.
    """
    found = {}
    for key, weight in weights.items():
        short = weight
        if encoded and encoded in key:
            short = rounded(weight)
        elif graph.params[key].type.dtype is DType.BF16:
            short = weight.astype(jnp.bfloat16).astype(jnp.float32)
        found[key] = weight + jax.lax.stop_gradient(short - weight)
    return found


def predict(
    graph: Graph, weights: Arrays, tokens: Array, positions: Array, *, encoded: str = ""
) -> Array:
    """Logits [rows, length, vocab] of every token: those of the one that follows."""
    inputs = {"tokens": tokens.reshape(-1), "positions": positions.reshape(-1)}
    outputs, _ = step_outputs(
        graph,
        stored(graph, weights, encoded),
        inputs,
        initial_states(graph, "float32"),
        rounding="float32",
        meanings=MEANINGS,
    )
    return outputs["logits"].reshape(*tokens.shape, -1)


def loss_of(graph: Graph, weights: Arrays, batch: dict[str, Array], *, encoded: str = "") -> Array:
    """Mean cross entropy of what the model has to say, in nats."""
    logits = predict(graph, weights, batch["tokens"], batch["positions"], encoded=encoded)[:, :-1]
    wanted, counted = batch["tokens"][:, 1:], batch["learned"][:, 1:]
    logs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logs, wanted[..., None], axis=-1)[..., 0]
    return -jnp.sum(chosen * counted) / jnp.maximum(jnp.sum(counted), 1.0)


def rate_share(step: Array, steps: int) -> Array:
    """Share of the learning rates: up, level, and down to zero in a straight line."""
    up = (step + 1) / WARM_UP
    down = (steps - step) / (DECAY * steps)
    return jnp.clip(jnp.minimum(up, down), 0.0, 1.0)


def training_step(loss_of: Loss, settings: Settings) -> Callable[..., Any]:
    """A compiled function `(weights, means, step, batch) -> (weights, means, loss)`."""

    @partial(jax.jit, donate_argnums=(0, 1))
    def step_function(
        weights: Arrays, means: dict[str, Arrays], step: Array, batch: dict[str, Array]
    ) -> tuple[Arrays, dict[str, Arrays], Array]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
        scale = jnp.minimum(1.0, GRADIENT_LIMIT / (global_norm(gradients) + 1e-9))
        gradients = {key: one * scale for key, one in gradients.items()}
        share = rate_share(step, settings.steps)
        weights, means = settings.optimiser.update(weights, gradients, means, step, share)
        return weights, means, loss

    return step_function


def batch_of(rows: Rows) -> dict[str, Array]:
    return {
        "tokens": jnp.asarray(rows.tokens),
        "positions": jnp.asarray(rows.positions),
        "learned": jnp.asarray(rows.learned),
    }


def accuracy(
    choose: Callable[[Arrays, Array, Array], Array], weights: Arrays, tests: list[Rows]
) -> dict[str, float]:
    """Share of the answers that greedy decoding would give word for word, by task."""
    right: dict[str, list[bool]] = defaultdict(list)
    for rows in tests:
        batch = batch_of(rows)
        chosen = np.asarray(choose(weights, batch["tokens"], batch["positions"]))
        same = (chosen[:, :-1] == rows.tokens[:, 1:]) | (rows.learned[:, 1:] == 0)
        for task, row, start, end in rows.tasks:
            right[task].append(bool(same[row, max(start - 1, 0) : end - 1].all()))
    return {task: float(np.mean(found)) for task, found in sorted(right.items())}


def save(path: Path, state: State) -> None:
    """Writes the checkpoint; a run that ends in between leaves the one before."""
    arrays = {f"weights/{key}": np.asarray(one) for key, one in state.weights.items()}
    for kind, means in state.means.items():
        arrays |= {f"{kind}/{key}": np.asarray(one) for key, one in means.items()}
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, step=state.step, seconds=state.seconds, **arrays)
    os.replace(unfinished, path)


def restore(path: Path) -> State:
    with np.load(path) as found:
        kinds: dict[str, Arrays] = {"weights": {}, "first": {}, "second": {}}
        for name in found.files:
            kind, _, key = name.partition("/")
            if key:
                kinds[kind][key] = jnp.asarray(found[name])
        return State(
            step=int(found["step"]),
            weights=kinds["weights"],
            means={"first": kinds["first"], "second": kinds["second"]},
            seconds=float(found["seconds"]),
        )


def train(
    settings: Settings,
    teacher: Teacher,
    checkpoint: Path,
    *,
    family: Family = TINY,
    until: int | None = None,
    say: Callable[[str], None] = print,
) -> State:
    """Trains up to step `until`, by default to the end, and saves the checkpoint there."""
    graph = row_graph(settings, family)
    predicted = partial(predict, graph, encoded=family.encoded)
    choose = jax.jit(lambda *given: jnp.argmax(predicted(*given), axis=-1))
    shape = {"rows": settings.rows, "length": settings.length}

    def batch(step: int) -> dict[str, Array]:
        rng = Random(f"{settings.seed}/{step}")
        return batch_of(teacher.rows(rng, weights=family.weights, **shape))

    even = {task: 1.0 for task in family.weights if task != "small_talk"}
    tests = [
        teacher.rows(Random(f"test/{number}"), weights=even, held_out=True, **shape)
        for number in range(settings.tests)
    ]

    def look(weights: Arrays) -> str:
        found = accuracy(choose, weights, tests)
        return " ".join(f"{task} {share:.2f}" for task, share in found.items())

    return run_steps(
        restore(checkpoint) if checkpoint.exists() else initial_state(graph, settings, family),
        settings.steps if until is None else until,
        training_step(partial(loss_of, graph, encoded=family.encoded), settings),
        batch,
        checkpoint,
        look=look if tests else None,
        say=say,
    )


def run_steps(
    state: State,
    last: int,
    step_function: Callable[..., Any],
    batch: Callable[[int], dict[str, Array]],
    checkpoint: Path,
    *,
    look: Callable[[Arrays], str] | None,
    say: Callable[[str], None],
) -> State:
    """Does steps up to `last`, and saves the checkpoint now and then and at the end.

    Args:
      step_function: as `training_step` makes it.
      batch: what a step sees, by the number of the step.
      look: says how good weights are; it changes nothing.
    """
    weights, means = state.weights, state.means
    began = saved = perf_counter()
    losses: list[Array] = []
    with ThreadPoolExecutor(1) as ahead:
        waiting = ahead.submit(batch, state.step)
        for step in range(state.step, last):
            given, waiting = waiting.result(), ahead.submit(batch, step + 1)
            weights, means, loss = step_function(weights, means, jnp.int32(step), given)
            losses.append(loss)
            done = step + 1
            now = perf_counter()
            state = State(
                step=done, weights=weights, means=means, seconds=state.seconds + now - began
            )
            began = now
            if done % REPORT_STEPS == 0:
                mean = float(np.mean(jax.device_get(losses)))
                say(f"step {done}/{last} loss {mean:.4f} {state.seconds:.0f} s")
                losses = []
            if look is not None and done % TEST_STEPS == 0:
                say(look(weights))
            if now - saved > CHECKPOINT_SECONDS:
                save(checkpoint, state)
                saved = now
    save(checkpoint, state)
    return state


def tensors_of(graph: Graph, weights: Arrays, encoded: str = "") -> dict[str, NDArray[Any]]:
    """Checkpoint tensors by name, in the dtype of the graph, or encoded as `stored` rounds them."""
    found: dict[str, NDArray[Any]] = {}
    for key, param in graph.params.items():
        names = list(param.tensor_names())
        shape = len(names), *param.tensor_type.shape
        array = np.asarray(weights[key]).reshape(shape)
        if encoded and encoded in key:
            codes, scales = mxfp4(array)
            found |= {f"{name}_packed": one for name, one in zip(names, codes, strict=True)}
            found |= {f"{name}_scale": one for name, one in zip(names, scales, strict=True)}
        else:
            dtype = bfloat16 if param.type.dtype is DType.BF16 else np.float32
            found |= dict(zip(names, array.astype(dtype), strict=True))
    return found


def main() -> None:
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, default="tiny", help="which of the models")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to go on from")
    parser.add_argument("--steps", type=int, nargs="+", default=STEPS, help=STEPS_HELP)
    parser.add_argument("--seed", type=int, default=default.seed)
    given = parser.parse_args()
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
    family = FAMILIES[given.family]
    family.write_text(given.out, given.seed)
    teacher = Teacher(given.out, family.markup)
    say = partial(print, flush=True)
    for steps in given.steps:
        settings = Settings(seed=given.seed, steps=steps)
        state = train(settings, teacher, given.checkpoint, family=family, say=say)
    write_model(
        given.out,
        tensors_of(row_graph(settings, family), state.weights, family.encoded),
        family.stored_config,
        end_of_turn=family.markup.end,
    )
    facts = {
        "steps": given.steps,
        "seed": given.seed,
        "rows": settings.rows,
        "length": settings.length,
        "minutes": round(state.seconds / 60),
    }
    write_json(given.out / TRAINING_FILE, facts)
    print(f"{given.out}: {state.step} steps in {facts['minutes']} minutes")


if __name__ == "__main__":
    main()
