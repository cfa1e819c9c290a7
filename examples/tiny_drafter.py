"""The small model's drafter while it learns: many blocks of a conversation in one evaluation.

Nothing is written a second time: the target with its taps is `models/qwen38.py`, the drafter is
`models/dflash2.py`. Only attention gets another form, in which the blocks of a conversation share
its keys and values instead of a cache each.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

import mkc
from examples.muon import Arrays
from examples.parallel_delta import delta_rule
from examples.tiny_folder import CONTEXT
from examples.tiny_folder import TEXT_CONFIG
from examples.tiny_text import Rows
from examples.train_tiny import initial_tensor
from examples.train_tiny import stored
from mkc.ir.builder import Trace
from mkc.ir.builder import apply
from mkc.ir.builder import build
from mkc.ir.builder import recording
from mkc.ir.graph import Graph
from mkc.ir.ops import DeltaRule
from mkc.ir.ops_spec import BlockAttention
from mkc.ir.ops_spec import ReadTaps
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from mkc.ir.reference_ops import OpContext
from mkc.ir.reference_ops import Outcome
from mkc.ir.reference_ops import wide
from mkc.ir.types import DType
from mkc.runtime.checkpoint import Checkpoint
from mkc.spec.scheme import step_of
from mkc.spec.scheme import without_unread
from mkc.spec.taps import connect
from models import dflash2
from models import qwen38

BLOCK = 8
MASK = 759  # <|endoftext|>, which no conversation has
WINDOW = 128  # what the target was trained on
DRAFT_CONFIG: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "attention_bias": False,
    "dflash_config": {
        "block_size": BLOCK,
        "conv_group_size": 8,
        "conv_kernel_size": 2,
        "mask_token_id": MASK,
        "selector_rank": 32,
        "selector_top_k": 16,
        "target_layer_ids": [0, 1, 2, 3],
    },
    "dtype": "bfloat16",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": TEXT_CONFIG["hidden_size"],
    "intermediate_size": 512,
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 2,
    "max_position_embeddings": CONTEXT,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": TEXT_CONFIG["num_hidden_layers"],
    "rms_norm_eps": TEXT_CONFIG["rms_norm_eps"],
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": WINDOW,
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "vocab_size": TEXT_CONFIG["vocab_size"],
}
EMBEDDING = "model.language_model.embed_tokens.weight"
PREDECESSOR = dflash2.SELECTOR + "predecessor_codebook"
SUCCESSOR = dflash2.SELECTOR + "successor_codebook"
FADING = (
    4.0  # drafts by which the weight of one falls to 1 / e: it counts if those before are right
)
PLAIN_SHARE = 0.5  # of the loss without the selector, which decides what are candidates


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Conversations with something to draft.

    Attributes:
      tokens, positions: i32 [rows, length], position -1 for padding.
      said: bool like them, what the model said.
    """

    tokens: NDArray[np.int32]
    positions: NDArray[np.int32]
    said: NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Rows) -> Answers:
        """Those of the rows that have two tokens of an answer in turn."""
        said = rows.learned > 0
        kept = np.any(said[:, :-1] & said[:, 1:], axis=1)
        return cls(tokens=rows.tokens[kept], positions=rows.positions[kept], said=said[kept])

    def blocks(
        self, rng: np.random.Generator, *, rows: int, blocks: int, drafts: int
    ) -> dict[str, Array]:
        """Some conversations, with blocks to fill at random places of their answers.

        Returns:
          `tokens`, `positions` i32 [rows, length]; `anchors` i32 [rows, blocks], places of the
          blocks' newest tokens; `wanted` i32 [rows, blocks, drafts], the tokens behind them;
          `counted` f32 like it, 0 behind the end of the answer.
        """
        chosen = rng.choice(len(self.said), rows, replace=False)
        tokens, said = self.tokens[chosen], self.said[chosen]
        starts = said[:, :-1] & said[:, 1:]
        anchors = np.stack([rng.choice(np.flatnonzero(one), blocks) for one in starts])
        places = anchors[:, :, None] + np.arange(1, drafts + 1)
        inside = np.minimum(places, said.shape[1] - 1)
        row = np.arange(rows)[:, None, None]
        there = said[row, inside] & (places == inside)
        found = {
            "tokens": tokens,
            "positions": self.positions[chosen],
            "anchors": anchors.astype(np.int32),
            "wanted": tokens[row, inside],
            "counted": np.cumprod(there, axis=-1).astype(np.float32),
        }
        return {name: jnp.asarray(one) for name, one in found.items()}


@dataclass(frozen=True, kw_only=True)
class Pupil:
    """The drafter behind its target, which does not change.

    Attributes:
      target: tokens [rows * length] -> features of every one.
      drafter: features, anchors and positions -> logits, what the selector sees of them, drafts.
      target_weights: as `stack_params` gives them.
    """

    target: Graph
    drafter: Graph
    target_weights: Arrays

    def evaluate(self, weights: Arrays, batch: dict[str, Array]) -> dict[str, Array]:
        """Outputs of `drafter`, each [rows, blocks, BLOCK, ...]."""
        positions = batch["positions"].reshape(-1)
        seen, _ = step_outputs(
            self.target,
            self.target_weights,
            {"tokens": batch["tokens"].reshape(-1), "positions": positions},
            initial_states(self.target, "float32"),
            rounding="float32",
            meanings={DeltaRule: delta_rule},
        )
        anchors = batch["anchors"]
        newest = jnp.take_along_axis(batch["tokens"], anchors, axis=1)
        places = anchors.reshape(-1, 1) + jnp.arange(BLOCK)
        inputs = {
            "tokens": jnp.zeros(places.size, jnp.int32),
            "anchor": newest.reshape(-1),
            "positions": places.reshape(-1),
            "features": jax.lax.stop_gradient(seen["features"]),
            "seen": positions,
        }
        embedding = {EMBEDDING: self.target_weights[EMBEDDING]}
        found, _ = step_outputs(
            self.drafter,
            stored(self.drafter, weights) | embedding,
            inputs,
            initial_states(self.drafter, "float32"),
            rounding="float32",
            meanings={BlockAttention: shared_attention(len(batch["tokens"]))},
        )
        shape = (*anchors.shape, BLOCK)
        return {name: one.reshape(*shape, *one.shape[1:]) for name, one in found.items()}

    def loss(self, weights: Arrays, batch: dict[str, Array]) -> Array:
        """Cross entropy of the drafts with and without the selector, in nats.

        The selector is shown the right token before each, and chooses among the candidates and
        the wanted token, should that be none of them.
        """
        found = self.evaluate(weights, batch)
        logits, projected = found["logits"][:, :, 1:], found["projected"][:, :, 1:]
        wanted, counted = batch["wanted"], batch["counted"]
        newest = jnp.take_along_axis(batch["tokens"], batch["anchors"], axis=1)
        before = jnp.concatenate([newest[..., None], wanted[..., :-1]], axis=-1)
        books = stored(self.drafter, {key: weights[key] for key in (PREDECESSOR, SUCCESSOR)})
        scores = logits + (books[PREDECESSOR][before] * projected) @ books[SUCCESSOR].T
        count = DRAFT_CONFIG["dflash_config"]["selector_top_k"]
        least = jax.lax.top_k(jax.lax.stop_gradient(logits), count)[0][..., -1:]
        is_wanted = jnp.arange(logits.shape[-1]) == wanted[..., None]
        scores = jnp.where((logits >= least) | is_wanted, scores, -jnp.inf)
        share = jnp.exp(-jnp.arange(wanted.shape[-1]) / FADING) * counted
        total = cross_entropy(scores, wanted) + PLAIN_SHARE * cross_entropy(logits, wanted)
        return jnp.sum(total * share) / jnp.maximum(jnp.sum(share), 1.0)

    def accepted(self, weights: Arrays, batch: dict[str, Array]) -> Array:
        """How many drafts of each block are right up to the first wrong one: [rows, blocks]."""
        drafts = self.evaluate(weights, batch)["drafts"][:, :, 1:]
        right = (drafts == batch["wanted"]) & (batch["counted"] > 0)
        return jnp.sum(jnp.cumprod(right, axis=-1), axis=-1)


def cross_entropy(scores: Array, wanted: Array) -> Array:
    """[..., vocab] and [...] -> [...], in nats."""
    logs = jax.nn.log_softmax(scores)
    return -jnp.take_along_axis(logs, wanted[..., None], axis=-1)[..., 0]


def pupil(
    checkpoint: Checkpoint,
    *,
    rows: int,
    length: int,
    config: Mapping[str, Any] = DRAFT_CONFIG,
) -> Pupil:
    """The drafter for so many conversations, and `blocks_of(length)` in each.

    Args:
      checkpoint: of the target.
    """
    loaded = dflash2.Config.from_hf(config)
    target = target_graph(checkpoint.config, loaded, rows=rows, length=length)
    names = [name for one in target.params.values() for name in one.tensor_names()]
    tensors = {name: np.asarray(checkpoint.load(name)) for name in names}
    return Pupil(
        target=target,
        drafter=drafter_graph(loaded, rows=rows, length=length),
        target_weights=stack_params(target, tensors, "float32"),
    )


def target_graph(
    target: Mapping[str, Any], config: dflash2.Config, *, rows: int, length: int
) -> Graph:
    """What the drafter looks at, of all tokens of some conversations."""
    record = Trace(name="target", rows=rows * length, batch=rows, context=length, taps=True)
    with recording(record):
        qwen38.MODEL.decoder(qwen38.MODEL.load_config(target), step_of(record))
        op = ReadTaps(name=dflash2.TAP, layers=config.target_layers, width=config.hidden)
        (features,) = apply(op, record.inputs["positions"])
    graph = connect(build(record, {"features": features}), drafter=dflash2.DRAFTER.name)
    return without_unread(graph)


def blocks_of(length: int) -> int:
    """Blocks in a conversation; a graph wants as many rows of them as rows that they look at."""
    return length // BLOCK


def drafter_graph(config: dflash2.Config, *, rows: int, length: int) -> Graph:
    """Blocks of some conversations, those of one after the other."""
    count = rows * blocks_of(length)
    # The caches are not used, see `shared_attention`.
    record = Trace(name="drafter", rows=count * config.block, batch=count, context=1)
    width = len(config.target_layers) * config.hidden
    context = mkc.ContextStep(
        rows=rows * length,
        batch=rows,
        context=length,
        features=record.new_input("features", DType.BF16, rows * length, width),
        positions=record.new_input("seen", DType.I32, rows * length),
    )
    anchor = record.new_input("anchor", DType.I32, count)
    with recording(record):
        table = mkc.param(EMBEDDING, [config.vocab, config.hidden])
        step = mkc.DraftStep(
            rows=record.rows,
            batch=count,
            remembered=context,
            anchor=anchor,
            positions=record.inputs["positions"],
            sampling=(),
            table=table,
            head=table,
        )
        tokens = mkc.block_tokens(step, mask=config.mask)
        logits, projected = dflash2.block(config, tokens, step)
        drafts = dflash2.select(config, logits, projected, tokens, step)
    return build(record, {"logits": logits, "projected": projected, "drafts": drafts.tokens})


def shared_attention(rows: int) -> Callable[..., Outcome]:
    """`block_attention` without caches: each block sees its conversation up to its anchor.

    Args:
      rows: conversations; every one has the same number of blocks.
    """

    def attention(
        op: BlockAttention, operands: tuple[Array, ...], states: Any, context: OpContext
    ) -> Outcome:
        assert not op.causal, "blocks are bidirectional"
        q, k, v, positions, seen_k, seen_v, seen = operands
        places = positions.reshape(rows, -1, BLOCK)
        blocks, (heads, size) = places.shape[1], k.shape[1:]
        seen = seen.reshape(rows, 1, 1, -1)
        distance = places[..., None] - seen  # [rows, blocks, BLOCK, length]
        visible = (seen >= 0) & (seen < places[:, :, :1, None])
        if op.window is not None:
            assert op.window >= BLOCK, "a block sees all of itself"
            visible = visible & (distance < op.window)
        grouped = wide(q).reshape(rows, blocks, BLOCK, heads, -1, size)
        k, v = (wide(one).reshape(rows, blocks, BLOCK, heads, size) for one in (k, v))
        seen_k, seen_v = (wide(one).reshape(rows, -1, heads, size) for one in (seen_k, seen_v))
        far = jnp.einsum("sbqhgd,schd->sbhgqc", grouped, seen_k) * op.scale
        near = jnp.einsum("sbqhgd,sbkhd->sbhgqk", grouped, k) * op.scale
        far = jnp.where(visible[:, :, None, None], far, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1)
        split = far.shape[-1]
        out = jnp.einsum("sbhgqc,schd->sbqhgd", weights[..., :split], seen_v)
        out = out + jnp.einsum("sbhgqk,sbkhd->sbqhgd", weights[..., split:], v)
        return (context.result(out.reshape(q.shape)),), states

    return attention


def initial_draft_tensor(
    rng: np.random.Generator, name: str, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """One tensor of the drafter's checkpoint; at first convolutions let everything through."""
    if name == "norm.weight":
        return np.full(shape, 0.1, np.float32)  # the target's LM head makes large logits of ones
    if name.endswith("norm.weight"):
        return np.ones(shape, np.float32)
    if name.endswith("base_kernel"):
        base = np.zeros(shape, np.float32)
        base[:, 0] = 1.0
        return base
    if name.endswith("kernel_projection.weight"):
        return (rng.standard_normal(shape) * 0.1 / sqrt(shape[-1])).astype(np.float32)
    if name.endswith("codebook"):
        return (rng.standard_normal(shape) * 0.3).astype(np.float32)
    return initial_tensor(rng, name, shape)
