"""Speculative schemes: from a target and, perhaps, a drafter to the graph of one round.

A scheme knows no model and a model knows no scheme. See docs/speculation.md.
"""

from __future__ import annotations

from mkc.spec.block import block_round
from mkc.spec.plain import plain_round
from mkc.spec.scheme import DRAFT_NAMESPACE
from mkc.spec.scheme import LASTING
from mkc.spec.scheme import Round

__all__ = ["DRAFT_NAMESPACE", "LASTING", "Round", "block_round", "plain_round"]
