"""Trains the drafter of the small model, and writes it as a Hugging Face folder.

    python -m examples.train_tiny_drafter --target models/tiny --out models/tiny/draft \
        --checkpoint train.npz

It learns what the target would say next: the target, which does not change, reads a conversation,
and from many places of it the drafter fills a block. Both are graphs of `models/`, evaluated by
`mkc.ir.reference`, and the drafter's is differentiated by JAX. A step is a function of the seed
and its number; started again, a run goes on from its checkpoint file.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
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
from numpy.typing import NDArray

from examples.muon import Arrays
from examples.muon import Optimiser
from examples.muon import global_norm
from examples.parallel_delta import delta_rule
from examples.tiny_folder import CONTEXT
from examples.tiny_folder import TRAINING_FILE
from examples.tiny_folder import write_tensors
from examples.tiny_tasks import draw
from examples.tiny_text import END_OF_TURN
from examples.tiny_text import VOCAB
from examples.tiny_text import Rows
from examples.tiny_text import Teacher
from examples.tiny_text import definitions
from examples.tiny_text import write_json
from examples.train_tiny import CHECKPOINT_SECONDS
from examples.train_tiny import GRADIENT_LIMIT
from examples.train_tiny import REPORT_STEPS
from examples.train_tiny import WEIGHTS
from examples.train_tiny import State
from examples.train_tiny import batch_of
from examples.train_tiny import rate_share
from examples.train_tiny import restore
from examples.train_tiny import save
from examples.train_tiny import stored
from examples.train_tiny import tensors_of
from mkc.ir.builder import Trace
from mkc.ir.builder import build
from mkc.ir.builder import param
from mkc.ir.builder import recording
from mkc.ir.draft import ContextStep
from mkc.ir.draft import DraftStep
from mkc.ir.graph import Graph
from mkc.ir.ops import DeltaRule
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from mkc.ir.rows import with_rows_per_sequence
from mkc.ir.types import DType
from mkc.runtime.backends.opening_speculative import draft_part
from mkc.runtime.backends.opening_speculative import open_speculative
from mkc.runtime.backends.opening_speculative import target_part
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.generate import Generator
from mkc.runtime.request import Request
from mkc.runtime.request import SequenceStatistics
from mkc.runtime.text import ChatRequest
from mkc.spec import DRAFT_NAMESPACE
from mkc.spec import Round
from mkc.spec import block_round
from models import dflash2
from models.qwen38 import MODEL

STEPS = 1500
FADING = 0.9  # how much less each row of a block counts than the one before it
TABLE = "table"  # embedding and LM head of the target, in the graph of blocks
CODEBOOKS = ("predecessor_codebook", "successor_codebook")
MASK = 0  # <|endoftext|>, which no conversation has

CONFIG: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": MASK,
        "selector_rank": 32,
        "selector_top_k": 8,
        "target_layer_ids": [0, 1, 2, 3],
    },
    "dtype": "bfloat16",
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "is_causal": False,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": CONTEXT,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides a run, besides this code.

    Attributes:
      steps: number of the last one; the learning rate is zero there.
      rows: conversations in a batch.
      length: tokens of each.
      blocks: filled in each conversation.
    """

    seed: int = 0
    steps: int = STEPS
    rows: int = 8
    length: int = 128
    blocks: int = 10
    optimiser: Optimiser = Optimiser()


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and its drafter, for training.

    Attributes:
      scheme: their round, for `settings.rows` sequences.
      reading: the target over whole conversations; fills the drafter's caches.
      blocks: the drafter over blocks, one per sequence.
      weights: the target's, by parameter.
    """

    settings: Settings
    scheme: Round
    reading: Graph
    blocks: Graph
    weights: Arrays

    @classmethod
    def open(cls, target: Checkpoint, config: Mapping[str, Any], settings: Settings) -> Pair:
        """Raises `MkcError` when the drafter does not fit the target."""
        scheme = block_round(
            *(MODEL, target.config, dflash2.DRAFTER, config),
            batch=settings.rows,
            context=settings.length,
        )
        part = target_part(scheme.prefill)
        load = target.loader(part)
        tensors = {name: load(name) for one in part.params.values() for name in one.tensor_names()}
        return cls(
            settings=settings,
            scheme=scheme,
            reading=with_rows_per_sequence(scheme.prefill, settings.length),
            blocks=block_graph(dflash2.Config.from_hf(config), settings),
            weights=stack_params(part, tensors, "float32"),
        )

    @property
    def size(self) -> int:
        """Rows of a block."""
        return self.scheme.graph.rows_per_sequence

    def table(self) -> Array:
        (key,) = (key for key in self.weights if key.endswith("embed_tokens.weight"))
        return self.weights[key]


def block_graph(config: dflash2.Config, settings: Settings) -> Graph:
    """Logits and selector inputs of blocks; nothing new is remembered."""
    batch = settings.rows * settings.blocks
    record = Trace(name="blocks", rows=batch * config.block, batch=batch, context=settings.length)
    anchor = record.new_input("anchor", DType.I32, batch)
    width = len(config.target_layers) * config.hidden
    features = record.new_input("features", DType.BF16, record.rows, width)
    nowhere = record.new_input("nowhere", DType.I32, record.rows)
    sampling = [record.new_input("temperature", DType.F32, batch)]
    sampling.append(record.new_input("seed", DType.I32, batch, 2))
    with recording(record):
        table = param(TABLE, [config.vocab, config.hidden])
        record.namespace = DRAFT_NAMESPACE
        step = DraftStep(
            rows=record.rows,
            batch=batch,
            remembered=ContextStep(
                rows=record.rows,
                batch=batch,
                context=settings.length,
                features=features,
                positions=nowhere,
            ),
            anchor=anchor,
            positions=record.inputs["positions"],
            temperature=sampling[0],
            seed=sampling[1],
            table=table,
            head=table,
        )
        logits, projected = dflash2.block(config, record.inputs["tokens"], step)
    return build(record, {"logits": logits, "projected": projected})


def initial_state(scheme: Round, settings: Settings) -> State:
    """Random weights of the drafter."""
    rng = np.random.default_rng(settings.seed)
    graph = draft_part(scheme.graph)
    tensors = {
        name: initial_tensor(rng, name, one.type.shape)
        for _, one in sorted(graph.params.items())
        for name in one.tensor_names()
    }
    weights = stack_params(graph, tensors, "float32")
    return State(step=0, weights=weights, means=settings.optimiser.initial(weights), seconds=0.0)


def initial_tensor(
    rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """One tensor of a checkpoint."""
    value = rng.standard_normal(shape) / shape[-1] ** 0.5
    if name.endswith("norm.weight"):
        value = np.ones(shape)
    elif name.endswith("base_kernel"):
        value = np.zeros(shape)
        value[:, 0] = 1.0  # a row is itself
    elif name.endswith(("o_proj.weight", "down_proj.weight", "kernel_projection.weight")):
        value *= 0.2
    elif name.endswith(CODEBOOKS[1]):
        value = np.zeros(shape)
    return value.astype(np.float32)


def places_of(rng: np.random.Generator, rows: Rows, settings: Settings) -> NDArray[np.int32]:
    """Where blocks begin: newest tokens behind which the model speaks, i32 [rows, blocks]."""
    found = np.zeros((len(rows.tokens), settings.blocks), np.int32)
    for row, learned in enumerate(rows.learned):
        starts = np.flatnonzero(learned[1:])
        if len(starts):
            found[row] = rng.choice(starts, settings.blocks)
    return found


def loss_of(pair: Pair, weights: Arrays, batch: dict[str, Array]) -> tuple[Array, Array]:
    """Mean cross entropy of drafts, in nats, and mean number of right ones before a wrong one."""
    settings, size = pair.settings, pair.size
    drafter = stored(draft_part(pair.scheme.graph), weights)
    tokens, learned, places = batch["tokens"], batch["learned"], batch["places"]
    inputs = {"tokens": tokens.reshape(-1), "positions": batch["positions"].reshape(-1)}
    outputs, states = step_outputs(
        pair.reading,
        pair.weights | drafter,
        inputs,
        initial_states(pair.reading, "float32"),
        rounding="float32",
        meanings={DeltaRule: delta_rule},
    )
    said = jnp.argmax(outputs["logits"], axis=-1).reshape(tokens.shape)
    said = jnp.concatenate([tokens[:, :1], said[:, :-1]], axis=1)  # said[t] is for place t
    ahead = places[..., None] + jnp.arange(size)  # [rows, blocks, size]
    inside = jnp.minimum(ahead, settings.length - 1)
    row = jnp.arange(settings.rows)[:, None, None]
    wanted, followed = said[row, inside], (said == tokens)[row, inside].at[..., 0].set(True)
    # A token counts while the conversation is what the target would have said itself.
    counted = (learned[row, inside] > 0) & (ahead < settings.length)
    known = jnp.cumprod((followed & counted.at[..., 0].set(True))[..., :-1], axis=-1)
    counted = counted[..., 1:] & (known > 0)
    logits, projected = fill(pair, drafter, tokens, places, ahead, states)
    books = [drafter[_key(drafter, one)] for one in CODEBOOKS]
    before = jnp.concatenate([tokens[row[..., 0], places][..., None], wanted[..., 1:-1]], axis=-1)
    logits = logits[:, :, 1:]
    scores = logits + (books[0][before] * projected[:, :, 1:]) @ books[1].T
    weight = counted * FADING ** jnp.arange(size - 1)
    target = wanted[..., 1:]
    loss = sum(_cross_entropy(one, target, weight) for one in (logits, scores))
    right = (jnp.argmax(scores, axis=-1) == target) & counted
    return loss, jnp.mean(jnp.sum(jnp.cumprod(right, axis=-1), axis=-1))


def fill(
    pair: Pair, drafter: Arrays, tokens: Array, places: Array, ahead: Array, states: Arrays
) -> tuple[Array, Array]:
    """Logits and selector inputs of blocks, [rows, blocks, size, ...]."""
    settings, graph = pair.settings, pair.blocks
    anchor = tokens[jnp.arange(settings.rows)[:, None], places]
    block = jnp.full(ahead.shape, MASK, jnp.int32).at[..., 0].set(anchor)
    positions = jnp.where(ahead < settings.length, ahead, -1)
    width = {value.name: value.type.shape for value in graph.inputs}
    inputs = {
        "tokens": block.reshape(-1),
        "positions": positions.reshape(-1),
        "anchor": anchor.reshape(-1),
        "features": jnp.zeros(width["features"], jnp.float32),
        "nowhere": jnp.full(width["nowhere"], -1, jnp.int32),
        "temperature": jnp.zeros(width["temperature"], jnp.float32),
        "seed": jnp.zeros(width["seed"], jnp.int32),
    }
    caches = {key: jnp.repeat(states[key], settings.blocks, axis=1) for key in graph.states}
    weights = drafter | {TABLE: pair.table()}
    outputs, _ = step_outputs(graph, weights, inputs, caches, rounding="float32")
    logits, projected = outputs["logits"], outputs["projected"]
    return logits.reshape(*ahead.shape, -1), projected.reshape(*ahead.shape, -1)


def _key(weights: Arrays, name: str) -> str:
    (key,) = (key for key in weights if key.endswith(name))
    return key


def _cross_entropy(logits: Array, wanted: Array, weight: Array) -> Array:
    logs = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(logs, wanted[..., None], axis=-1)[..., 0]
    return -jnp.sum(chosen * weight) / jnp.maximum(jnp.sum(weight), 1.0)


def training_step(pair: Pair) -> Callable[..., Any]:
    """A compiled function `(weights, means, step, batch) -> (weights, means, loss, right)`."""
    settings = pair.settings

    @partial(jax.jit, donate_argnums=(0, 1))
    def step_function(
        weights: Arrays, means: dict[str, Arrays], step: Array, batch: dict[str, Array]
    ) -> tuple[Arrays, dict[str, Arrays], Array, Array]:
        gradient = jax.value_and_grad(partial(loss_of, pair), has_aux=True)
        (loss, right), gradients = gradient(weights, batch)
        scale = jnp.minimum(1.0, GRADIENT_LIMIT / (global_norm(gradients) + 1e-9))
        gradients = {key: one * scale for key, one in gradients.items()}
        share = rate_share(step, settings.steps)
        weights, means = settings.optimiser.update(weights, gradients, means, step, share)
        return weights, means, loss, right

    return step_function


def train(
    pair: Pair,
    teacher: Teacher,
    checkpoint: Path,
    *,
    until: int | None = None,
    say: Callable[[str], None] = print,
) -> State:
    """Trains up to step `until`, by default to the end, and saves the checkpoint there."""
    settings = pair.settings
    state = restore(checkpoint) if checkpoint.exists() else initial_state(pair.scheme, settings)
    step_function = training_step(pair)

    def batch(step: int) -> dict[str, Array]:
        shape = {"rows": settings.rows, "length": settings.length}
        rows = teacher.rows(Random(f"{settings.seed}/{step}"), weights=WEIGHTS, **shape)
        rng = np.random.default_rng([settings.seed, step])
        return batch_of(rows) | {"places": jnp.asarray(places_of(rng, rows, settings))}

    weights, means = state.weights, state.means
    began = saved = perf_counter()
    found: list[tuple[Array, Array]] = []
    with ThreadPoolExecutor(1) as ahead:
        waiting = ahead.submit(batch, state.step)
        for step in range(state.step, settings.steps if until is None else until):
            given, waiting = waiting.result(), ahead.submit(batch, step + 1)
            weights, means, *seen = step_function(weights, means, jnp.int32(step), given)
            found.append((seen[0], seen[1]))
            now = perf_counter()
            state = State(
                step=step + 1, weights=weights, means=means, seconds=state.seconds + now - began
            )
            began = now
            if state.step % REPORT_STEPS == 0:
                loss, right = np.mean(jax.device_get(found), axis=0)
                progress = f"step {state.step}/{settings.steps} loss {loss:.4f}"
                say(f"{progress} right {right:.2f} {state.seconds:.0f} s")
                found = []
            if now - saved > CHECKPOINT_SECONDS:
                save(checkpoint, state)
                saved = now
    save(checkpoint, state)
    return state


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Of greedy answers to unseen items.

    Attributes:
      answers: how many.
      tokens: of all answers, without the first one of each, which comes from the prompt.
      rounds: that these took.
      drafted, accepted: tokens.
    """

    answers: int
    tokens: int
    rounds: int
    drafted: int
    accepted: int

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds


def measure(target: Checkpoint, draft: Checkpoint, teacher: Teacher, *, items: int) -> Acceptance:
    """Answers `items` unseen items of each task as `mkc run` does, one after the other."""
    scheme = block_round(
        *(MODEL, target.config, dflash2.DRAFTER, draft.config), batch=1, context=256
    )
    opened = open_speculative(scheme, target, draft, rounds_per_launch=8)
    generator = Generator(opened.backend, stop_ids=(teacher.special(END_OF_TURN),))
    found: list[SequenceStatistics] = []
    for task in (one for one in WEIGHTS if one != "small_talk"):
        rng = Random(f"acceptance/{task}")
        for _ in range(items):
            asked = draw(rng, task, held_out=True)
            tools = definitions(asked.tools)
            prompt = teacher.chat.encode(ChatRequest(messages=asked.messages, tools=tools))
            output = generator.generate(Request(tokens=prompt.ids, max_tokens=96))
            found.append(output.finish.statistics)
    return Acceptance(
        answers=len(found),
        tokens=sum(one.output_tokens - 1 for one in found),
        rounds=sum(one.rounds for one in found),
        drafted=sum(one.drafted for one in found),
        accepted=sum(one.accepted for one in found),
    )


def main() -> None:
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the small model")
    parser.add_argument("--out", type=Path, required=True, help="folder of the drafter")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to go on from")
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--items", type=int, default=5, help="of each task, to measure it")
    given = parser.parse_args()
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
    settings = Settings(seed=given.seed, steps=given.steps)
    pair = Pair.open(Checkpoint.open(str(given.target)), CONFIG, settings)
    teacher = Teacher(given.target)
    state = train(pair, teacher, given.checkpoint, say=partial(print, flush=True))
    given.out.mkdir(parents=True, exist_ok=True)
    write_json(given.out / "config.json", CONFIG)
    write_tensors(given.out, tensors_of(draft_part(pair.scheme.graph), state.weights))
    target, draft = (Checkpoint.open(str(one)) for one in (given.target, given.out))
    seen = measure(target, draft, teacher, items=given.items)
    facts = {
        "steps": state.step,
        "seed": given.seed,
        "minutes": round(state.seconds / 60),
        "tokens_per_round": round(seen.tokens_per_round, 3),
        **asdict(seen),
    }
    write_json(given.out / TRAINING_FILE, facts)
    print(f"{given.out}: {seen.tokens_per_round:.2f} tokens per round on {seen.answers} answers")


if __name__ == "__main__":
    main()
