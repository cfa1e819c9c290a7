"""A backend without a model: what it says next is a function of all tokens it has been fed.

It checks what every backend may rely on, and counts what it is asked to do.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from mkc.runtime.backends.backend import BackendName
from mkc.runtime.backends.backend import Snapshot
from mkc.runtime.backends.backend import StepResult
from mkc.runtime.backends.backend import check_chain
from mkc.runtime.sampling import Array
from mkc.runtime.token_masks import Masks
from mkc.runtime.token_masks import unpack_mask

VOCAB = 420  # holds the tokenizer of the tests
RESTED = 0  # what a slot emits in a round in which it rests: it means nothing


def scrambled(history: Sequence[int]) -> Array:
    """Logits f32 [VOCAB] that depend on every token and its place."""
    seed = crc32(np.asarray(history, np.int32).tobytes())
    return np.random.default_rng(seed).normal(scale=3, size=VOCAB).astype(np.float32)


class FakeBackend:
    """A slot remembers its tokens.

    Attributes:
      fed: number of prompt tokens that were fed, over all slots.
      launches: rounds of every call of `step` and `greedy_rounds`.
    """

    name: BackendName = "reference"
    vocab = VOCAB
    prefill_rows = 8
    stop_ids_per_launch = 8

    def __init__(
        self,
        *,
        batch: int = 1,
        context: int = 64,
        rounds: int = 1,
        logits: Callable[[Sequence[int]], Array] = scrambled,
    ) -> None:
        self.batch = batch
        self.context = context
        self.rounds_per_launch = rounds
        self.logits = logits
        self.slots: list[list[int]] = [[] for _ in range(batch)]
        self.fed = 0
        self.launches: list[int] = []

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        assert tokens
        assert len(self.slots[slot]) == position, "the slot is somewhere else"
        self.fed += len(tokens)
        for token in tokens:
            self._feed(slot, token)
        return self.logits(self.slots[slot])

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        masks: Masks = (),
    ) -> StepResult:
        self.launches.append(1)
        logits = np.full((self.batch, VOCAB), np.nan, np.float32)
        for slot in self._active(positions, active):
            self._feed(slot, tokens[slot])
            logits[slot] = self._masked(slot, masks)
        return StepResult(next_token=np.argmax(logits, axis=1).astype(np.int32), logits=logits)

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
        assert all(1 <= one <= self.rounds_per_launch for one in rounds)
        assert all(len(one) <= self.stop_ids_per_launch for one in stop_ids)
        fed = np.array(tokens, np.int32)
        emitted: list[Array] = []
        awake = self._active(positions, active)
        while awake:
            for slot in range(self.batch):
                if slot not in awake:
                    fed[slot] = RESTED
                    continue
                self._feed(slot, int(fed[slot]))
                fed[slot] = int(np.argmax(self._masked(slot, masks)))
            emitted.append(fed.copy())
            awake = [
                slot
                for slot in awake
                if len(emitted) < rounds[slot] and not (stop_ids and fed[slot] in stop_ids[slot])
            ]
        self.launches.append(len(emitted))
        return np.stack(emitted)

    def reset(self, slot: int) -> None:
        self.slots[slot] = []

    def save(self, slot: int, *, start: int, end: int) -> Snapshot:
        assert len(self.slots[slot]) == end, "the slot is somewhere else"
        rows = np.array([self.slots[slot][start:end]], np.int32)
        return Snapshot(start=start, end=end, fixed={"length": np.array([end])}, rows={"t": rows})

    def restore(self, slot: int, snapshots: Sequence[Snapshot]) -> None:
        check_chain(snapshots)
        self.slots[slot] = [int(token) for one in snapshots for token in one.rows["t"][0]]
        assert len(self.slots[slot]) == snapshots[-1].fixed["length"][0]

    def state(self, slot: int) -> dict[str, Array]:
        return {"tokens": np.array([self.slots[slot]], np.int32)}

    def _feed(self, slot: int, token: int) -> None:
        assert len(self.slots[slot]) < self.context, "a token beyond the context"
        self.slots[slot].append(token)

    def _masked(self, slot: int, masks: Masks) -> Array:
        """Logits of a slot; those of forbidden tokens are minus infinity."""
        logits = self.logits(self.slots[slot])
        mask = masks[slot] if masks else None
        if mask is None:
            return logits
        return np.where(unpack_mask(mask, VOCAB), logits, np.float32(-np.inf))

    def _active(self, positions: Sequence[int], active: Sequence[bool]) -> list[int]:
        assert len(positions) == len(active) == self.batch
        on = [slot for slot in range(self.batch) if active[slot]]
        assert on, "a launch for nobody"
        for slot in on:
            assert len(self.slots[slot]) == positions[slot], "the slot is somewhere else"
        return on
