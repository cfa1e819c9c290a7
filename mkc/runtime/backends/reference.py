"""The graph itself, evaluated by XLA: slow for large models, and runs wherever JAX does."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mkc.ir.graph import Graph
from mkc.ir.graph import StateKind
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.ir.reference import Meanings
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from mkc.ir.rows import with_rows_per_sequence
from mkc.ir.token_masks import TOKEN_MASKS
from mkc.ir.token_masks import with_token_masks
from mkc.prompt_blocks import block_sizes
from mkc.prompt_blocks import divide_prompt
from mkc.runtime.backends.backend import BackendName
from mkc.runtime.backends.backend import Snapshot
from mkc.runtime.backends.backend import StepResult
from mkc.runtime.backends.backend import check_chain
from mkc.runtime.pack import LoadTensor
from mkc.runtime.placement import joining_meanings
from mkc.runtime.placement import shard_params
from mkc.runtime.products import CPU_MEANINGS
from mkc.runtime.shards import Array
from mkc.runtime.stop_ids import stop_table
from mkc.runtime.token_masks import Masks
from mkc.runtime.token_masks import mask_rows
from mkc.schedule.program import RESTING
from mkc.schedule.program import STOP_IDS

type States = dict[str, jax.Array]  # by key, [instances, batch, ...]


class ReferenceBackend:
    """Slots are the sequences of the graph; a slot that is not active is a padding row."""

    name: BackendName = "reference"
    stop_ids_per_launch = STOP_IDS

    def __init__(
        self,
        graph: Graph,
        load: LoadTensor,
        *,
        rounds_per_launch: int = 1,
        mesh: Mesh | None = None,
    ) -> None:
        """
        Args:
          graph: one step, one row per sequence.
          load: reads a checkpoint tensor by name.
          mesh: of one axis; the weights are divided over it, all else is on all of its devices.
            None is JAX's default device.
        """
        assert graph.rows == graph.batch, f"{graph.rows} rows for {graph.batch} sequences"
        self.graph = with_token_masks(graph)
        self._unmasked = graph  # a prompt's tokens are given
        self.batch = graph.batch
        self.context = graph.context
        self.rounds_per_launch = rounds_per_launch
        self.prefill_sizes = block_sizes(graph.context)
        self.prefill_rows = self.prefill_sizes[-1]
        if mesh is None:
            self._everywhere, self._meanings = None, CPU_MEANINGS
            self._weights = stack_params(graph, Tensors(graph=graph, load=load))
        else:
            self._everywhere = NamedSharding(mesh, PartitionSpec())
            self._meanings = joining_meanings(graph, mesh)
            self._weights = shard_params(graph, load, mesh)
        self._states = jax.jit(lambda: initial_states(graph), out_shardings=self._everywhere)()
        self._prefills: dict[int, _Prefill] = {}

    @cached_property
    def vocab(self) -> int:
        name = self.graph.outputs["logits"]
        results = (one for node in self.graph.body.nodes() for one in node.results)
        return next(one.type.shape[1] for one in results if one.name == name)

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        assert position + len(tokens) <= self.context, "tokens beyond the context"
        done = 0
        for rows in divide_prompt(len(tokens), self.prefill_sizes):
            block = tokens[done : done + rows]
            logits, self._states = self._prefill(rows).function(
                self._weights, self._states, slot, *_padded(block, position + done, rows)
            )
            done += len(block)
        return np.asarray(logits, np.float32)

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        masks: Masks = (),
    ) -> StepResult:
        outputs = self._one_step(tokens, positions, active, masks)
        return StepResult(
            next_token=np.asarray(outputs["next_token"]),
            logits=np.asarray(outputs["logits"], np.float32),
        )

    def greedy_rounds(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        rounds: Sequence[int],
        stop_ids: Sequence[Sequence[int]] = (),
        masks: Masks = (),
    ) -> Array:
        most = self.rounds_per_launch
        assert all(1 <= one <= most for one in rounds), f"{rounds} rounds in one launch"
        if max(rounds) == 1:  # a loop would copy the states in front of it and behind it
            outputs = self._one_step(tokens, positions, active, masks)
            return np.asarray(outputs["next_token"])[None]
        emitted, count, self._states = self._rounds(
            self._weights,
            self._states,
            *_rows(tokens, positions, active),
            np.asarray(rounds, np.int32),
            stop_table(stop_ids, self.batch),
            self._mask_rows(masks),
        )
        return np.asarray(emitted)[: int(count)]

    def reset(self, slot: int) -> None:
        self._states = self._clear(self._states, slot)

    def save(self, slot: int, *, start: int, end: int) -> Snapshot:
        fixed: dict[str, Array] = {}
        rows: dict[str, Array] = {}
        for key, state in self.state(slot).items():
            if self._is_cache(key):
                rows[key] = state[:, start:end].copy()
            else:
                fixed[key] = state.copy()
        return Snapshot(start=start, end=end, fixed=fixed, rows=rows)

    def restore(self, slot: int, snapshots: Sequence[Snapshot]) -> None:
        check_chain(snapshots)
        for one in snapshots:
            self._states = self._put(self._states, slot, one.start, dict(one.rows))
        self._states = self._put(self._states, slot, 0, dict(snapshots[-1].fixed))

    def state(self, slot: int) -> dict[str, Array]:
        return {key: np.asarray(state)[:, slot] for key, state in self._states.items()}

    def _one_step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        masks: Masks,
    ) -> Mapping[str, jax.Array]:
        outputs: Mapping[str, jax.Array]
        outputs, self._states = self._step(
            self._weights,
            self._states,
            *_rows(tokens, positions, active),
            self._mask_rows(masks),
        )
        return outputs

    def _mask_rows(self, masks: Masks) -> Array:
        return mask_rows(masks or [None] * self.batch, self.vocab)

    def _is_cache(self, key: str) -> bool:
        return self.graph.states[key].kind is StateKind.KV_CACHE

    def _prefill(self, rows: int) -> _Prefill:
        if rows not in self._prefills:
            graph = with_rows_per_sequence(self._unmasked, rows, batch=1)
            self._prefills[rows] = _Prefill(
                graph=graph, results=self._everywhere, meanings=self._meanings
            )
        return self._prefills[rows]

    @cached_property
    def _step(self) -> jax.stages.Wrapped:
        def step(
            weights: States,
            states: States,
            tokens: jax.Array,
            positions: jax.Array,
            masks: jax.Array,
        ) -> tuple[States, States]:
            inputs = {"tokens": tokens, "positions": positions, TOKEN_MASKS: masks}
            return step_outputs(self.graph, weights, inputs, states, meanings=self._meanings)

        return jax.jit(
            step,
            donate_argnums=1,
            out_shardings=self._everywhere,
            compiler_options=COMPILER_OPTIONS,
        )

    @cached_property
    def _rounds(self) -> jax.stages.Wrapped:
        """(weights, states, tokens, positions, rounds, stop ids, masks) -> (emitted, count, states)

        All that is not weights or states has an entry, or a row, for each slot.
        """

        def launch(
            weights: States,
            states: States,
            tokens: jax.Array,
            positions: jax.Array,
            rounds: jax.Array,
            stop_ids: jax.Array,
            masks: jax.Array,
        ) -> tuple[jax.Array, jax.Array, States]:
            def goes_on(carry: _Carry) -> jax.Array:
                _, _, positions, _, _ = carry
                return jnp.any(positions >= 0)

            def one_round(carry: _Carry) -> _Carry:
                number, tokens, positions, emitted, states = carry
                inputs = {"tokens": tokens, "positions": positions, TOKEN_MASKS: masks}
                outputs, states = step_outputs(
                    self.graph, weights, inputs, states, meanings=self._meanings
                )
                tokens = outputs["next_token"]
                ends = jnp.any(tokens[:, None] == stop_ids, axis=1) | (number + 1 >= rounds)
                positions = jnp.where((positions < 0) | ends, RESTING, positions + 1)
                return number + 1, tokens, positions, emitted.at[number].set(tokens), states

            empty = jnp.zeros((self.rounds_per_launch, self.batch), jnp.int32)
            carry = (jnp.int32(0), tokens, positions, empty, states)
            number, _, _, emitted, states = lax.while_loop(goes_on, one_round, carry)
            return emitted, number, states

        return jax.jit(
            launch,
            donate_argnums=1,
            out_shardings=self._everywhere,
            compiler_options=COMPILER_OPTIONS,
        )

    @cached_property
    def _clear(self) -> jax.stages.Wrapped:
        return jax.jit(
            lambda states, slot: {
                key: state.at[:, slot].set(jnp.zeros((), state.dtype))
                for key, state in states.items()
            },
            donate_argnums=0,
            out_shardings=self._everywhere,
        )

    @cached_property
    def _put(self) -> jax.stages.Wrapped:
        """(states, slot, start, parts) -> states; a part is [instances, ...] of some state."""

        def put(states: States, slot: jax.Array, start: jax.Array, parts: States) -> States:
            changed = dict(states)
            for key, part in parts.items():
                first = start if self._is_cache(key) else 0
                place = (0, slot, first, *[0] * (part.ndim - 2))
                changed[key] = lax.dynamic_update_slice(states[key], part[:, None], place)
            return changed

        return jax.jit(put, donate_argnums=0, out_shardings=self._everywhere)


# Number of the round, tokens fed, their positions, what was emitted, states.
type _Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array, States]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Prefill:
    """One compiled program: a block of tokens for one slot.

    Attributes:
      results: where they go, None for JAX's default.
      meanings: see `step_outputs`.
    """

    graph: Graph
    results: NamedSharding | None
    meanings: Meanings

    @cached_property
    def function(self) -> jax.stages.Wrapped:
        """(weights, states, slot, tokens, positions, last row) -> (logits [vocab], states)."""

        def block(
            weights: States,
            states: States,
            slot: jax.Array,
            tokens: jax.Array,
            positions: jax.Array,
            last: jax.Array,
        ) -> tuple[jax.Array, States]:
            inputs = {"tokens": tokens, "positions": positions}
            own = {
                key: lax.dynamic_slice_in_dim(one, slot, 1, axis=1) for key, one in states.items()
            }
            outputs, new = step_outputs(self.graph, weights, inputs, own, meanings=self.meanings)
            changed = {
                key: lax.dynamic_update_slice_in_dim(states[key], one, slot, axis=1)
                for key, one in new.items()
            }
            return outputs["logits"][last], changed

        return jax.jit(
            block,
            donate_argnums=1,
            out_shardings=self.results,
            compiler_options=COMPILER_OPTIONS,
        )


@dataclass(frozen=True, kw_only=True)
class Tensors(Mapping[str, Array]):
    """Checkpoint tensors that are read when they are asked for, and not kept."""

    graph: Graph
    load: LoadTensor

    def __getitem__(self, name: str) -> Array:
        return self.load(name)

    def __iter__(self) -> Iterator[str]:
        return (name for one in self.graph.params.values() for name in one.tensor_names())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _rows(
    tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
) -> tuple[Array, Array]:
    """Inputs of a step: idle slots are padding."""
    on = np.asarray(active, bool)
    return (
        np.where(on, np.asarray(tokens, np.int32), 0).astype(np.int32),
        np.where(on, np.asarray(positions, np.int32), RESTING).astype(np.int32),
    )


def _padded(tokens: Sequence[int], position: int, rows: int) -> tuple[Array, Array, int]:
    """Tokens and positions of a block, i32 [rows], and the row of the last token."""
    block = np.zeros(rows, np.int32)
    block[: len(tokens)] = tokens
    numbers = np.arange(rows, dtype=np.int32)
    positions = np.where(numbers < len(tokens), position + numbers, RESTING).astype(np.int32)
    return block, positions, len(tokens) - 1
