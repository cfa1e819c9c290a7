"""The reference backend with a scheme: rounds that draft, verify and accept, evaluated by XLA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from mkc.ir.graph import StateKind
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.runtime.backends.backend import Launch
from mkc.runtime.backends.backend import Snapshot
from mkc.runtime.backends.backend import StepResult
from mkc.runtime.backends.reference import NO_STOP
from mkc.runtime.backends.reference import ReferenceBackend
from mkc.runtime.backends.reference import States
from mkc.runtime.backends.reference import Tensors
from mkc.runtime.pack import LoadTensor
from mkc.runtime.rounds import Anchors
from mkc.runtime.rounds import committed
from mkc.runtime.rounds import first_inputs
from mkc.runtime.rounds import rounds_function
from mkc.runtime.rounds import seed_words
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.shards import Array
from mkc.runtime.token_masks import Masks
from mkc.schedule.program import STOP_IDS
from mkc.spec import Round

NOWHERE = -1  # position of a slot that is in no round


class SpeculativeBackend(ReferenceBackend):
    """Slots are the sequences of a round.

    Prompts, and steps whose tokens the host chooses, run the graph without drafts; rows that the
    last round kept are committed before.
    """

    def __init__(self, scheme: Round, load: LoadTensor, *, rounds_per_launch: int = 1) -> None:
        """
        Args:
          load: reads a tensor by its name in the round's graph.
        """
        super().__init__(scheme.prefill, load, rounds_per_launch=rounds_per_launch)
        self.scheme = scheme
        rest = scheme.graph.params.keys() - scheme.prefill.params.keys()
        params = {key: one for key, one in scheme.graph.params.items() if key in rest}
        graph = replace(scheme.graph, params=params)
        self._weights |= stack_params(graph, Tensors(graph=graph, load=load))
        self._kept_rows = {
            key: one for key, one in initial_states(scheme.graph).items() if self._is_kept(key)
        }
        nobody = np.full(self.batch, NOWHERE, np.int32)
        self._carried = first_inputs(scheme, Anchors(tokens=nobody, positions=nobody))

    @property
    def drafts(self) -> int:
        """The most drafts of a sequence in one round."""
        return self.scheme.drafts

    def speculate(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        rounds: int,
        budgets: Sequence[int],
        sampling: Sequence[SamplingParams],
        seeds: Sequence[int],
        stop_ids: Sequence[Sequence[int]] = (),
    ) -> Launch:
        assert 1 <= rounds <= self.rounds_per_launch, f"{rounds} rounds in one launch"
        stops = np.full((self.batch, STOP_IDS), NO_STOP, np.int32)
        for slot, ids in enumerate(stop_ids):
            assert len(ids) <= STOP_IDS, f"{len(ids)} stop ids, at most {STOP_IDS}"
            stops[slot, : len(ids)] = ids
        emitted, counts, drafts, number, states, carried = self._launch(
            self._weights,
            self._states | self._kept_rows,
            self._with_anchors(tokens, positions, active),
            _sampling_inputs(sampling, seeds),
            rounds,
            np.asarray(budgets, np.int32),
            stops,
        )
        self._kept_rows = {key: one for key, one in states.items() if self._is_kept(key)}
        self._states = {key: one for key, one in states.items() if not self._is_kept(key)}
        self._carried = {name: np.array(one) for name, one in carried.items()}
        ran = int(number)
        return Launch(
            tokens=np.asarray(emitted)[:ran],
            counts=np.asarray(counts)[:ran],
            drafts=np.asarray(drafts)[:ran],
        )

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        self._settle()
        return super().prefill(slot, tokens, position)

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        masks: Masks = (),
    ) -> StepResult:
        self._settle()
        return super().step(tokens, positions, active, masks=masks)

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
        self._settle()
        return super().greedy_rounds(
            tokens, positions, active, rounds=rounds, stop_ids=stop_ids, masks=masks
        )

    def reset(self, slot: int) -> None:
        self._forget(slot)
        super().reset(slot)

    def restore(self, slot: int, snapshots: Sequence[Snapshot]) -> None:
        self._forget(slot)
        super().restore(slot, snapshots)

    def state(self, slot: int) -> dict[str, Array]:
        self._settle()
        return super().state(slot)

    def _forget(self, slot: int) -> None:
        """Nothing of the slot is to be committed, and it has no drafts."""
        if self.scheme.commits_late:
            self._carried["kept"][slot] = 0
        self._carried["positions"].reshape(self.batch, -1)[slot] = NOWHERE

    def _settle(self) -> None:
        """Commits what the last round kept; drafts of the slots stay."""
        if self.scheme.commits_late and self._carried["kept"].any():
            kept = jnp.asarray(self._carried["kept"])
            self._states = self._commit(self._states, self._kept_rows, kept)
            self._carried["kept"][:] = 0

    def _with_anchors(
        self, tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
    ) -> dict[str, Array]:
        """What is carried; a slot without drafts for its token gets a round without any."""
        carried = {name: one.copy() for name, one in self._carried.items()}
        rows = (
            carried["tokens"].reshape(self.batch, -1),
            carried["positions"].reshape(self.batch, -1),
        )
        for slot, (token, position, on) in enumerate(zip(tokens, positions, active, strict=True)):
            if not on:
                rows[1][slot] = NOWHERE
            elif (rows[0][slot, 0], rows[1][slot, 0]) != (token, position):
                rows[0][slot, 0] = token
                rows[1][slot] = NOWHERE
                rows[1][slot, 0] = position
        return carried

    def _is_kept(self, key: str) -> bool:
        return self.scheme.graph.states[key].kind is StateKind.KEPT

    @cached_property
    def _launch(self) -> jax.stages.Wrapped:
        return rounds_function(self.scheme, most=self.rounds_per_launch)

    @cached_property
    def _commit(self) -> jax.stages.Wrapped:
        """(states, kept rows, counts) -> states."""

        def commit(states: States, rows: States, kept: jax.Array) -> States:
            return committed(self.scheme.graph, states | rows, kept)

        return jax.jit(commit, donate_argnums=0)


def _sampling_inputs(sampling: Sequence[SamplingParams], seeds: Sequence[int]) -> dict[str, Array]:
    return {
        "temperature": np.array([one.temperature for one in sampling], np.float32),
        "top_k": np.array([one.top_k for one in sampling], np.int32),
        "top_p": np.array([one.top_p for one in sampling], np.float32),
        "min_p": np.array([one.min_p for one in sampling], np.float32),
        "seed": np.array([seed_words(one) for one in seeds], np.int32),
    }
