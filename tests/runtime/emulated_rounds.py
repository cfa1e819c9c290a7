"""Takes the place of a kernel that runs rounds: the reference loop, over the kernel's operands.

Everything around a launch can be tested with it in little time: packing, state layouts, prompts,
late commits, slots. That kernels compute the same is tested elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from mkc.codegen_pallas.support.launch import WHOLE
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.reference import step_outputs
from mkc.ir.token_masks import TOKEN_MASKS
from mkc.runtime.kernel import AXIS
from mkc.runtime.kernel import KernelSession
from mkc.runtime.rounds import keep_idle
from mkc.runtime.state import StateLayout
from mkc.runtime.token_masks import pack_mask
from mkc.schedule.round_phases import AcceptPhase
from mkc.spec import Round

type Array = NDArray[Any]
type Values = dict[str, Any]


@dataclass(kw_only=True)
class EmulatedRounds(KernelSession):
    """Attributes:
    scheme: whose rounds are greedy.
    tensors: of both checkpoints, by their names in the round.
    """

    scheme: Round
    tensors: Mapping[str, Array]

    def __post_init__(self) -> None:
        self.program = self.lowered.program
        self.layout = StateLayout.of(self.lowered)
        self._formats = {
            one.name: NamedSharding(
                self.mesh, PartitionSpec() if one.role in WHOLE else PartitionSpec(AXIS)
            )
            for one in self.program.operands
        }
        self.step_function = self.launch_rounds
        self.load_weights(self.tensors.__getitem__)

    @cached_property
    def weights(self) -> dict[str, jax.Array]:
        return stack_params(self.scheme.graph, self.tensors)

    @cached_property
    def one_round(self) -> Callable[..., Any]:
        """(carried, states) -> (outputs, states)."""

        def one(weights: Values, carried: Values, states: Values) -> tuple[Values, Values]:
            outputs, new = step_outputs(self.scheme.graph, weights, carried, states)
            return {**outputs, **keep_idle(self.scheme, carried, outputs)}, new

        function = jax.jit(one, compiler_options=COMPILER_OPTIONS)
        return lambda carried, states: function(self.weights, carried, states)

    def launch_rounds(self, *operands: jax.Array) -> tuple[Array | jax.Array, ...]:
        """One launch by the kernel's interface."""
        named = dict(zip((one.name for one in self.program.operands), operands, strict=True))
        batch, most, rows = self.program.batch, self.program.rounds_per_launch, self.rows
        carried = {name: np.array(named[name]) for name in self.scheme.carried}
        masks = {TOKEN_MASKS: self.mask_rows(np.asarray(named[TOKEN_MASKS]))}
        stops = np.asarray(named["stop_ids"]).reshape(batch, -1)
        left, limits = np.array(named["budgets"]), np.asarray(named["rounds"])
        states = {key: jnp.asarray(self.state(key), one.dtype) for key, one in self.zeros.items()}
        emitted = np.full((most, batch, rows), -1, np.int32)
        counts, drafts = np.zeros((most, batch), np.int32), np.zeros((most, batch), np.int32)
        logits = np.zeros((batch * rows, 1), np.float32)
        rests = carried["positions"].reshape(batch, rows)[:, 0] < 0
        ran = 0
        while not rests.all():
            fed = {name: one.copy() for name, one in carried.items()}
            fed["positions"].reshape(batch, rows)[rests] = -1
            outputs, states = self.one_round(fed | masks, states)
            found = {name: np.array(one) for name, one in outputs.items()}
            places = fed["positions"].reshape(batch, rows)
            emitted[ran] = found["emitted"].reshape(batch, rows)
            counts[ran], logits = found["count"], found["logits"].astype(np.float32)
            drafts[ran] = np.maximum((places >= 0).sum(axis=1) - 1, 0)
            for s in np.flatnonzero(~rests):
                for name in carried:
                    new = found[name].reshape(batch, -1)[s]
                    carried[name].reshape(batch, -1)[s] = new
                left[s] -= counts[ran, s]
                ended = left[s] <= 0 or np.isin(emitted[ran, s, : counts[ran, s]], stops[s]).any()
                if ended:
                    carried["positions"].reshape(batch, rows)[s] = -1
                rests[s] = ended or ran + 1 >= limits[s]
            rests |= carried["positions"].reshape(batch, rows)[:, 0] < 0
            ran += 1
        for key, one in states.items():
            self.set_state(key, np.asarray(one))
        return (
            *(one.reshape(-1) for one in (emitted, counts, drafts)),
            np.array([ran]),
            *(carried[name] for name in ("tokens", "positions", "kept")),
            jnp.asarray(logits),
            *(self.operands[one.name] for one in self.program.operands if one.updated),
        )

    def mask_rows(self, operand: Array) -> Array:
        """The graph's input, i32 [rows, words], from the bits of each rank's columns.

        Bit j of word b * 128 + l is column (b * 32 + j) * 128 + l.
        """
        columns = next(one.columns for one in self.program.phases() if isinstance(one, AcceptPhase))
        shares = 1 if self.program.logits_whole else self.program.ranks
        parts = []
        for part in np.split(operand, self.program.ranks)[:shares]:
            words = part[: self.program.rows].copy().view(np.uint8)
            bits = np.unpackbits(words, axis=1, bitorder="little")
            blocks = bits.reshape(len(bits), -1, 128, 32).swapaxes(2, 3)
            parts.append(blocks.reshape(len(bits), -1)[:, :columns].astype(bool))
        allowed = np.concatenate(parts, axis=1)
        return np.stack([pack_mask(row) for row in allowed]).view(np.int32)

    @property
    def rows(self) -> int:
        return self.scheme.graph.rows_per_sequence

    @cached_property
    def zeros(self) -> dict[str, jax.Array]:
        return initial_states(self.scheme.graph)
