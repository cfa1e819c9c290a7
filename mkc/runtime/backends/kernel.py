"""The generated kernel, on TPUs or interpreted on the CPU.

The kernel advances every row in every launch. What an idle slot remembers is therefore taken out
before the first launch in which it idles (it is *parked*), and put back when the slot is used
again; in between the kernel computes on what is left in the row, at position 0, where a launch
reads and writes the fewest cache rows. Slots that nobody uses are parked from the start, so that a
launch in which the same slots are active as in the last one moves nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mkc.ir.graph import StateKind
from mkc.runtime.backends.backend import BackendName
from mkc.runtime.backends.backend import Snapshot
from mkc.runtime.backends.backend import StepResult
from mkc.runtime.backends.backend import check_chain
from mkc.runtime.kernel import KernelSession
from mkc.runtime.prefill import Prefill
from mkc.runtime.shards import Array
from mkc.schedule.program import STOP_IDS

type Parts = dict[str, jax.Array]  # of one slot by operand, [ranks * instances, ...]


class KernelBackend:
    """Slots are the sequences of a kernel that was lowered with logits."""

    stop_ids_per_launch = STOP_IDS

    def __init__(self, session: KernelSession) -> None:
        """
        Args:
          session: with its weights; its states become those of this backend.
        """
        assert session.program.logits is not None, "the kernel does not return logits"
        self.session = session
        self.name: BackendName = "tpu" if session.interpret is False else "interpret"
        self.batch = session.program.batch
        self.context = session.program.context
        self.rounds_per_launch = session.program.rounds_per_launch
        self._prefill = Prefill(lowered=session.lowered, mesh=session.mesh)
        self.prefill_rows = self._prefill.sizes[-1]
        # A launch writes this many cache rows of an idle slot.
        self._parked_rows = min(self.rounds_per_launch, self.context)
        session.clear_states()
        # Parked parts by slot; None stands for zeros.
        self._parked: dict[int, Parts | None] = dict.fromkeys(range(self.batch))

    @cached_property
    def vocab(self) -> int:
        logits = self.session.program.logits
        assert logits is not None
        return logits.width * self.session.program.ranks

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        self._unpark(slot)
        result = self._prefill.run(self.session.operands, tokens, slot=slot, start=position)
        logits: Array = np.asarray(result.logits, np.float32)[0]
        return logits

    def step(
        self, tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
    ) -> StepResult:
        fed, places = self._begin(tokens, positions, active)
        if self.rounds_per_launch == 1:
            one = self.session.step(fed, places)
            next_token, logits = one.next_token, one.logits
        else:
            launched = self.session.launch(fed, places, rounds=1, with_logits=True)
            next_token, logits = launched.tokens[0], launched.logits
        assert logits is not None
        return StepResult(next_token=next_token[: self.batch], logits=logits)

    def greedy_rounds(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        rounds: int,
        stop_ids: Sequence[int] = (),
    ) -> Array:
        fed, places = self._begin(tokens, positions, active)
        if self.rounds_per_launch == 1:
            return self.session.step(fed, places).next_token[None, : self.batch]
        return self.session.launch(fed, places, rounds=rounds, stop_ids=stop_ids).tokens

    def reset(self, slot: int) -> None:
        self._parked[slot] = None

    def save(self, slot: int, *, start: int, end: int) -> Snapshot:
        self._unpark(slot)
        parts = self._take(end - start)(self._states(), slot, start)
        host = {name: np.asarray(part) for name, part in parts.items()}
        return Snapshot(
            start=start,
            end=end,
            fixed={name: part for name, part in host.items() if not self._is_cache(name)},
            rows={name: part for name, part in host.items() if self._is_cache(name)},
        )

    def restore(self, slot: int, snapshots: Sequence[Snapshot]) -> None:
        check_chain(snapshots)
        self._parked.pop(slot, None)
        for one in snapshots:
            self._write(slot, one.start, self._placed({**one.rows, **snapshots[-1].fixed}))

    def state(self, slot: int) -> dict[str, Array]:
        self._unpark(slot)
        found = {}
        for key in self.session.lowered.steps.sharded.full.states:
            found[key] = self.session.state(key)[:, slot]
        return found

    def _begin(
        self, tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
    ) -> tuple[Array, Array]:
        """Parks idle slots and brings back active ones. Tokens and positions of the launch."""
        for slot, on in enumerate(active):
            if on:
                self._unpark(slot)
            elif slot not in self._parked:
                self._parked[slot] = self._take(self._parked_rows)(self._states(), slot, 0)
        fed = [token if on else 0 for token, on in zip(tokens, active, strict=True)]
        places = [position if on else 0 for position, on in zip(positions, active, strict=True)]
        return np.asarray(fed, np.int32), np.asarray(places, np.int32)

    def _unpark(self, slot: int) -> None:
        if slot in self._parked:
            parts = self._parked.pop(slot)
            self._write(slot, 0, self._zeros if parts is None else parts)

    def _write(self, slot: int, start: int, parts: Parts) -> None:
        self.session.operands.update(self._put(self._states(), slot, start, parts))

    def _states(self) -> Parts:
        return {name: self.session.operands[name] for name in self._kinds}

    def _is_cache(self, name: str) -> bool:
        return self._kinds[name] is StateKind.KV_CACHE

    @cached_property
    def _kinds(self) -> dict[str, StateKind]:
        """Kind of state in each operand that the kernel updates."""
        states = self.session.lowered.steps.sharded.full.states
        return {self.session.layout.operand_of(key): one.kind for key, one in states.items()}

    @cached_property
    def _zeros(self) -> Parts:
        """A slot that remembers nothing."""
        parts = jax.eval_shape(self._take(self._parked_rows), self._states(), 0, 0)
        return self._placed(
            {name: np.zeros(part.shape, part.dtype) for name, part in parts.items()}
        )

    def _placed(self, parts: dict[str, Array]) -> Parts:
        """Parts on the devices, divided over the ranks like their operands."""
        sharding = NamedSharding(self.session.mesh, PartitionSpec(*self.session.mesh.axis_names))
        return {name: jax.device_put(part, sharding) for name, part in parts.items()}

    def _take(self, rows: int) -> jax.stages.Wrapped:
        """(operands, slot, start) -> parts with `rows` rows of each cache."""
        if rows not in self._takes:

            def take(operands: Parts, slot: jax.Array, start: jax.Array) -> Parts:
                parts = {}
                for name, operand in operands.items():
                    part = lax.dynamic_index_in_dim(
                        self._by_slot(name, operand), slot, self._axis(name), keepdims=False
                    )
                    if self._is_cache(name):
                        part = lax.dynamic_slice_in_dim(part, start, rows, axis=1)
                    parts[name] = part
                return parts

            self._takes[rows] = jax.jit(take)
        return self._takes[rows]

    @cached_property
    def _takes(self) -> dict[int, jax.stages.Wrapped]:
        return {}

    @cached_property
    def _put(self) -> jax.stages.Wrapped:
        """(operands, slot, start, parts) -> operands, changed in place."""

        def put(operands: Parts, slot: jax.Array, start: jax.Array, parts: Parts) -> Parts:
            changed = {}
            for name, operand in operands.items():
                whole = self._by_slot(name, operand)
                part = jnp.expand_dims(parts[name], self._axis(name))
                place = [jnp.int32(0)] * whole.ndim
                place[self._axis(name)] = jnp.int32(slot)
                if self._is_cache(name):
                    place[2] = jnp.int32(start)
                changed[name] = lax.dynamic_update_slice(whole, part, place).reshape(operand.shape)
            return changed

        return jax.jit(put, donate_argnums=0)

    def _axis(self, name: str) -> int:
        """The axis of slots in `_by_slot`; see `mkc.runtime.state` for the layouts."""
        return 2 if self._kinds[name] is StateKind.CONV else 1

    def _by_slot(self, name: str, operand: jax.Array) -> jax.Array:
        """The operand with an axis of slots; recurrent states have it inside their first one."""
        if self._kinds[name] is not StateKind.RECURRENT:
            return operand
        return operand.reshape(-1, self.batch, *operand.shape[1:])
