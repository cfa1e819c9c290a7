"""What the generator needs of whatever runs the model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from typing import Protocol

from mkc.runtime.shards import Array

type BackendName = Literal["tpu", "interpret", "reference"]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Rows of slots that were not active mean nothing.

    Attributes:
      next_token: i32 [batch], the largest logit of each slot, the lowest id on ties.
      logits: f32 [batch, vocab].
    """

    next_token: Array
    logits: Array


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A part of what one slot remembers, on the host; only the backend that made it reads it.

    Attributes:
      start, end: cache rows of positions `start` to `end - 1`.
      fixed: states that do not grow with the sequence, as they were after position `end - 1`.
      rows: caches, [instances, end - start, ...].
    """

    start: int
    end: int
    fixed: Mapping[str, Array]
    rows: Mapping[str, Array]

    @property
    def bytes(self) -> int:
        return sum(one.nbytes for part in (self.fixed, self.rows) for one in part.values())


class Backend(Protocol):
    """Runs a model for `batch` independent slots; each slot remembers one sequence.

    A call changes what the slots it names remember, and of no other slot: bit for bit, also where
    the kernel itself computes every row in every step.

    Attributes:
      name: which backend this is; it is reported, and never replaced by another one.
      batch: slots.
      context: positions that a slot can remember.
      vocab: token ids are below this.
      prefill_rows: most prompt tokens of one compiled prefill program.
      rounds_per_launch: most steps of one `greedy_rounds`.
      stop_ids_per_launch: most stop ids that `greedy_rounds` looks for.
    """

    @property
    def name(self) -> BackendName: ...
    @property
    def batch(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def vocab(self) -> int: ...
    @property
    def prefill_rows(self) -> int: ...
    @property
    def rounds_per_launch(self) -> int: ...
    @property
    def stop_ids_per_launch(self) -> int: ...

    def prefill(self, slot: int, tokens: Sequence[int], position: int) -> Array:
        """Feeds tokens to a slot that remembers the positions before `position`.

        Returns:
          Logits of the last token, f32 [vocab].
        """
        ...

    def step(
        self, tokens: Sequence[int], positions: Sequence[int], active: Sequence[bool]
    ) -> StepResult:
        """Feeds one token to every active slot. All arguments have one entry per slot."""
        ...

    def greedy_rounds(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        rounds: int,
        stop_ids: Sequence[int] = (),
    ) -> Array:
        """Up to `rounds` steps in which every active slot is fed what it has just emitted.

        May end early when every active slot has emitted a stop id. What a slot remembers after its
        stop id is undefined until it is reset or restored.

        Args:
          tokens, positions, active: of the first step.
          rounds: 1 to `rounds_per_launch`; no slot may get beyond the context.

        Returns:
          What each round emitted, i32 [rounds that ran, batch].
        """
        ...

    def reset(self, slot: int) -> None:
        """The slot remembers nothing, and its next token is at position 0."""
        ...

    def save(self, slot: int, *, start: int, end: int) -> Snapshot:
        """What a slot remembers that has seen positions 0 to `end - 1`; cache rows from `start`."""
        ...

    def restore(self, slot: int, snapshots: Sequence[Snapshot]) -> None:
        """Brings back saved positions: each snapshot starts where the one before it ends.

        The first one starts at position 0. The slot goes on after the last one.
        """
        ...

    def state(self, slot: int) -> dict[str, Array]:
        """What a slot remembers by state key of the graph, [instances, ...], for inspection.

        Cache rows that the sequence has not reached are unspecified.
        """
        ...


def check_chain(snapshots: Sequence[Snapshot]) -> None:
    """Asserts that snapshots follow each other from position 0 on."""
    assert snapshots, "nothing to restore"
    position = 0
    for one in snapshots:
        assert one.start == position, f"a snapshot starts at {one.start}, not at {position}"
        position = one.end
