"""Sizes of a vector register that programs are made of."""

from __future__ import annotations

VECTOR_LANES = 128  # lanes of a page row: one vector register
