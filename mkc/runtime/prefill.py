"""Prefill: prompts of any length through a few compiled programs, over the operands of the kernel.

A program takes a block of consecutive tokens for a few sequences (its lanes), reads weights from
the kernel's operands (there is no second copy of them) and changes the states in the kernel's
layout, in place. The kernel goes on from there, and a block may follow whatever either of them left
behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec

from mkc.ir.graph import Graph
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.ir.rows import with_rows_per_sequence
from mkc.passes.p10_shard import Shard
from mkc.passes.pipeline import Lowered
from mkc.prompt_blocks import block_sizes
from mkc.prompt_blocks import divide_prompt
from mkc.runtime.pack import OPERAND_DTYPES
from mkc.runtime.prefill_graph import GraphWalk
from mkc.runtime.prefill_graph import Rows
from mkc.runtime.prefill_ops import AXIS
from mkc.runtime.prefill_state import StateAccess
from mkc.runtime.prefill_state import state_access
from mkc.runtime.tape_index import index_weights
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import Operand

type Operands = dict[str, jax.Array]  # of a kernel, by name

# Arguments come in memory tiles of 8 rows. Left alone, the compiler wants tiles of 16 rows for bf16
# inside and begins with a copy of the whole tape.
TPU_OPTIONS = {"xla_tpu_control_large_2nd_minor_layout_for_x16": "0"}
SCALARS = ("tokens", "slots", "starts", "counts")
WEIGHT_ROLES = ("tape", "table", "page", "narrow", "matrix", "experts")


@dataclass(frozen=True, kw_only=True)
class PrefillResult:
    """Of the last row that is not padding, or of all rows.

    Attributes:
      next_token: i32 [lanes], or [lanes, rows].
      logits: f32 [lanes, vocab], or [lanes, rows, vocab], divided over the mesh like the LM head.
    """

    next_token: jax.Array
    logits: jax.Array


@dataclass(frozen=True, kw_only=True, eq=False)
class PrefillProgram:
    """One compiled function: `lanes` sequences, `rows` tokens of each.

    Attributes:
      lowered: the plan of the kernel whose operands are used.
      mesh: the kernel's mesh.
      rows: tokens of each lane in one call.
      lanes: sequences in one call.
      all_rows: results for every row instead of the last one of each lane.
      graph: what is evaluated, one row per sequence; None for the kernel's own graph. A kernel that
        runs rounds has another one for prompts, over the same weights and states.
    """

    lowered: Lowered
    mesh: Mesh
    rows: int
    lanes: int = 1
    all_rows: bool = False
    graph: Graph | None = None

    def __post_init__(self) -> None:
        program = self.lowered.program
        assert 1 <= self.lanes <= program.batch, f"{self.lanes} lanes, {program.batch} sequences"
        assert 1 <= self.rows <= program.context, f"{self.rows} rows, context {program.context}"

    @cached_property
    def weights(self) -> tuple[Operand, ...]:
        return tuple(one for one in self.lowered.program.operands if one.role in WEIGHT_ROLES)

    @cached_property
    def states(self) -> tuple[Operand, ...]:
        """Operands that prompts change."""
        arrays = {one.array for one in self._access.values()}
        return tuple(one for one in self.lowered.program.operands if one.name in arrays)

    @cached_property
    def full(self) -> Graph:
        """What is evaluated, of all ranks."""
        return self.graph or self.lowered.steps.sharded.full

    @cached_property
    def local(self) -> Graph:
        """What is evaluated, of one rank, for one row of each lane."""
        return self._local(1)

    @property
    def on_tpu(self) -> bool:
        return bool(self.mesh.devices.flat[0].platform == "tpu")

    @cached_property
    def function(self) -> jax.stages.Wrapped:
        """(tokens, slots, starts, counts, weights, states) -> (next token, logits, states).

        Tokens are i32 [lanes * rows]. The states are donated.
        """
        whole = PartitionSpec()
        weights = tuple(_partition(one) for one in self.weights)
        states = tuple(_partition(one) for one in self.states)
        body = jax.shard_map(
            self._rank,
            mesh=self.mesh,
            in_specs=(*[whole] * len(SCALARS), weights, states),
            out_specs=(whole, self._logits_partition, states),
            check_vma=False,
        )
        options = COMPILER_OPTIONS | (TPU_OPTIONS if self.on_tpu else {})
        return jax.jit(body, donate_argnums=len(SCALARS) + 1, compiler_options=options)

    @cached_property
    def _logits_partition(self) -> PartitionSpec:
        name = self.full.outputs["logits"]
        widths = [
            next(
                value.type.shape[1]
                for node in graph.body.nodes()
                for value in node.results
                if value.name == name
            )
            for graph in (self.full, self.local)
        ]
        return PartitionSpec() if widths[0] == widths[1] else PartitionSpec(None, AXIS)

    @cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The function, compiled; from the compilation cache on disk where there is one."""
        return self.function.lower(*self.abstract_arguments()).compile()

    @property
    def workspace_bytes(self) -> int:
        """Memory of one device that a call needs besides weights and states."""
        memory = self.compiled.memory_analysis()
        assert memory is not None, "the compiler does not tell what memory the program needs"
        return int(memory.temp_size_in_bytes)

    def abstract_arguments(self) -> tuple[Any, ...]:
        """Shapes, dtypes and shardings of the function's arguments."""

        def shape(operand: Operand) -> jax.ShapeDtypeStruct:
            ranks = 1 if operand.role == "table" else self.lowered.program.ranks
            return jax.ShapeDtypeStruct(
                (ranks * operand.shape[0], *operand.shape[1:]),
                OPERAND_DTYPES[operand.dtype],
                sharding=NamedSharding(self.mesh, _partition(operand)),
            )

        def scalars(count: int) -> jax.ShapeDtypeStruct:
            sharding = NamedSharding(self.mesh, PartitionSpec())
            return jax.ShapeDtypeStruct((count,), jnp.int32, sharding=sharding)

        return (
            scalars(self.lanes * self.rows),
            *[scalars(self.lanes)] * 3,
            tuple(shape(one) for one in self.weights),
            tuple(shape(one) for one in self.states),
        )

    def __call__(
        self,
        operands: Operands,
        tokens: Sequence[Sequence[int]],
        *,
        slots: Sequence[int],
        starts: Sequence[int],
    ) -> PrefillResult:
        """Runs a block; the states among `operands` are replaced.

        Args:
          tokens: up to `rows` of every lane; a lane without tokens changes nothing.
          slots: the sequence of every lane, all different.
          starts: position of every lane's first token.
        """
        assert len(set(slots)) == len(slots) == len(tokens) == len(starts) == self.lanes
        counts = [len(one) for one in tokens]
        assert max(counts) <= self.rows, f"{max(counts)} tokens for {self.rows} rows"
        context = self.lowered.program.context
        last = max(start + count for start, count in zip(starts, counts, strict=True))
        assert last <= context, f"position {last - 1} in a context of {context}"
        block = np.zeros((self.lanes, self.rows), np.int32)
        for lane, one in enumerate(tokens):
            block[lane, : len(one)] = one
        next_token, logits, states = self.compiled(
            block.reshape(-1),
            *(np.asarray(one, np.int32) for one in (slots, starts, counts)),
            tuple(operands[one.name] for one in self.weights),
            tuple(operands[one.name] for one in self.states),
        )
        operands.update(zip((one.name for one in self.states), states, strict=True))
        return PrefillResult(next_token=next_token, logits=logits)

    def _rank(
        self,
        tokens: jax.Array,
        slots: jax.Array,
        starts: jax.Array,
        counts: jax.Array,
        weights: tuple[jax.Array, ...],
        states: tuple[jax.Array, ...],
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
        """What one rank computes."""
        number = jnp.arange(self.rows)
        positions = jnp.where(number < counts[:, None], starts[:, None] + number, -1)
        walk = GraphWalk(
            graph=self._local(self.rows),
            last=self.local,
            weights=dict(zip((one.name for one in self.weights), weights, strict=True)),
            states=self._access,
            rows=Rows(slots=slots, starts=starts, counts=counts, positions=positions),
            all_rows=self.all_rows,
            strided=self.on_tpu,
        )
        memory = dict(zip((one.name for one in self.states), states, strict=True))
        outputs = walk.run(index_weights(self.lowered.program), tokens, memory)
        shape = (self.lanes, self.rows) if self.all_rows else (self.lanes,)
        logits = outputs["logits"].astype(jnp.float32)
        return (
            outputs["next_token"].reshape(shape),
            logits.reshape(*shape, logits.shape[-1]),
            tuple(memory[one.name] for one in self.states),
        )

    def _local(self, rows: int) -> Graph:
        """The graph of one rank for `rows` tokens of each lane."""
        full = with_rows_per_sequence(self.full, rows, batch=self.lanes)
        shard = Shard(ranks=self.lowered.program.ranks)
        return shard.apply(full, DecisionLog(), like=self.lowered.steps.sharded).graph

    @cached_property
    def _access(self) -> dict[str, StateAccess]:
        known = state_access(self.lowered)
        return {key: known[key] for key in self.full.states if key in known}


def _partition(operand: Operand) -> PartitionSpec:
    """Divided along the first axis, but for tables, of which every rank has the whole."""
    return PartitionSpec() if operand.role == "table" else PartitionSpec(AXIS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prefill:
    """Feeds prompts of any length; compiles each program when it is first needed.

    Attributes:
      sizes: rows of the programs, ascending.
      graph: as of `PrefillProgram`.
    """

    lowered: Lowered
    mesh: Mesh
    sizes: tuple[int, ...] = ()
    graph: Graph | None = None
    _programs: dict[int, PrefillProgram] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.sizes:
            object.__setattr__(self, "sizes", block_sizes(self.lowered.program.context))

    def program(self, rows: int) -> PrefillProgram:
        """The program of one size, for one sequence."""
        assert rows in self.sizes, f"no program of {rows} rows, only {self.sizes}"
        if rows not in self._programs:
            self._programs[rows] = PrefillProgram(
                lowered=self.lowered, mesh=self.mesh, rows=rows, graph=self.graph
            )
        return self._programs[rows]

    def blocks(
        self, operands: Operands, tokens: Sequence[int], *, slot: int, start: int
    ) -> Iterator[tuple[int, PrefillResult]]:
        """Feeds one sequence block by block: yields (next position, result) after each.

        Between two blocks the caller may copy states, run the kernel, or stop.

        Args:
          operands: of the kernel; its states are replaced.
          tokens: at least one.
          slot: the sequence.
          start: position of the first token; the states are those after position `start - 1`.
        """
        position = start
        for rows in divide_prompt(len(tokens), self.sizes):
            block = tokens[position - start :][:rows]
            result = self.program(rows)(operands, [block], slots=[slot], starts=[position])
            position += len(block)
            yield position, result

    def run(
        self, operands: Operands, tokens: Sequence[int], *, slot: int = 0, start: int = 0
    ) -> PrefillResult:
        """Feeds one sequence, as `blocks`; the result belongs to the last token."""
        *_, (_, result) = self.blocks(operands, tokens, slot=slot, start=start)
        return result
