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

from mkc.codegen_pallas.support import operand_format
from mkc.passes.pipeline import Lowered
from mkc.runtime.container import PackedWeights
from mkc.runtime.pack import DTYPES
from mkc.runtime.pack import LoadTensor
from mkc.runtime.pack import Packer
from mkc.runtime.shards import Array
from mkc.runtime.state import StateLayout
from mkc.schedule.program import STOP_IDS

NO_STOP = -1  # no token has this id
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


@dataclass(frozen=True, kw_only=True)
class LaunchResult:
    """Attributes:
    tokens: i32 [rounds, batch], what every round emitted.
    rounds: how many ran; fewer than asked for when every sequence stopped.
    logits: f32 [batch, vocab] of the last round, None when they were not asked for.
    """

    tokens: Array
    rounds: int
    logits: Array | None = None


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
        self._formats = {
            operand.name: operand_format(operand, self.mesh, self.interpret)
            for operand in self.module.SPEC.operands
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

    def load_packed(self, packed: PackedWeights) -> None:
        """Places packed weights; a rank's part goes from its file straight to its device."""
        devices = list(self.mesh.devices.flat)
        for name in packed.operands:
            parts, sharding = packed.operand(name), self._shardings[name]
            if len(parts) == 1:
                self.operands[name] = jax.device_put(parts[0], sharding)
                continue
            placed = [
                jax.device_put(part, device)
                for part, device in zip(parts, devices, strict=True)
                if device.process_index == jax.process_index()
            ]
            shape = (len(parts) * parts[0].shape[0], *parts[0].shape[1:])
            self.operands[name] = jax.make_array_from_single_device_arrays(shape, sharding, placed)

    def clear_states(self) -> None:
        """All states zero."""
        for operand in self.program.operands:
            if operand.updated:
                zeros = np.zeros(operand.shape, DTYPES[operand.dtype])
                self.place(operand.name, [zeros] * self.program.ranks)

    def place(self, name: str, ranks: Sequence[Array]) -> None:
        """Sets an operand from the parts of all ranks (one part for a replicated operand)."""
        array = ranks[0] if len(ranks) == 1 else np.concatenate(ranks, axis=0)
        self.operands[name] = jax.device_put(array, self._formats[name])

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
        results = self.step_function(*self._arguments())
        self._keep(results)
        logits = self._logits(results[1]) if self.program.logits is not None else None
        return StepResult(next_token=np.asarray(results[0]), logits=logits)

    def launch(
        self,
        tokens: Array,
        positions: Array,
        *,
        rounds: int,
        stop_ids: Sequence[int] = (),
        with_logits: bool = False,
    ) -> LaunchResult:
        """Runs up to `rounds` steps in one launch of a kernel made for several.

        Args:
          tokens, positions: i32 [batch], of the first step.
          rounds: 1 to the program's `rounds_per_launch`.
          stop_ids: at most `STOP_IDS` token ids that end a sequence.
          with_logits: also fetch the logits of the last round; the kernel must return them.
        """
        assert 1 <= rounds <= self.program.rounds_per_launch, f"{rounds} rounds in one launch"
        assert len(stop_ids) <= STOP_IDS, f"{len(stop_ids)} stop ids, at most {STOP_IDS}"
        stops = np.full((STOP_IDS,), NO_STOP, np.int32)
        stops[: len(stop_ids)] = stop_ids
        scalars = (
            ("tokens", tokens),
            ("positions", positions),
            ("rounds", [rounds]),
            ("stop_ids", stops),
        )
        for name, value in scalars:
            self.place(name, [np.asarray(value, np.int32)])
        emitted, count, *rest = self.step_function(*self._arguments())
        self._keep(rest)
        ran = int(np.asarray(count)[0])
        shape = (self.program.rounds_per_launch, self.program.batch)
        tokens = np.asarray(emitted).reshape(shape)[:ran]
        logits = self._logits(rest[0]) if with_logits else None
        return LaunchResult(tokens=tokens, rounds=ran, logits=logits)

    def _arguments(self) -> list[jax.Array]:
        return [self.operands[operand.name] for operand in self.program.operands]

    def _keep(self, results: Sequence[jax.Array]) -> None:
        """Takes the updated arrays from the end of a call's results."""
        updated = [operand.name for operand in self.program.operands if operand.updated]
        if updated:
            self.operands.update(zip(updated, results[-len(updated) :], strict=True))

    def _logits(self, array: jax.Array) -> Array:
        """The ranks' columns without their padding, side by side."""
        assert self.program.logits is not None
        columns = self.program.logits.width
        shares = 1 if self.program.logits_whole else self.program.ranks
        parts = np.split(np.asarray(array), shares, axis=1)
        joined = np.concatenate([part[:, :columns] for part in parts], axis=1)
        return joined[: self.program.batch]


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A mesh over devices with the axis `tp`."""
    return Mesh(np.array(devices), (AXIS,))
