"""Decisions: what a pass chose, what else it considered, and why.

Every choice that shapes the program is recorded when it is made. `plan.json` stores the list, and
later tools explain and compare plans by the stable `id`.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One choice.

    Attributes:
      id: stable dotted name such as `tile.ring_slots`.
      passed: name of the pass that decided.
      chosen: the value taken, as text.
      because: one sentence.
      rejected: other value -> why not.
    """

    id: str
    passed: str
    chosen: str
    because: str
    rejected: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True)
class DecisionLog:
    """Collects the decisions of one compilation in order."""

    decisions: list[Decision] = field(default_factory=list)

    def choose(
        self,
        id: str,
        *,
        passed: str,
        chosen: object,
        because: str,
        rejected: dict[str, str] | None = None,
    ) -> None:
        """Records one decision; the same id is recorded once."""
        if any(one.id == id for one in self.decisions):
            return
        self.decisions.append(
            Decision(
                id=id,
                passed=passed,
                chosen=str(chosen),
                because=because,
                rejected=rejected or {},
            )
        )
