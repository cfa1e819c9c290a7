"""Dividing a sequence in every way, for tests of streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st


def divided[S: Sequence[Any]](whole: S, cuts: Sequence[int]) -> list[S]:
    """The pieces of `whole` between `cuts`, empty ones included."""
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    return [
        whole[begin:end]  # type: ignore[misc]
        for begin, end in zip(places, places[1:], strict=False)
    ]


CUTS = st.lists(st.integers(0, 60), max_size=12)


def singles[S: Sequence[Any]](whole: S) -> list[S]:
    """The smallest pieces."""
    return divided(whole, list(range(1, len(whole))))
