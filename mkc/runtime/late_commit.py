"""Rows that rounds have kept enter the states of a kernel, when the host needs the states.

A round commits what the round before it kept (see docs/speculation.md). Whoever looks at a state
between two rounds, or runs something else than a round, has to commit it first. This is done on the
devices, over the operands of the kernel, in place.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec

from mkc.ir.graph import Node
from mkc.ir.graph import StateKind
from mkc.passes.pipeline import Lowered
from mkc.runtime.prefill_ops import AXIS
from mkc.runtime.prefill_state import Memory
from mkc.runtime.prefill_state import StateAccess
from mkc.runtime.prefill_state import state_access
from mkc.runtime.rounds import COMMITS
from mkc.runtime.shards import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class LateCommit:
    """The compiled commit of a kernel that runs rounds.

    Attributes:
      lowered: the kernel's plan.
      mesh: the kernel's mesh.
    """

    lowered: Lowered
    mesh: Mesh

    def __call__(self, operands: dict[str, jax.Array], kept: Array) -> None:
        """Commits; the states among `operands` are replaced.

        Args:
          kept: rows of each sequence that count, i32 [batch]; where it is 0 no bit changes.
        """
        states, rows = ({name: operands[name] for name in names} for names in self.operands)
        operands.update(self.function(states, rows, jnp.asarray(kept)))

    @cached_property
    def function(self) -> jax.stages.Wrapped:
        """(states, kept rows, kept) -> states, by operand; the states are donated."""
        divided = PartitionSpec(AXIS)
        body = jax.shard_map(
            self._rank,
            mesh=self.mesh,
            in_specs=(divided, divided, PartitionSpec()),
            out_specs=divided,
            check_vma=False,
        )
        return jax.jit(body, donate_argnums=0)

    @cached_property
    def _access(self) -> Mapping[str, StateAccess]:
        return state_access(self.lowered)

    @cached_property
    def _nodes(self) -> tuple[Node, ...]:
        """Those that commit late."""
        nodes = self.lowered.steps.sharded.graph.body.nodes()
        return tuple(one for one in nodes if type(one.op) in COMMITS)

    @cached_property
    def operands(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the states that are committed, and of the kept rows."""
        kept: dict[str, None] = {}
        states: dict[str, None] = {}
        for node in self._nodes:
            for one in (self._access[key] for key in node.states):
                (kept if one.state.kind is StateKind.KEPT else states)[one.array] = None
        return tuple(states), tuple(kept)

    def _rank(self, states: Memory, rows: Memory, kept: jax.Array) -> Memory:
        memory = dict(states)
        slots = jnp.arange(self.lowered.program.batch)
        for node in self._nodes:
            access = [self._access[key] for key in node.states]
            commit = COMMITS[type(node.op)]
            body = _one_instance(commit, access, rows, slots, kept)
            name = access[0].array
            memory[name] = lax.fori_loop(0, access[0].state.instances, body, memory[name])
        return memory


def _one_instance(
    commit: Callable[..., jax.Array],
    access: list[StateAccess],
    rows: Memory,
    slots: jax.Array,
    kept: jax.Array,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """A loop body: (instance, operand of the state) -> operand."""

    def body(instance: jax.Array, operand: jax.Array) -> jax.Array:
        memory = {**rows, access[0].array: operand}
        parts = [one.read(memory, instance, slots) for one in access]
        access[0].write(memory, instance, slots, commit(*parts, kept))
        return memory[access[0].array]

    return body
