"""Constraints of tokens as functions of the output so far."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence

from mkc.runtime.sampling import Array
from mkc.runtime.token_masks import pack_mask


class Constraint:
    """Allows what a function of the output says: bool [vocab].

    Attributes:
      output: tokens that were taken.
    """

    def __init__(self, allowed: Callable[[Sequence[int]], Array]) -> None:
        self.allowed = allowed
        self.output: list[int] = []

    def mask(self) -> Array:
        return pack_mask(self.allowed(self.output))

    def take(self, token: int) -> None:
        self.output.append(token)

    def copy(self) -> Constraint:
        found = Constraint(self.allowed)
        found.output = list(self.output)
        return found
