"""Mixtures of experts: where their matrices lie in HBM, and the ring that they pass through."""

from __future__ import annotations

from dataclasses import dataclass

from mkc.ir.mxfp4 import CODES_PER_BYTE
from mkc.ir.mxfp4 import GROUP
from mkc.ir.types import DType
from mkc.schedule.units import VECTOR_LANES

REGISTER_ROWS = 8  # of 32-bit numbers
BYTE_ROWS = 32  # of a memory tile of bytes
CODE_ROWS = 64  # of a tile of 4-bit floats: a matrix has whole ones
# Weights of at most eight bits are pushed at twice the rate of bf16; a compiled product of a 4-bit
# matrix [3584, 384] takes 443 bundles, its 21 pushes of 256 x 256 at this rate 462.
NARROW_PUSH = 0.5
# What is known of the chosen experts in scalar memory: rows, that of their numbers among those of
# the rank, ascending, and that of how many there are.
CHOSEN_ROWS = 8
CHOSEN, COUNT = 0, 1
PRODUCT_COLUMNS = 256  # that a 4-bit product takes at once; of each group of columns a row apart


def whole(size: int, multiple: int) -> int:
    """`size` rounded up."""
    return -(-size // multiple) * multiple


def packed_rows(inputs: int) -> int:
    """Rows of bytes of a 4-bit matrix with so many inputs: codes, and the scales behind them."""
    return whole(inputs // CODES_PER_BYTE + inputs // GROUP, BYTE_ROWS)


@dataclass(frozen=True, kw_only=True)
class ExpertSlice:
    """The part of an expert that a rank holds.

    Attributes:
      width: columns of gate and of up.
      inner: that an expert reads and gives.
      dtype: bf16, or e2m1x2 for 4-bit codes with their scales.
    """

    width: int
    inner: int
    dtype: DType

    @property
    def gate_up(self) -> tuple[int, int]:
        """Gate beside up, padding behind both."""
        columns = whole(2 * self.width, VECTOR_LANES)
        is_packed = self.dtype is DType.E2M1X2
        return packed_rows(self.inner) if is_packed else self.inner, columns

    @property
    def down(self) -> tuple[int, int]:
        is_packed = self.dtype is DType.E2M1X2
        rows = packed_rows(whole(self.width, CODE_ROWS)) if is_packed else self.width
        return rows, self.inner

    @property
    def pushed(self) -> float:
        """Weights of one expert that the matrix unit takes, padded columns included, counted as if
        they were bf16."""
        elements = self.inner * self.gate_up[1] + self.width * self.inner
        return elements * (NARROW_PUSH if self.dtype is DType.E2M1X2 else 1.0)

    @property
    def bytes(self) -> int:
        """Of one expert."""
        elements = sum(rows * columns for rows, columns in (self.gate_up, self.down))
        return elements * self.dtype.bytes


@dataclass(frozen=True, kw_only=True)
class ExpertRing:
    """Slots that experts pass through, and what a choice of experts needs; one for all layers.

    Attributes:
      slice: what a slot holds.
      rows, chosen: token rows, and experts of each.
      experts: that are chosen from.
    """

    name: str
    slice: ExpertSlice
    slots: int
    rows: int
    padded_rows: int
    chosen: int
    experts: int

    @property
    def has_scores(self) -> bool:
        """Whether scores lie in VMEM while the choice goes through registers of rows."""
        return self.rows > REGISTER_ROWS

    @property
    def places(self) -> int:
        """Lanes of the list of chosen experts."""
        return whole(self.rows * self.chosen, VECTOR_LANES)

    def arrays(self) -> list[tuple[str, tuple[int, ...], DType]]:
        """VMEM arrays: (suffix, shape, dtype)."""
        dtype = self.slice.dtype
        found = [
            ("gate_up", (self.slots, *self.slice.gate_up), dtype),
            ("down", (self.slots, *self.slice.down), dtype),
            ("landing", (CHOSEN_ROWS, self.places), DType.I32),
        ]
        if self.has_scores:
            found.append(("scores", (self.padded_rows, self.experts), DType.F32))
        if dtype is DType.E2M1X2:
            rows = 1 if self.rows == 1 else whole(self.rows, 8)
            blocks = -(-self.slice.inner // PRODUCT_COLUMNS)
            spread = PRODUCT_COLUMNS // GROUP * rows
            found.append(("left", (blocks, spread, PRODUCT_COLUMNS), DType.BF16))
        return found


@dataclass(frozen=True, kw_only=True)
class ExpertPlan:
    """The experts of one mixture, all its layers.

    Attributes:
      ring: name of the ring.
      gate_up_array, down_array: HBM arrays, an entry for each layer and expert of the rank.
      layers: executions in a step.
      local: experts of a rank in one layer.
      groups, slices: of ranks; rank r has the experts of group r // slices.
      params: keys of the matrices, in the operation's order.
    """

    name: str
    ring: str
    gate_up_array: str
    down_array: str
    layers: int
    local: int
    groups: int
    slices: int
    params: tuple[str, ...]
