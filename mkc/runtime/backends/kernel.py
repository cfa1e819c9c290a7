"""The generated kernel, on TPUs or interpreted on the CPU.

A slot that is not active has a negative position in a launch, and so changes nothing it remembers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from mkc.ir.graph import StateKind
from mkc.runtime.backends.backend import BackendName
from mkc.runtime.backends.backend import Snapshot
from mkc.runtime.backends.backend import StepResult
from mkc.runtime.backends.backend import check_chain
from mkc.runtime.backends.slots import Parts
from mkc.runtime.backends.slots import SlotAccess
from mkc.runtime.kernel import KernelSession
from mkc.runtime.placement import local_part
from mkc.runtime.placement import to_host
from mkc.runtime.prefill import Prefill
from mkc.runtime.shards import Array
from mkc.runtime.token_masks import Masks
from mkc.schedule.program import RESTING
from mkc.schedule.program import STOP_IDS
from mkc.spec import LASTING


class KernelBackend:
    """Slots are the sequences of a kernel that was lowered with logits."""

    stop_ids_per_launch = STOP_IDS

    def __init__(self, session: KernelSession, *, prefill: Prefill | None = None) -> None:
        """
        Args:
          session: with its weights; its states become those of this backend.
          prefill: of the session's kernel, with what has been compiled of it; None for a new one.
        """
        assert session.program.logits is not None, "the kernel does not return logits"
        self.session = session
        self.name: BackendName = "tpu" if session.interpret is False else "interpret"
        self.batch = session.program.batch
        self.context = session.program.context
        self.rounds_per_launch = session.program.rounds_per_launch
        self._prefill = prefill or Prefill(lowered=session.lowered, mesh=session.mesh)
        self.prefill_rows = self._prefill.sizes[-1]
        self._slots = SlotAccess(mesh=session.mesh, kinds=_kinds(session), batch=self.batch)
        session.clear_states()
        self._empty = set(range(self.batch))  # slots that were reset and not used since

    @cached_property
    def vocab(self) -> int:
        program = self.session.program
        assert program.logits is not None
        return program.logits.width * (1 if program.logits_whole else program.ranks)

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        self._empty.discard(slot)
        result = self._prefill.run(self.session.operands, tokens, slot=slot, start=position)
        logits: Array = to_host(result.logits)[0]
        return logits

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        masks: Masks = (),
    ) -> StepResult:
        fed, places = self._begin(tokens, positions, active)
        if self.rounds_per_launch == 1:
            one = self.session.step(fed, places, masks=masks)
            next_token, logits = one.next_token, one.logits
        else:
            launched = self.session.launch(
                fed, places, rounds=[1] * self.batch, masks=masks, with_logits=True
            )
            next_token, logits = launched.tokens[0], launched.logits
        assert logits is not None
        return StepResult(next_token=next_token[: self.batch], logits=logits)

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
        fed, places = self._begin(tokens, positions, active)
        if self.rounds_per_launch == 1:
            return self.session.step(fed, places, masks=masks).next_token[None, : self.batch]
        return self.session.launch(
            fed, places, rounds=rounds, stop_ids=stop_ids, masks=masks
        ).tokens

    def reset(self, slot: int) -> None:
        if slot not in self._empty:
            self.session.operands.update(self._slots.clear(self._states(), slot))
            self._empty.add(slot)

    def save(self, slot: int, *, start: int, end: int) -> Snapshot:
        parts = self._slots.take(end - start)(self._states(), slot, start)
        host = {name: local_part(part) for name, part in parts.items()}
        return Snapshot(
            start=start,
            end=end,
            fixed={name: part for name, part in host.items() if not self._slots.is_cache(name)},
            rows={name: part for name, part in host.items() if self._slots.is_cache(name)},
        )

    def restore(self, slot: int, snapshots: Sequence[Snapshot]) -> None:
        check_chain(snapshots)
        self._empty.discard(slot)
        for one in snapshots:
            parts = self._slots.place({**one.rows, **snapshots[-1].fixed})
            states = self._slots.put(self._states(), slot, one.start, parts)
            self.session.operands.update(states)

    def state(self, slot: int) -> dict[str, Array]:
        return {key: self.session.state(key)[:, slot] for key in _lasting(self.session)}

    def _begin(
        self, tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
    ) -> tuple[Array, Array]:
        """Tokens and positions of the launch, i32 [batch]; slots that are not active rest."""
        self._empty -= {slot for slot, on in enumerate(active) if on}
        fed = np.where(active, np.asarray(tokens, np.int32), 0)
        places = np.where(active, np.asarray(positions, np.int32), RESTING)
        return fed.astype(np.int32), places.astype(np.int32)

    def _states(self) -> Parts:
        return {name: self.session.operands[name] for name in self._slots.kinds}


def _kinds(session: KernelSession) -> dict[str, StateKind]:
    """Kind of state in each operand that a slot is saved from."""
    return {session.layout.operand_of(key): one for key, one in _lasting(session).items()}


def _lasting(session: KernelSession) -> dict[str, StateKind]:
    """Keys and kinds of the states that a slot remembers from step to step."""
    states = session.lowered.steps.sharded.full.states
    return {key: one.kind for key, one in states.items() if one.kind in LASTING}
