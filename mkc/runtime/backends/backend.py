"""What the generator needs of whatever runs the model."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal
from typing import Protocol
from typing import runtime_checkable

from mkc.runtime.sampling import SamplingParams
from mkc.runtime.shards import Array
from mkc.runtime.token_masks import Masks

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
    a step computes every row.

    Attributes:
      name: which backend this is; it is reported, and never replaced by another one.
      batch: slots.
      context: positions that a slot can remember.
      vocab: token ids are below this.
      prefill_rows: most prompt tokens of one compiled prefill program.
      rounds_per_launch: most steps of one `greedy_rounds`.
      stop_ids_per_launch: most stop ids of a slot that `greedy_rounds` looks for.
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
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        masks: Masks = (),
    ) -> StepResult:
        """Feeds one token to every active slot. All arguments have one entry per slot.

        Args:
          masks: which tokens each slot may emit; empty for all. At least one must be allowed.
            Logits of others are minus infinity.
        """
        ...

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
        """Steps in which every active slot is fed what it has just emitted.

        A slot rests when it has had its rounds or has emitted one of its stop ids: it then
        remembers what it was fed, which is all but the last token that it emitted.

        Args:
          tokens, positions, active: of the first step.
          rounds: most steps of each slot, 1 to `rounds_per_launch`, and within the context.
          stop_ids: of each slot; empty for none at all.
          masks: as for `step`, of all rounds.

        Returns:
          What each round emitted, i32 [rounds that ran, batch]. At least as many rounds ran as the
          longest slot took; what a slot emitted while it rested means nothing.
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


@runtime_checkable
class DraftingBackend(Backend, Protocol):
    """A backend that emits several tokens per round.

    Attributes:
      drafts: most drafts of a slot in one round.
      draws: rounds choose the tokens of sequences that sample, too; else they are greedy.
    """

    @property
    def drafts(self) -> int: ...
    @property
    def draws(self) -> bool: ...

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
        """Rounds in which every active slot goes on from its newest token.

        A slot that gets the token that its last round ended with has drafts at once. It rests when
        it has emitted a stop id or its budget; it must then be reset or restored.

        Args:
          tokens, positions, active: of the newest token of each slot, which has not been fed.
          rounds: 1 to `rounds_per_launch`.
          budgets: tokens that each slot may still emit; its last round may emit more.
          sampling, seeds: of each slot; penalties, biases and alternatives have no effect.
          stop_ids: of each slot.
          masks: which tokens may follow each row of a round, `drafts` + 1 rows for each slot: its
            newest token and then its `next_drafts`; empty for all. They hold in every round, so a
            launch with masks has one. At least one token must be allowed in each row.
        """
        ...

    def next_drafts(self, slot: int, token: int, position: int) -> list[int]:
        """What the slot's next round verifies when it goes on from a token at a position."""
        ...


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What rounds emitted.

    Attributes:
      tokens: i32 [rounds, batch, rows per sequence]; the first `counts` of each are tokens.
      counts: i32 [rounds, batch]; 0 for a slot that rested.
      drafts: i32 [rounds, batch], how many were verified.
    """

    tokens: Array
    counts: Array
    drafts: Array

    def of(self, slot: int) -> list[tuple[list[int], int]]:
        """Tokens of one slot, and how many drafts were verified, by round that it took part in."""
        rows = zip(self.tokens[:, slot], self.counts[:, slot], self.drafts[:, slot], strict=True)
        return [(row[:count].tolist(), int(drafts)) for row, count, drafts in rows if count]


def check_chain(snapshots: Sequence[Snapshot]) -> None:
    """Asserts that snapshots follow each other from position 0 on."""
    assert snapshots, "nothing to restore"
    position = 0
    for one in snapshots:
        assert one.start == position, f"a snapshot starts at {one.start}, not at {position}"
        position = one.end
