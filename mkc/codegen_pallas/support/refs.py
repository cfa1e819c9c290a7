"""References and views that the support functions share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

type Ref = Any
"""A Pallas reference: a buffer in VMEM, SMEM or HBM, or a semaphore array."""

type Scalar = Any
"""An int32 scalar: a Python int or a traced value."""

LANES = 128  # lanes of a vector register
SUBLANES = 8  # f32 rows of a vector register
BF16_ROWS = 16  # rows of a bf16 tile: the smallest block of rows that a copy may move


@dataclass(frozen=True, kw_only=True)
class View:
    """Lanes `start` .. `start + width` of every row of a `[R, N]` f32 buffer in VMEM."""

    ref: Ref
    start: Scalar
    width: int

    @property
    def columns(self) -> Any:
        """The lanes as an index of the buffer."""
        if isinstance(self.start, int):
            return slice(self.start, self.start + self.width)
        return pl.ds(self.start, self.width)

    def load(self) -> jax.Array:
        """All rows, `[R, width]`."""
        value: jax.Array = self.ref[:, self.columns]
        return value

    def store(self, value: jax.Array) -> None:
        """Replaces all rows by `value` `[R, width]`."""
        self.ref[:, self.columns] = value

    def row(self, index: Scalar) -> jax.Array:
        """Row `index`, which may be a run-time value, as `[1, width]`.

        Chosen by a mask: the chip has no load of a run-time row that is one register wide out of
        a wider buffer.
        """
        value = self.load()
        mine = lax.broadcasted_iota(jnp.int32, value.shape, 0) == index
        return jnp.sum(jnp.where(mine, value, 0.0), axis=0, keepdims=True)

    def store_row(self, index: Scalar, value: jax.Array) -> None:
        """Replaces row `index` by `value` `[1, width]`; other rows keep what they hold.

        The choice is made in f32, whose masks every chip has; a bf16 buffer rounds what it stores.
        """
        old = self.load().astype(jnp.float32)
        mine = lax.broadcasted_iota(jnp.int32, old.shape, 0) == index
        new = jnp.where(mine, jnp.broadcast_to(value, old.shape), old)
        self.store(new.astype(self.ref.dtype))

    def rows(self, sequence: Scalar, count: int) -> jax.Array:
        """Rows `sequence * count` .. of one sequence, `[count, width]` f32.

        A run-time `sequence` is a run-time row only where whole registers are read; else one of
        the buffer's sequences is chosen.
        """
        if isinstance(sequence, int) or count % SUBLANES == 0:
            return self._rows(sequence, count).astype(jnp.float32)
        found = self._rows(0, count).astype(jnp.float32)
        for other in range(1, self.ref.shape[0] // count):
            value = self._rows(other, count).astype(jnp.float32)
            found = jnp.where(sequence == other, value, found)
        return found

    def store_rows(self, sequence: Scalar, value: jax.Array) -> None:
        """Replaces the rows of one sequence by `value` `[count, width]`; others are kept."""
        count = value.shape[0]
        sequences = self.ref.shape[0] // count
        whole = count % SUBLANES == 0 and self.ref.dtype == jnp.float32
        if whole or sequences == 1:
            self.ref[self._place(sequence, count)] = value.astype(self.ref.dtype)
            return
        old = self.load().astype(jnp.float32)
        rest = old[sequences * count :]
        repeated = jnp.concatenate([value] * sequences + ([rest] if rest.shape[0] else []), axis=0)
        row = lax.broadcasted_iota(jnp.int32, old.shape, 0)
        mine = (row >= sequence * count) & (row < (sequence + 1) * count)
        self.store(jnp.where(mine, repeated, old).astype(self.ref.dtype))

    def _place(self, sequence: Scalar, count: int) -> tuple[Any, Any]:
        first = sequence * count
        if not isinstance(first, int) and count % SUBLANES == 0:
            first = pl.multiple_of(first, SUBLANES)
        return pl.ds(first, count), self.columns

    def _rows(self, sequence: Scalar, count: int) -> jax.Array:
        value: jax.Array = self.ref[self._place(sequence, count)]
        return value

    def lanes(self, start: int, width: int) -> View:
        """Lanes `start` .. `start + width` of this view."""
        assert start + width <= self.width, f"lanes {start}+{width} of a view of {self.width}"
        return View(ref=self.ref, start=self.start + start, width=width)

    def head(self, index: Scalar, size: int) -> View:
        """The `size` lanes of head `index`, which may be a run-time value."""
        if isinstance(index, int):
            return self.lanes(index * size, size)
        start = self.start + index * size
        if self.start % LANES == 0 and size % LANES == 0:
            start = pl.multiple_of(start, LANES)
        return View(ref=self.ref, start=start, width=size)


def wrapped_next(index: Scalar, count: int) -> jax.Array:
    """`(index + 1) % count` for an index below `count`, without a division."""
    following = jnp.asarray(index, jnp.int32) + 1
    return jnp.where(following == count, 0, following)


def wrapped_previous(index: Scalar, count: int) -> jax.Array:
    """`(index - 1) % count` for an index below `count`, without a division."""
    index = jnp.asarray(index, jnp.int32)
    return jnp.where(index == 0, count - 1, index - 1)
