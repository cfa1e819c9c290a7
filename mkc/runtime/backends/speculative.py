"""The reference backend with a scheme: rounds that draft, verify and accept, evaluated by XLA."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from mkc.ir.graph import StateKind
from mkc.ir.reference import initial_states
from mkc.ir.reference import stack_params
from mkc.ir.token_masks import TOKEN_MASKS
from mkc.runtime.backends.backend import Launch
from mkc.runtime.backends.backend import Snapshot
from mkc.runtime.backends.backend import StepResult
from mkc.runtime.backends.carried import Carried
from mkc.runtime.backends.reference import ReferenceBackend
from mkc.runtime.backends.reference import States
from mkc.runtime.backends.reference import Tensors
from mkc.runtime.pack import LoadTensor
from mkc.runtime.rounds import committed
from mkc.runtime.rounds import rounds_function
from mkc.runtime.rounds import seed_words
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.shards import Array
from mkc.runtime.stop_ids import stop_table
from mkc.runtime.token_masks import Masks
from mkc.runtime.token_masks import mask_rows
from mkc.spec import Round
from mkc.spec.scheme import SAMPLING


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
        scheme = scheme.masked
        super().__init__(scheme.prefill, load, rounds_per_launch=rounds_per_launch)
        self.scheme = scheme
        rest = scheme.graph.params.keys() - scheme.prefill.params.keys()
        params = {key: one for key, one in scheme.graph.params.items() if key in rest}
        graph = replace(scheme.graph, params=params)
        self._weights |= stack_params(graph, Tensors(graph=graph, load=load))
        self._kept_rows = {
            key: one for key, one in initial_states(scheme.graph).items() if self._is_kept(key)
        }
        self._carried = Carried.empty(scheme)

    @property
    def drafts(self) -> int:
        """The most drafts of a sequence in one round."""
        return self.scheme.drafts

    @cached_property
    def draws(self) -> bool:
        """Rounds choose the tokens of sequences that sample, too."""
        return any(one.name in SAMPLING for one in self.scheme.graph.inputs)

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
        masks: Masks = (),
    ) -> Launch:
        assert rounds == 1 or not any(one is not None for one in masks), "masks are of one round"
        assert 1 <= rounds <= self.rounds_per_launch, f"{rounds} rounds in one launch"
        emitted, counts, drafts, number, states, carried = self._launch(
            self._weights,
            self._states | self._kept_rows,
            self._carried.inputs(tokens, positions, active),
            {
                **(_sampling_inputs(sampling, seeds) if self.draws else {}),
                TOKEN_MASKS: mask_rows(masks or [None] * self.scheme.graph.rows, self.vocab),
            },
            rounds,
            np.asarray(budgets, np.int32),
            stop_table(stop_ids, self.batch),
        )
        self._kept_rows = {key: one for key, one in states.items() if self._is_kept(key)}
        self._states = {key: one for key, one in states.items() if not self._is_kept(key)}
        self._carried.take({name: np.asarray(one) for name, one in carried.items()}, active)
        ran = int(number)
        return Launch(
            tokens=np.asarray(emitted)[:ran],
            counts=np.asarray(counts)[:ran],
            drafts=np.asarray(drafts)[:ran],
        )

    def next_drafts(self, slot: int, token: int, position: int) -> list[int]:
        return self._carried.drafts(slot, token, position)

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        self._settle([slot])
        return super().prefill(slot, tokens, position)

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        masks: Masks = (),
    ) -> StepResult:
        self._settle(slot for slot, on in enumerate(active) if on)
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
        self._settle(slot for slot, on in enumerate(active) if on)
        return super().greedy_rounds(
            tokens, positions, active, rounds=rounds, stop_ids=stop_ids, masks=masks
        )

    def reset(self, slot: int) -> None:
        self._carried.forget(slot)
        super().reset(slot)

    def restore(self, slot: int, snapshots: Sequence[Snapshot]) -> None:
        self._carried.forget(slot)
        super().restore(slot, snapshots)

    def state(self, slot: int) -> dict[str, Array]:
        self._settle([slot])
        return super().state(slot)

    def _settle(self, slots: Iterable[int]) -> None:
        """Commits what the last round of these slots kept; their drafts stay."""
        kept = self._carried.take_kept(slots)
        if kept.any():
            self._states = self._commit(self._states, self._kept_rows, kept)

    def _is_kept(self, key: str) -> bool:
        return self.scheme.graph.states[key].kind is StateKind.KEPT

    @cached_property
    def _launch(self) -> jax.stages.Wrapped:
        return rounds_function(self.scheme, most=self.rounds_per_launch)

    @cached_property
    def _commit(self) -> jax.stages.Wrapped:
        """(states, kept rows, counts) -> states."""

        def commit(states: States, rows: States, kept: jax.Array) -> States:
            return committed(self.scheme.graph, states | rows, jnp.asarray(kept))

        return jax.jit(commit, donate_argnums=0)


def _sampling_inputs(sampling: Sequence[SamplingParams], seeds: Sequence[int]) -> dict[str, Array]:
    return {
        "temperature": np.array([one.temperature for one in sampling], np.float32),
        "top_k": np.array([one.top_k for one in sampling], np.int32),
        "top_p": np.array([one.top_p for one in sampling], np.float32),
        "min_p": np.array([one.min_p for one in sampling], np.float32),
        "seed": np.array([seed_words(one) for one in seeds], np.int32),
    }
