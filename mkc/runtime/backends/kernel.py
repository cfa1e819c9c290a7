"""The generated kernel, on TPUs or interpreted on the CPU.

The kernel advances every row in every launch. What an idle slot remembers is therefore taken out
before the first launch in which it idles (it is *parked*), and put back when the slot is used
again; in between the kernel computes on what is left in the row, at position 0, where a launch
reads and writes the fewest cache rows. Slots that nobody uses are parked from the start, so that a
launch in which the same slots are active as in the last one moves nothing.
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
from mkc.runtime.prefill import Prefill
from mkc.runtime.shards import Array
from mkc.schedule.program import STOP_IDS


class KernelBackend:
    """Slots are the sequences of a kernel that was lowered with logits."""

    stop_ids_per_launch = STOP_IDS

    def __init__(self, session: KernelSession) -> None:
        """
        Args:
          session: with its weights; its states become those of this backend.
        """
        assert session.program.logits is not None, "the kernel does not return logits"
        self.session = session
        self.name: BackendName = "tpu" if session.interpret is False else "interpret"
        self.batch = session.program.batch
        self.context = session.program.context
        self.rounds_per_launch = session.program.rounds_per_launch
        self._prefill = Prefill(lowered=session.lowered, mesh=session.mesh)
        self.prefill_rows = self._prefill.sizes[-1]
        # A launch writes this many cache rows of an idle slot.
        self._parked_rows = min(self.rounds_per_launch, self.context)
        self._slots = SlotAccess(mesh=session.mesh, kinds=_kinds(session), batch=self.batch)
        session.clear_states()
        # Parked parts by slot; None stands for zeros.
        self._parked: dict[int, Parts | None] = dict.fromkeys(range(self.batch))

    @cached_property
    def vocab(self) -> int:
        logits = self.session.program.logits
        assert logits is not None
        return logits.width * self.session.program.ranks

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        self._unpark(slot)
        result = self._prefill.run(self.session.operands, tokens, slot=slot, start=position)
        logits: Array = np.asarray(result.logits, np.float32)[0]
        return logits

    def step(
        self, tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
    ) -> StepResult:
        fed, places = self._begin(tokens, positions, active)
        if self.rounds_per_launch == 1:
            one = self.session.step(fed, places)
            next_token, logits = one.next_token, one.logits
        else:
            launched = self.session.launch(fed, places, rounds=1, with_logits=True)
            next_token, logits = launched.tokens[0], launched.logits
        assert logits is not None
        return StepResult(next_token=next_token[: self.batch], logits=logits)

    def greedy_rounds(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        rounds: int,
        stop_ids: Sequence[int] = (),
    ) -> Array:
        fed, places = self._begin(tokens, positions, active)
        if self.rounds_per_launch == 1:
            return self.session.step(fed, places).next_token[None, : self.batch]
        return self.session.launch(fed, places, rounds=rounds, stop_ids=stop_ids).tokens

    def reset(self, slot: int) -> None:
        self._parked[slot] = None

    def save(self, slot: int, *, start: int, end: int) -> Snapshot:
        self._unpark(slot)
        parts = self._slots.take(end - start)(self._states(), slot, start)
        host = {name: np.asarray(part) for name, part in parts.items()}
        return Snapshot(
            start=start,
            end=end,
            fixed={name: part for name, part in host.items() if not self._slots.is_cache(name)},
            rows={name: part for name, part in host.items() if self._slots.is_cache(name)},
        )

    def restore(self, slot: int, snapshots: Sequence[Snapshot]) -> None:
        check_chain(snapshots)
        self._parked.pop(slot, None)
        for one in snapshots:
            self._write(slot, one.start, self._slots.place({**one.rows, **snapshots[-1].fixed}))

    def state(self, slot: int) -> dict[str, Array]:
        self._unpark(slot)
        found = {}
        for key in self.session.lowered.steps.sharded.full.states:
            found[key] = self.session.state(key)[:, slot]
        return found

    def _begin(
        self, tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
    ) -> tuple[Array, Array]:
        """Parks idle slots and brings back active ones. Tokens and positions of the launch."""
        for slot, on in enumerate(active):
            if on:
                self._unpark(slot)
            elif slot not in self._parked:
                self._parked[slot] = self._slots.take(self._parked_rows)(self._states(), slot, 0)
        fed = [token if on else 0 for token, on in zip(tokens, active, strict=True)]
        places = [position if on else 0 for position, on in zip(positions, active, strict=True)]
        return np.asarray(fed, np.int32), np.asarray(places, np.int32)

    def _unpark(self, slot: int) -> None:
        if slot in self._parked:
            parts = self._parked.pop(slot)
            self._write(slot, 0, self._zeros if parts is None else parts)

    def _write(self, slot: int, start: int, parts: Parts) -> None:
        self.session.operands.update(self._slots.put(self._states(), slot, start, parts))

    def _states(self) -> Parts:
        return {name: self.session.operands[name] for name in self._slots.kinds}

    @cached_property
    def _zeros(self) -> Parts:
        """A slot that remembers nothing."""
        return self._slots.zeros(self._states(), self._parked_rows)


def _kinds(session: KernelSession) -> dict[str, StateKind]:
    """Kind of state in each operand that the kernel updates."""
    states = session.lowered.steps.sharded.full.states
    return {session.layout.operand_of(key): one.kind for key, one in states.items()}
