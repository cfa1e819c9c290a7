"""A compiled kernel with its operands: one call runs one step."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from functools import partial
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from mkc.codegen_pallas.support import operand_format
from mkc.ir.token_masks import TOKEN_MASKS
from mkc.passes.pipeline import Lowered
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.container import PackedWeights
from mkc.runtime.filling import read_operands
from mkc.runtime.pack import DTYPES
from mkc.runtime.pack import LoadTensor
from mkc.runtime.pack import Packer
from mkc.runtime.placement import place_ranks
from mkc.runtime.placement import to_host
from mkc.runtime.shards import Array
from mkc.runtime.state import StateLayout
from mkc.runtime.stop_ids import stop_table
from mkc.runtime.token_masks import Masks
from mkc.runtime.token_masks import kernel_masks

WEIGHT_ROLES = ("tape", "page", "narrow", "matrix", "experts", "table")
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
    tokens: i32 [rounds, batch], what every round emitted; -1 for a sequence that rested in it.
    rounds: how many ran, at most those of the longest sequence.
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
    _everything: jax.Array | None = None

    def __post_init__(self) -> None:
        self.module = load_module(self.source)
        self.step_function = self.module.build(self.mesh, self.interpret)
        self.program = self.lowered.program
        self.layout = StateLayout.of(self.lowered)
        self._formats = {
            operand.name: operand_format(operand, self.mesh, self.interpret)
            for operand in self.module.SPEC.operands
        }

    def format_of(self, operand: str) -> Any:
        """Sharding, and on a TPU the layout, with which an operand is placed."""
        return self._formats[operand]

    def load_weights(self, load: LoadTensor) -> None:
        """Packs weights that are in memory. `load` gives a checkpoint tensor by name."""
        packer = Packer(program=self.program, sharded=self.lowered.steps.sharded, load=load)
        for operand in self.program.operands:
            if operand.role in WEIGHT_ROLES:
                ranks = 1 if operand.role == "table" else self.program.ranks
                self.place_parts(operand.name, ranks, partial(packer.operand, operand.name))

    def load_checkpoint(self, checkpoint: Checkpoint) -> tuple[str, ...]:
        """Packs the weights of this process's ranks onto its devices, block by block.

        Returns:
          Names of tensors with a NaN or an infinity, sorted.

        Raises:
          CheckpointMismatchError: the checkpoint is not one of the model.
          SafetensorsError: a file cannot be read.
        """
        checkpoint.check(self.lowered.steps.sharded.full)
        operands, not_finite = read_operands(checkpoint, self.lowered, self.format_of)
        self.operands.update(operands)
        return not_finite

    def load_packed(self, packed: PackedWeights) -> None:
        """Places packed weights; a rank's part goes from its file straight to its device."""
        for name in packed.operands:
            parts = packed.operand(name)
            self.place_parts(name, len(parts), parts.__getitem__)

    def clear_states(self) -> None:
        """All states zero."""
        for operand in self.program.operands:
            if operand.updated:
                zeros = np.zeros(operand.shape, DTYPES[operand.dtype])
                self.place(operand.name, [zeros] * self.program.ranks)

    def place(self, name: str, ranks: Sequence[Array]) -> None:
        """Sets an operand from the parts of all ranks (one part for a replicated operand)."""
        self.place_parts(name, len(ranks), ranks.__getitem__)

    def place_parts(self, name: str, ranks: int, part: Callable[[int], Array]) -> None:
        """As `place`; `part` gives the part of a rank, and is asked for those of this process."""
        self.operands[name] = place_ranks(self._formats[name], ranks, part)

    def set_state(self, key: str, state: Array) -> None:
        """Sets a state [instances, batch, ...] of the graph."""
        ranks = range(self.program.ranks)
        parts = [self.layout.to_kernel(key, state, rank) for rank in ranks]
        self.place(self.layout.operand_of(key), parts)

    def state(self, key: str) -> Array:
        """A state of the graph, [instances, batch, ...]."""
        return self.layout.from_kernel(key, self.rank_parts(self.layout.operand_of(key)))

    def rank_parts(self, name: str) -> list[Array]:
        """An operand's part of every rank; of several processes all have to call this."""
        return np.split(to_host(self.operands[name]), self.program.ranks)

    def step(self, tokens: Array, positions: Array, *, masks: Masks = ()) -> StepResult:
        """Runs one step.

        Args:
          tokens, positions: i32 [batch]; a sequence with a negative position rests.
          masks: which tokens each sequence may emit, if the kernel reads masks; empty for all.
        """
        self.place_masks(masks)
        for name, value in (("tokens", tokens), ("positions", positions)):
            self.place(name, [np.asarray(value, np.int32)])
        results = self.call()
        logits = self.logits_of(results[1]) if self.program.logits is not None else None
        return StepResult(next_token=np.asarray(results[0]), logits=logits)

    def launch(
        self,
        tokens: Array,
        positions: Array,
        *,
        rounds: Sequence[int],
        stop_ids: Sequence[Sequence[int]] = (),
        masks: Masks = (),
        with_logits: bool = False,
    ) -> LaunchResult:
        """Runs several steps in one launch of a kernel made for that.

        A sequence rests after its own rounds and after one of its stop ids: its states are then
        those after the last token that it was fed. One with a negative position rests from the
        start.

        Args:
          tokens, positions: i32 [batch], of the first step.
          rounds: steps of each sequence, 1 to the program's `rounds_per_launch`.
          stop_ids: at most `STOP_IDS` token ids that end each sequence; empty for none at all.
          masks: which tokens each sequence may emit, in all rounds, as for `step`.
          with_logits: also fetch the logits of the last round; the kernel must return them.
        """
        most = self.program.rounds_per_launch
        self.place_masks(masks)
        assert all(1 <= one <= most for one in rounds), f"{rounds} rounds in one launch"
        scalars = (
            ("tokens", tokens),
            ("positions", positions),
            ("rounds", rounds),
            ("stop_ids", stop_table(stop_ids, self.program.batch).reshape(-1)),
        )
        for name, value in scalars:
            self.place(name, [np.asarray(value, np.int32)])
        emitted, count, *rest = self.call()
        ran = int(np.asarray(count)[0])
        shape = (most, self.program.batch)
        tokens = np.asarray(emitted).reshape(shape)[:ran]
        logits = self.logits_of(rest[0]) if with_logits else None
        return LaunchResult(tokens=tokens, rounds=ran, logits=logits)

    def place_masks(self, masks: Masks) -> None:
        """Masks of the next launch, one per row; those that allow everything stay on the devices.

        Args:
          masks: empty for all tokens.
        """
        operand = next((one for one in self.program.operands if one.role == TOKEN_MASKS), None)
        restricted = any(one is not None for one in masks)
        if operand is None:
            assert not restricted, "the kernel was made without masks of tokens"
            return
        if restricted or self._everything is None:
            self.place(operand.name, kernel_masks(masks, self.program))
            if not restricted:
                self._everything = self.operands[operand.name]
        else:
            self.operands[operand.name] = self._everything

    def call(self) -> tuple[jax.Array, ...]:
        """One launch with the placed operands; those that it updates are replaced."""
        results: tuple[jax.Array, ...] = self.step_function(
            *(self.operands[operand.name] for operand in self.program.operands)
        )
        updated = [operand.name for operand in self.program.operands if operand.updated]
        if updated:
            self.operands.update(zip(updated, results[-len(updated) :], strict=True))
        return results

    def logits_of(self, array: jax.Array) -> Array:
        """Returned logits on the host, without padding: f32 [rows, vocab]."""
        assert self.program.logits is not None
        columns = self.program.logits.width
        shares = 1 if self.program.logits_whole else self.program.ranks
        parts = np.split(to_host(array), shares, axis=1)
        joined = np.concatenate([part[:, :columns] for part in parts], axis=1)
        return joined[: self.program.rows]


def mesh_of(devices: Sequence[Any]) -> Mesh:
    """A mesh over devices with the axis `tp`."""
    return Mesh(np.array(devices), (AXIS,))
