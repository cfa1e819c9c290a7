"""What comes into VMEM item by item: weights, small vectors, states and caches."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.ir.types import DType


@dataclass(frozen=True, kw_only=True)
class TapePlan:
    """The weight stream.

    Attributes:
      rows: tape rows of one step and rank.
      slots, slot_rows: the ring.
      prologue: row counts of the loads started before the first phase.
    """

    rows: int
    slots: int
    slot_rows: int
    prologue: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """Items of equal size that pass through a small ring, one after the other.

    Attributes:
      name: Python name.
      array: name of the HBM array, a kernel operand.
      item_shape: shape of one item.
      items: how many one step consumes.
      slots: ring slots.
      writes_back: the item is changed in place and copied back.
      purpose: for people.
    """

    name: str
    array: str
    item_shape: tuple[int, ...]
    dtype: DType
    items: int
    slots: int
    writes_back: bool
    purpose: str


@dataclass(frozen=True, kw_only=True)
class CacheStream:
    """Tiles of a key and a value cache, fetched ahead of their attention.

    Attributes:
      layers: executions of the attention phase per step.
      width: kv heads * head dim, lanes of a cache row.
      value_width: of a row of the values, None when it is as wide as one of the keys.
      by_rows: attention takes several new rows at once. It finds in tiles what lies before the
        first of them, and writes two blocks of rows. Else one row goes into the last tile.
      tile: positions per tile.
      window: keys nearer than this are seen, None for all.
    """

    name: str
    key_array: str
    value_array: str
    layers: int
    batch: int
    context: int
    width: int
    tile: int
    slots: int
    window: int | None = None
    value_width: int | None = None
    by_rows: bool = False

    @property
    def widths(self) -> tuple[int, int]:
        """Lanes of a row of the keys and of one of the values."""
        return self.width, self.value_width or self.width


@dataclass(frozen=True, kw_only=True)
class PageRow:
    """A vector's place in a page: `length` elements in rows `row` onwards, VECTOR_LANES in each.

    Attributes:
      param: parameter key; empty for a constant.
      tap: index along the last axis of a convolution weight, None for a plain vector.
      index: of the vector along the leading axes of the parameter.
      constant: the values of a constant.
    """

    row: int
    length: int
    param: str = ""
    tap: int | None = None
    index: tuple[int, ...] = ()
    constant: tuple[float, ...] = ()
