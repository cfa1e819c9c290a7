"""A compiled kernel with its operands: one call runs one step."""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mkc.passes.pipeline import Lowered
from mkc.runtime.pack import DTYPES
from mkc.runtime.pack import LoadTensor
from mkc.runtime.pack import Packer
from mkc.runtime.shards import Array
from mkc.runtime.state import StateLayout

WEIGHT_ROLES = ("tape", "page", "narrow", "table")
AXIS = "tp"


def load_module(source: str, name: str = "kernel") -> ModuleType:
    """The module of a generated `kernel.py`, from its text."""
    module = ModuleType(name)
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), module.__dict__)
    return module


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Attributes:
    next_token: i32 [batch].
    logits: f32 [batch, vocab], None when the kernel does not return them.
    """

    next_token: Array
    logits: Array | None


@dataclass(kw_only=True)
class KernelSession:
    """A kernel over a mesh, with weights and states.

    Attributes:
      lowered: what the kernel was generated from.
      source: text of `kernel.py`.
      mesh: devices on one axis `tp`.
      interpret: False on a TPU, else what `pallas_call` accepts.
    """

    lowered: Lowered
    source: str
    mesh: Mesh
    interpret: Any
    operands: dict[str, jax.Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.module = load_module(self.source)
        self.step_function = self.module.build(self.mesh, self.interpret)
        self.program = self.lowered.program
        self.layout = StateLayout(
            program=self.program,
            sharded=self.lowered.steps.sharded,
            streams=self.lowered.residency.streams,
        )
        self._shardings = {
            operand.name: argument.sharding
            for operand, argument in zip(
                self.module.SPEC.operands,
                self.module.abstract_arguments(self.mesh),
                strict=True,
            )
        }

    def load_weights(self, load: LoadTensor) -> None:
        """Packs all weights. `load` reads a checkpoint tensor by name."""
        packer = Packer(program=self.program, sharded=self.lowered.steps.sharded, load=load)
        for operand in self.program.operands:
            if operand.role in WEIGHT_ROLES:
                ranks = 1 if operand.role == "table" else self.program.ranks
                self.place(
                    operand.name,
                    [packer.operand(operand.name, rank) for rank in range(ranks)],
                )

    def clear_states(self) -> None:
        """All states zero."""
        for operand in self.program.operands:
            if operand.updated:
                zeros = np.zeros(operand.shape, DTYPES[operand.dtype])
                self.place(operand.name, [zeros] * self.program.ranks)

    def place(self, name: str, ranks: Sequence[Array]) -> None:
        """Sets an operand from the parts of all ranks (one part for a replicated operand)."""
        array = ranks[0] if len(ranks) == 1 else np.concatenate(ranks, axis=0)
        self.operands[name] = jax.device_put(array, self._shardings[name])

    def set_state(self, key: str, state: Array) -> None:
        """Sets a state [instances, batch, ...] of the graph."""
        ranks = range(self.program.ranks)
        parts = [self.layout.to_kernel(key, state, rank) for rank in ranks]
        self.place(self.layout.operand_of(key), parts)

    def state(self, key: str) -> Array:
        """A state of the graph, [instances, batch, ...]."""
        return self.layout.from_kernel(key, self.rank_parts(self.layout.operand_of(key)))

    def rank_parts(self, name: str) -> list[Array]:
        """An operand's part of every rank."""
        return np.split(np.asarray(self.operands[name]), self.program.ranks)

    def step(self, tokens: Array, positions: Array) -> StepResult:
        """Runs one step. tokens, positions: i32 [batch]."""
        for name, value in (("tokens", tokens), ("positions", positions)):
            self.place(name, [np.asarray(value, np.int32)])
        names = [operand.name for operand in self.program.operands]
        results = self.step_function(*(self.operands[name] for name in names))
        outputs = 1 if self.program.logits is None else 2
        updated = [operand.name for operand in self.program.operands if operand.updated]
        self.operands.update(zip(updated, results[outputs:], strict=True))
        logits = self._logits(results[1]) if outputs == 2 else None
        return StepResult(next_token=np.asarray(results[0]), logits=logits)

    def _logits(self, array: jax.Array) -> Array:
        """The ranks' columns without their padding, side by side."""
        assert self.program.logits is not None
        columns = self.program.logits.width
        parts = np.split(np.asarray(array), self.program.ranks, axis=1)
        joined = np.concatenate([part[:, :columns] for part in parts], axis=1)
        return joined[: self.program.batch]


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A mesh over devices with the axis `tp`."""
    return Mesh(np.array(devices), (AXIS,))
