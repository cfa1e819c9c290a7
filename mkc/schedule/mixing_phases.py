"""Phases of residual blocks: streams that start anew, with what was stored of them."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.schedule.program import Phase
from mkc.schedule.program import View


@dataclass(frozen=True, kw_only=True)
class ClearBlocksPhase(Phase):
    """No block is stored; their places hold zeros, which a masked sum may read.

    Attributes:
      count: i32, in every row and lane how many blocks are stored.
    """

    blocks: View
    count: View


@dataclass(frozen=True, kw_only=True)
class StoreBlockPhase(Phase):
    """Stores the residual stream behind the stored blocks, in place.

    Attributes:
      blocks: `slots` places of the width of `source`.
    """

    blocks: View
    count: View
    source: View
    slots: int


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
