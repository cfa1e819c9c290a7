"""The generated kernel of a speculative scheme, on TPUs or interpreted on the CPU.

Greedy sequences, and those that sample if the kernel does, draft, verify and accept in the kernel.
A sequence whose tokens the host chooses runs rounds of a single real row: decode steps, whose rows
are committed by the next round of any kind. Prompts and saved states need them committed before;
see `mkc.runtime.late_commit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence

import numpy as np

from mkc.runtime.backends.backend import Launch
from mkc.runtime.backends.backend import Snapshot
from mkc.runtime.backends.backend import StepResult
from mkc.runtime.backends.carried import Carried
from mkc.runtime.backends.kernel import KernelBackend
from mkc.runtime.finish_round import SequenceSampling
from mkc.runtime.finish_round import decided_tokens
from mkc.runtime.finish_round import forced_tokens
from mkc.runtime.finish_round import undecided
from mkc.runtime.kernel import KernelSession
from mkc.runtime.kernel_rounds import RoundsResult
from mkc.runtime.kernel_rounds import launch_rounds
from mkc.runtime.late_commit import LateCommit
from mkc.runtime.prefill import Prefill
from mkc.runtime.rounds import seed_words
from mkc.runtime.sampling import SamplingParams
from mkc.runtime.shards import Array
from mkc.runtime.token_masks import Masks
from mkc.spec import Round


class KernelRoundsBackend(KernelBackend):
    """Slots are the sequences of a kernel that runs rounds and was lowered with logits."""

    def __init__(
        self, session: KernelSession, scheme: Round, *, prefill: Prefill | None = None
    ) -> None:
        """
        Args:
          session: of the scheme's graph, with its weights; its states become those of this backend.
          prefill: of the scheme's graph for prompts; None for a new one.
        """
        new = Prefill(lowered=session.lowered, mesh=session.mesh, graph=scheme.prefill)
        super().__init__(session, prefill=prefill or new)
        self.scheme = scheme
        self._carried = Carried.empty(scheme, rows_elsewhere=True)
        self._commit = LateCommit(lowered=session.lowered, mesh=session.mesh)

    @property
    def drafts(self) -> int:
        """The most drafts of a sequence in one round."""
        return self.scheme.drafts

    @property
    def draws(self) -> bool:
        """Rounds choose the tokens of sequences that sample, too."""
        plan = self.session.program.round
        return plan is not None and bool(plan.forced)

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
        greedy = all(sampling[slot].temperature == 0.0 for slot in _slots(active))
        assert greedy or self.draws, "the kernel does not sample"
        assert rounds == 1 or not any(one is not None for one in masks), "masks are of one round"
        self._empty -= set(_slots(active))
        options = [_options(*one) for one in zip(sampling, seeds, strict=True)]
        found = launch_rounds(
            self.session,
            self._carried.inputs(tokens, positions, active),
            rounds=[rounds] * self.batch,
            budgets=budgets,
            stop_ids=stop_ids,
            sampling=options,
            masks=masks,
        )
        self._carried.take(found.carried, active)
        results = [found]
        left = undecided(found.counts, found.carried["positions"], [rounds] * self.batch)
        left = [slot for slot in left if active[slot]]
        if left:
            rest = np.asarray(budgets) - found.counts.sum(axis=0)
            results.append(self._finish(left, found, options, rest.tolist(), stop_ids))
        return Launch(
            tokens=np.concatenate([one.tokens for one in results]),
            counts=np.concatenate([one.counts for one in results]),
            drafts=np.concatenate([one.drafts for one in results]),
        )

    def _finish(
        self,
        slots: list[int],
        round_: RoundsResult,
        options: Sequence[SequenceSampling],
        budgets: Sequence[int],
        stop_ids: Sequence[Sequence[int]],
    ) -> RoundsResult:
        """Runs the last round again for slots whose tokens it has left to the host."""
        length = self.scheme.graph.rows_per_sequence
        tokens, positions = (
            self._carried.values[name].reshape(self.batch, length)
            for name in ("tokens", "positions")
        )
        chosen = {
            slot: decided_tokens(
                round_.logits[slot],
                tokens[slot],
                positions[slot],
                options[slot],
                self._proposed(slot),
            )
            for slot in slots
        }
        active = [slot in slots for slot in range(self.batch)]
        found = launch_rounds(
            self.session,
            self._carried.inputs(*self._carried.anchors(), active),
            rounds=[1] * self.batch,
            budgets=budgets,
            stop_ids=stop_ids,
            sampling=options,
            forced=forced_tokens(self.batch, length, chosen),
        )
        self._carried.take(found.carried, active)
        return found

    def _proposed(self, slot: int) -> tuple[Array, Array] | None:
        """Candidates and probabilities of a slot's drafts, [T, K]; None for certain drafts."""
        plan = self.session.program.round
        assert plan is not None
        if not plan.rows:
            return None
        length = self.scheme.graph.rows_per_sequence
        widths = {one.name: one.type.shape[-1] for one in self.scheme.graph.inputs}
        candidates, proposal = (
            self.session.rank_parts(one.target)[0][slot * length : (slot + 1) * length]
            for one in plan.rows
        )
        return candidates[:, : widths["candidates"]], proposal[:, : widths["proposal"]]

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        masks: Masks = (),
    ) -> StepResult:
        found = self._single_rows(tokens, positions, active, masks)
        return StepResult(next_token=found.tokens[0, :, 0], logits=found.logits[:, 0])

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
        """As `Backend.greedy_rounds`; each round is a launch, since rounds in the kernel draft."""
        fed, places, going = list(tokens), list(positions), list(active)
        emitted: list[list[int]] = []
        while any(going):
            found = self._single_rows(fed, places, going, masks)
            fed = found.tokens[0, :, 0].tolist()
            places = [position + 1 for position in places]
            emitted.append(fed)
            for slot in _slots(going):
                stopped = bool(stop_ids) and fed[slot] in stop_ids[slot]
                going[slot] = not stopped and len(emitted) < rounds[slot]
        return np.array(emitted, np.int32)

    def next_drafts(self, slot: int, token: int, position: int) -> list[int]:
        return self._carried.drafts(slot, token, position)

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        self._settle([slot])
        return super().prefill(slot, tokens, position)

    def reset(self, slot: int) -> None:
        self._carried.forget(slot)
        super().reset(slot)

    def save(self, slot: int, *, start: int, end: int) -> Snapshot:
        self._settle([slot])
        return super().save(slot, start=start, end=end)

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
            self._commit(self.session.operands, kept)

    def _single_rows(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        masks: Masks,
    ) -> RoundsResult:
        """A round without drafts: each active slot is fed one token.

        Args:
          masks: of each slot, or empty.
        """
        length = self.scheme.graph.rows_per_sequence
        rows = [one for mask in masks for one in (mask, *[None] * (length - 1))]
        self._empty -= set(_slots(active))
        found = launch_rounds(
            self.session,
            self._carried.inputs(tokens, positions, active, drafts=False),
            rounds=[1] * self.batch,
            budgets=[1] * self.batch,
            masks=rows,
        )
        self._carried.take(found.carried, active)
        return found


def _options(sampling: SamplingParams, seed: int) -> SequenceSampling:
    return SequenceSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=seed_words(seed),
    )


def _slots(active: Sequence[bool]) -> list[int]:
    """Numbers of the slots that are active."""
    return [slot for slot, on in enumerate(active) if on]
