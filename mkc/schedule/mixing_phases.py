"""Phases of residual blocks: streams that start anew, with what was stored of them."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.schedule.program import Phase
from mkc.schedule.program import View


@dataclass(frozen=True, kw_only=True)
class ClearBlocksPhase(Phase):
    """No block is stored; their places hold zeros, which a masked sum may read.

    Attributes:
      count: i32, in every row and lane how many layers have offered one.
      counter: name of the cursor that holds the same number as a scalar.
    """

    blocks: View
    count: View
    counter: str


@dataclass(frozen=True, kw_only=True)
class StoreBlockPhase(Phase):
    """Stores the residual stream behind the stored blocks, in place, and zeros in the stream.

    Attributes:
      blocks: `slots` places of the width of `residual`.
      counter: as for `ClearBlocksPhase`.
      period: of so many executions the first one stores.
    """

    blocks: View
    count: View
    counter: str
    residual: View
    slots: int
    period: int

    def place(self, execution: int) -> int | None:
        """Where an execution stores; None when it stores nothing."""
        slot, rest = divmod(execution, self.period)
        return None if rest or slot >= self.slots else slot


@dataclass(frozen=True, kw_only=True)
class LatentAttentionPhase(Phase):
    """Writes latent vectors to a cache and attends to it, for every sequence.

    Attributes:
      positions: scalars of the rows' positions.
      up: stream of what keys and values of the heads are projected with.
      q: of every head its query, `key_dim` lanes, and what meets the shared key, `shared_dim`.
      latent, shared: of the new rows.
    """

    cache: str
    up: str
    positions: str
    q: View
    latent: View
    shared: View
    output: View
    heads: int
    key_dim: int
    shared_dim: int
    value_dim: int
    scale: float
    rounds: bool
