"""A small model's drafter while it learns: many blocks of a conversation in one evaluation.

Nothing is written a second time: the target with its taps and the drafter are those of `models/`.
Only attention gets another form, in which the blocks of a conversation share its keys and values
instead of a cache each.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

import mkc
from examples.muon import Arrays
from examples.tiny_family import InitialTensor
from examples.tiny_text import Rows
from examples.train_tiny import MEANINGS
from examples.train_tiny import stored
from mkc.ir.builder import Trace
from mkc.ir.builder import apply
from mkc.ir.builder import build
from mkc.ir.builder import recording
from mkc.ir.graph import Graph
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

BLOCK = 8  # rows, one of them the newest token
FADING = (
    4.0  # drafts by which the weight of one falls to 1 / e: it counts if those before are right
)

type Outputs = dict[str, mkc.Tensor]


@dataclass(frozen=True, kw_only=True)
class DraftKind:
    """One kind of drafter, as far as training has to know.

    Attributes:
      target: the model that it drafts for.
      config: contents of its config.json.
      embedding: the target's table, which is not the drafter's to change.
      outputs: `drafts`, and what `errors` reads, of every row of the blocks.
      errors: of each draft, from the drafter's weights, `outputs` [rows, blocks, BLOCK, ...] and
        a batch: f32 [rows, blocks, drafts], what is to become small.
      initial_tensor: one tensor of its checkpoint at first.
    """

    target: mkc.Model
    drafter: mkc.Drafter
    config: Mapping[str, Any]
    embedding: str
    outputs: Callable[[Any, mkc.DraftStep], Outputs]
    errors: Callable[[Arrays, dict[str, Array], dict[str, Array]], Array]
    initial_tensor: InitialTensor


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
      drafter: features, anchors and positions -> the outputs of the kind.
      target_weights: as `stack_params` gives them.
    """

    kind: DraftKind
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
            meanings=MEANINGS,
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
        embedding = {
            key: self.target_weights[key] for key in self.drafter.params if key not in weights
        }
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
        """Mean error of the drafts, each weighted by how likely the ones before it are right."""
        found = self.evaluate(weights, batch)
        errors = self.kind.errors(stored(self.drafter, weights), found, batch)
        share = jnp.exp(-jnp.arange(errors.shape[-1]) / FADING) * batch["counted"]
        return jnp.sum(errors * share) / jnp.maximum(jnp.sum(share), 1.0)

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
    kind: DraftKind,
    *,
    rows: int,
    length: int,
    config: Mapping[str, Any] | None = None,
) -> Pupil:
    """The drafter for so many conversations, and `blocks_of(length)` in each.

    Args:
      checkpoint: of the target.
      config: of the drafter, by default that of its kind.
    """
    loaded = kind.drafter.load_config(config or kind.config)
    target = target_graph(checkpoint.config, kind, loaded, rows=rows, length=length)
    names = [name for one in target.params.values() for name in one.tensor_names()]
    tensors = {name: np.asarray(checkpoint.load(name)) for name in names}
    return Pupil(
        kind=kind,
        target=target,
        drafter=drafter_graph(kind, loaded, rows=rows, length=length),
        target_weights=stack_params(target, tensors, "float32"),
    )


def target_graph(
    target: Mapping[str, Any], kind: DraftKind, config: Any, *, rows: int, length: int
) -> Graph:
    """What the drafter looks at, of all tokens of some conversations."""
    record = Trace(name="target", rows=rows * length, batch=rows, context=length, taps=True)
    form = kind.drafter.form(config)
    with recording(record):
        kind.target.decoder(kind.target.load_config(target), step_of(record))
        op = ReadTaps(name=form.tap, layers=form.layers, width=form.hidden)
        (features,) = apply(op, record.inputs["positions"])
    graph = connect(build(record, {"features": features}), drafter=kind.drafter.name)
    return without_unread(graph)


def blocks_of(length: int) -> int:
    """Blocks in a conversation; a graph wants as many rows of them as rows that they look at."""
    return length // BLOCK


def drafter_graph(kind: DraftKind, config: Any, *, rows: int, length: int) -> Graph:
    """Blocks of some conversations, those of one after the other."""
    form = kind.drafter.form(config)
    assert form.rows == BLOCK, f"blocks of {form.rows} rows"
    count = rows * blocks_of(length)
    # The caches are not used, see `shared_attention`.
    record = Trace(name="drafter", rows=count * BLOCK, batch=count, context=1)
    width = len(form.layers) * form.hidden
    context = mkc.ContextStep(
        rows=rows * length,
        batch=rows,
        context=length,
        features=record.new_input("features", DType.BF16, rows * length, width),
        positions=record.new_input("seen", DType.I32, rows * length),
    )
    anchor = record.new_input("anchor", DType.I32, count)
    with recording(record):
        table = mkc.param(kind.embedding, [form.vocab, form.hidden])
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
        outputs = kind.outputs(config, step)
    return without_unread(build(record, outputs))


def before_each(batch: dict[str, Array]) -> Array:
    """The right token before each draft: i32 [rows, blocks, drafts]."""
    newest = jnp.take_along_axis(batch["tokens"], batch["anchors"], axis=1)
    return jnp.concatenate([newest[..., None], batch["wanted"][..., :-1]], axis=-1)


def shared_attention(rows: int) -> Callable[..., Outcome]:
    """`block_attention` without caches: each block sees its conversation up to its anchor.

    Args:
      rows: conversations; every one has the same number of blocks.
    """

    def attention(
        op: BlockAttention, operands: tuple[Array, ...], states: Any, context: OpContext
    ) -> Outcome:
        q, k, v, positions, seen_k, seen_v, seen = operands
        places = positions.reshape(rows, -1, BLOCK)
        blocks, (heads, size) = places.shape[1], k.shape[1:]
        seen = seen.reshape(rows, 1, 1, -1)
        distance = places[..., None] - seen  # [rows, blocks, BLOCK, length]
        first = places[:, :, :1, None]
        visible = (seen >= 0) & (seen < first)
        if op.window is not None:
            assert op.window >= BLOCK, "a block sees all of itself"
            visible &= (first - seen <= op.window) if op.anchored else (distance < op.window)
        visible = jnp.broadcast_to(visible, distance.shape)
        among = np.tri(BLOCK, dtype=bool) if op.causal else np.ones((BLOCK, BLOCK), bool)
        grouped = wide(q).reshape(rows, blocks, BLOCK, heads, -1, size)
        k, v = (wide(one).reshape(rows, blocks, BLOCK, heads, size) for one in (k, v))
        seen_k, seen_v = (wide(one).reshape(rows, -1, heads, size) for one in (seen_k, seen_v))
        far = jnp.einsum("sbqhgd,schd->sbhgqc", grouped, seen_k) * op.scale
        near = jnp.einsum("sbqhgd,sbkhd->sbhgqk", grouped, k) * op.scale
        near = jnp.where(among, near, -jnp.inf)
        far = jnp.where(visible[:, :, None, None], far, -jnp.inf)
        weights = jax.nn.softmax(jnp.concatenate([far, near], axis=-1), axis=-1)
        split = far.shape[-1]
        out = jnp.einsum("sbhgqc,schd->sbqhgd", weights[..., :split], seen_v)
        out = out + jnp.einsum("sbhgqk,sbkhd->sbqhgd", weights[..., split:], v)
        return (context.result(out.reshape(q.shape)),), states

    return attention
