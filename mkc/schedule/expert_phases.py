"""The phases that choose experts and compute them."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.ir.ops_experts import RouterScore
from mkc.schedule.program import Phase
from mkc.schedule.program import View


@dataclass(frozen=True, kw_only=True)
class RoutePhase(Phase):
    """Chooses experts for every row, and starts to load those that this rank has.

    Attributes:
      experts: name of the plan.
      page, bias: stream and parameter of what is added to scores for the choice, empty without.
      ids, weights: of the chosen ones, `k` lanes.
    """

    experts: str
    page: str
    bias: str
    logits: View
    ids: View
    weights: View
    k: int
    score: RouterScore
    renormalise: bool
    factor: float


@dataclass(frozen=True, kw_only=True)
class ExpertsPhase(Phase):
    """The weighted sum of what the chosen experts of this rank give for every row.

    Attributes:
      rounds: the sum is complete and rounded to bf16.
    """

    experts: str
    x: View
    ids: View
    weights: View
    output: View
    gate_cap: float | None
    up_cap: float | None
    rounds: bool
