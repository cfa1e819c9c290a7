"""Types of graph values: element type and named axes made of parts.

An axis is a run of *parts*, each a number of equal *units*: a projection to 16 key heads, 16 query
heads and 48 value heads of 128 is one axis of three parts. Units are what a mesh may divide; parts
are what a fused weight keeps apart. A plain dimension is one part of units of size one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field
from enum import StrEnum


class DType(StrEnum):
    """Element types of graph values, as written in the text form."""

    BF16 = "bf16"
    F32 = "f32"
    I32 = "i32"
    E2M1X2 = "e2m1x2"  # a byte of two 4-bit floats, the even one in the low bits; see mkc.ir.mxfp4
    E8M0 = "e8m0"  # a byte that is a power of two: 2^(byte - 127)

    @property
    def bytes(self) -> int:
        return _BYTES[self]


_BYTES = {DType.BF16: 2, DType.F32: 4, DType.I32: 4, DType.E2M1X2: 1, DType.E8M0: 1}


@dataclass(frozen=True, kw_only=True)
class Part:
    """`count` units of `unit` consecutive elements each.

    `copyable` units are heads: a mesh with more devices than units may give several devices the
    same unit. Other units are always divided.
    """

    count: int
    unit: int = 1
    copyable: bool = field(default=False, compare=False)

    @property
    def size(self) -> int:
        return self.count * self.unit


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One dimension of a tensor: its parts in order, and the name used in messages."""

    parts: tuple[Part, ...]
    name: str = ""

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def units(self) -> int:
        return sum(part.count for part in self.parts)

    def same_layout(self, other: Axis) -> bool:
        """True when both axes divide alike; names do not matter."""
        return self.parts == other.parts


type AxisLike = int | Axis


def axis(size: AxisLike, name: str = "") -> Axis:
    """An axis of `size` single elements; an `Axis` is returned as it is."""
    if isinstance(size, Axis):
        return size
    return Axis(parts=(Part(count=size),), name=name)


def heads(count: int, dim: int, name: str = "heads") -> Axis:
    """A flat axis of `count` heads of `dim` elements; a mesh divides it between heads only."""
    return Axis(parts=(Part(count=count, unit=dim, copyable=True),), name=name)


def concat_axes(axes: Sequence[Axis], name: str = "") -> Axis:
    """The axis of tensors laid side by side: every part stays a part."""
    return Axis(parts=tuple(part for one in axes for part in one.parts), name=name)


@dataclass(frozen=True, kw_only=True)
class TensorType:
    """Element type and axes of a value, parameter or state."""

    dtype: DType
    axes: tuple[Axis, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(one.size for one in self.axes)

    @property
    def rank(self) -> int:
        return len(self.axes)

    @property
    def elements(self) -> int:
        count = 1
        for one in self.axes:
            count *= one.size
        return count

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.bytes

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(str(size) for size in self.shape)}]"


def tensor(dtype: DType, *sizes: AxisLike) -> TensorType:
    """Shorthand for a type with the given axes."""
    return TensorType(dtype=dtype, axes=tuple(axis(size) for size in sizes))
