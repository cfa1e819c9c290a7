"""What goes from round to round in each slot: its newest token, drafts, rows not committed yet."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mkc.runtime.rounds import PADDING
from mkc.runtime.rounds import Anchors
from mkc.runtime.rounds import first_inputs
from mkc.runtime.shards import Array
from mkc.spec import Round

KEPT = "kept"

type Values = dict[str, Array]  # inputs of a round, by name


@dataclass(kw_only=True, eq=False)
class Carried:
    """Carried inputs of a scheme, between two launches.

    Attributes:
      values: by name, [batch * n, ...]; `tokens` and `positions` have a row for each draft.
      batch: slots.
    """

    values: Values
    batch: int

    @classmethod
    def empty(cls, scheme: Round, *, rows_elsewhere: bool = False) -> Carried:
        """No slot has a token, drafts, or anything to commit.

        Args:
          rows_elsewhere: only tokens, positions and counts are carried here.
        """
        batch = scheme.graph.batch
        nobody = np.full(batch, PADDING, np.int32)
        values = first_inputs(scheme, Anchors(tokens=nobody, positions=nobody))
        if rows_elsewhere:
            values = {name: one for name, one in values.items() if one.ndim == 1}
        return cls(values=values, batch=batch)

    def anchors(self) -> tuple[list[int], list[int]]:
        """Token and position of the first row of each slot."""
        tokens, positions = (
            self._rows(self.values, name)[:, 0].tolist() for name in ("tokens", "positions")
        )
        return tokens, positions

    def forget(self, slot: int) -> None:
        """Nothing of the slot is to be committed, and it has no drafts."""
        if KEPT in self.values:
            self.values[KEPT][slot] = 0
        self._rows(self.values, "positions")[slot] = PADDING

    def drafts(self, slot: int, token: int, position: int) -> list[int]:
        """Drafts that follow a token at a position in the slot; none behind another token."""
        tokens, positions = (
            self._rows(self.values, name)[slot] for name in ("tokens", "positions")
        )
        if (tokens[0], positions[0]) != (token, position):
            return []
        found: list[int] = tokens[1:][positions[1:] >= 0].tolist()
        return found

    def take_kept(self, slots: Iterable[int]) -> Array:
        """How many kept rows of these slots count, i32 [batch], 0 for others; they count no more.

        Whoever takes them commits them. Others stay: in which launch a slot is committed must not
        depend on its neighbours.
        """
        found = np.zeros(self.batch, np.int32)
        if KEPT in self.values:
            for slot in slots:
                found[slot] = self.values[KEPT][slot]
                self.values[KEPT][slot] = 0
        return found

    def inputs(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        active: Sequence[bool],
        *,
        drafts: bool = True,
    ) -> Values:
        """Inputs of a launch in which the active slots go on from their newest tokens.

        Args:
          tokens, positions: of the newest token of each slot, which has not been fed.
          drafts: a slot whose drafts follow its token has them; the others get a round without any.
        """
        found = {name: one.copy() for name, one in self.values.items()}
        rows = self._rows(found, "tokens"), self._rows(found, "positions")
        for slot, (token, position, on) in enumerate(zip(tokens, positions, active, strict=True)):
            fits = drafts and (rows[0][slot, 0], rows[1][slot, 0]) == (token, position)
            if not (on and fits):
                rows[1][slot] = PADDING
            if on:
                rows[0][slot, 0] = token
                rows[1][slot, 0] = position
        return found

    def take(self, values: Mapping[str, Array], active: Sequence[bool]) -> None:
        """Takes what a launch carried out; slots that were not in it keep what they had."""
        on = np.asarray(active, bool)
        for name, old in self.values.items():
            new = np.array(values[name], old.dtype).reshape(self.batch, -1)
            old.reshape(self.batch, -1)[on] = new[on]

    def _rows(self, values: Mapping[str, Array], name: str) -> Array:
        """[batch, rows of a sequence], a view."""
        return values[name].reshape(self.batch, -1)
