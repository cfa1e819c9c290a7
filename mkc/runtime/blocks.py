"""The contents of packed weights, block by block, from a checkpoint.

A block of the tape is 256 output columns: the rows of the checkpoint that hold them are read,
transposed once, and handed out to every rank that needs them. Nothing larger than a block and its
transposed copy is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from math import prod
from threading import local

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mkc.passes.pipeline import Lowered
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.layout import ItemPiece
from mkc.runtime.layout import LocalMatrix
from mkc.runtime.layout import PackPiece
from mkc.runtime.layout import Source
from mkc.runtime.layout import TablePiece
from mkc.runtime.layout import TapePiece
from mkc.runtime.pack import Packer
from mkc.runtime.shards import Array
from mkc.schedule.program import TAPE_LANES

type Bits = NDArray[np.uint16]  # bf16 as it is in memory

# Columns transposed at once: 256 rows of them are 32 KiB, which the first cache level holds.
TRANSPOSED_COLUMNS = 64
MAGNITUDE = np.uint16(0x7FFF)  # a bf16 without its sign
INFINITY = np.uint16(0x7F80)  # magnitudes above are NaN
ELEMENT = 2


@dataclass(frozen=True, kw_only=True)
class Content:
    """What some ranks have in a block: `chunks` one after the other, each contiguous.

    The chunks are valid until the next content is asked for.
    """

    ranks: tuple[int, ...]
    chunks: tuple[Array, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockReader:
    """Makes blocks; several threads may use one reader."""

    checkpoint: Checkpoint
    lowered: Lowered
    _buffers: _Buffers = field(default_factory=lambda: _Buffers(), repr=False)

    def contents(self, piece: PackPiece, block: int, not_finite: set[str]) -> Iterator[Content]:
        """The contents of one block for all ranks that have it.

        Args:
          not_finite: names of tensors with a NaN or an infinity are added here.
        """
        match piece:
            case TapePiece():
                yield from self._tape(piece, block, not_finite)
            case TablePiece():
                yield self._table(piece, block, not_finite)
            case ItemPiece():
                yield from self._item(piece, not_finite)
            case _:
                raise AssertionError(f"a piece of an unknown kind: {piece}")

    def _tape(self, piece: TapePiece, block: int, not_finite: set[str]) -> Iterator[Content]:
        first = (piece.first_block + block) * TAPE_LANES
        sharing: dict[tuple[Source, ...], list[int]] = {}
        for rank, matrix in enumerate(piece.matrices):
            sharing.setdefault(rows_between(matrix.rows, first, first + TAPE_LANES), []).append(
                rank
            )
        shape = (TAPE_LANES, piece.full_columns)
        for rows, ranks in sharing.items():
            read = self._buffers.take("read", shape)
            filled = self._read_rows(rows, read, not_finite)
            read[filled:] = 0
            turned = self._buffers.take("turned", shape[::-1])
            transpose(read, turned, self._buffers.take("tile", (TAPE_LANES, TRANSPOSED_COLUMNS)))
            yield from _divided(piece, ranks, turned)

    def _read_rows(self, rows: tuple[Source, ...], out: Bits, not_finite: set[str]) -> int:
        """Fills the first rows of `out`; returns how many."""
        filled = 0
        for source in rows:
            count = source.stop - source.start
            part = out[filled : filled + count]
            self._read(source.tensor, source.start * out.shape[1], part)
            if part.size and np.bitwise_and(part, MAGNITUDE).max() >= INFINITY:
                not_finite.add(source.tensor)
            filled += count
        return filled

    def _read(self, tensor: str, first: int, out: Bits) -> None:
        """Elements of a tensor from `first` on, as bf16."""
        stored = self.checkpoint.tensors[tensor]
        if stored.dtype == "BF16":
            self.checkpoint.read_into(stored, first * ELEMENT, out)
            return
        assert stored.dtype == "F32", f"{tensor}: {stored.dtype} was not refused"
        wide = np.empty(out.shape, np.float32)
        self.checkpoint.read_into(stored, first * wide.itemsize, wide)
        out[...] = wide.astype(ml_dtypes.bfloat16).view(np.uint16)

    def _table(self, piece: TablePiece, block: int, not_finite: set[str]) -> Content:
        start = piece.start + block * piece.block_bytes
        size = min(piece.block_bytes, piece.bytes - block * piece.block_bytes)
        out = self._buffers.take("read", (size // ELEMENT,))
        stored = max(0, min(size, piece.tensor_bytes - start)) // ELEMENT
        if stored:
            self._read(piece.tensor, start // ELEMENT, out[:stored])
        out[stored:] = 0
        if np.bitwise_and(out, MAGNITUDE).max() >= INFINITY:
            not_finite.add(piece.tensor)
        return Content(ranks=(0,), chunks=(out,))

    def _item(self, piece: ItemPiece, not_finite: set[str]) -> Iterator[Content]:
        """Small vectors and narrow weights: each tensor is read once for all ranks."""
        program = self.lowered.program
        load = self.checkpoint.loader(self.lowered.steps.sharded.full)
        seen: dict[str, Array] = {}

        def load_once(name: str) -> Array:
            if name not in seen:
                seen[name] = load(name)
                if not np.isfinite(seen[name].astype(np.float32)).all():
                    not_finite.add(name)
            return seen[name]

        packer = Packer(program=program, sharded=self.lowered.steps.sharded, load=load_once)
        role = next(one.role for one in program.operands if one.name == piece.operand)
        build = packer.page_item if role == "page" else packer.narrow_item
        for rank in range(program.ranks):
            yield Content(ranks=(rank,), chunks=(build(piece.operand, piece.instance, rank),))


def _divided(piece: TapePiece, ranks: list[int], turned: Bits) -> Iterator[Content]:
    """The rows of a transposed block [columns of the checkpoint, 256] that each rank has."""
    sharing: dict[LocalMatrix, list[int]] = {}
    for rank in ranks:
        matrix = piece.matrices[rank]
        key = LocalMatrix(rows=(), columns=matrix.columns, zeros=matrix.zeros)
        sharing.setdefault(key, []).append(rank)
    for matrix, same in sharing.items():
        chunks: tuple[Array, ...]
        if matrix.columns is None:
            chunks = (turned,)
        else:
            chunks = tuple(turned[run.start : run.stop] for run in matrix.columns)
        if matrix.zeros:
            chunks = tuple(np.zeros_like(one) for one in chunks)
        yield Content(ranks=tuple(same), chunks=chunks)


def rows_between(rows: tuple[Source, ...], first: int, stop: int) -> tuple[Source, ...]:
    """Rows `first` .. `stop` of a fused matrix; fewer where it ends before `stop`."""
    found = []
    at = 0
    for row in rows:
        start = row.start + max(0, first - at)
        end = min(row.stop, row.start + stop - at)
        if start < end:
            found.append(Source(tensor=row.tensor, start=start, stop=end))
        at += row.stop - row.start
    return tuple(found)


def transpose(read: Bits, turned: Bits, tile: Bits) -> None:
    """turned [K, 256] = read [256, K] transposed.

    Rows of K are often a power of two apart, so that a column of `read` falls into few sets of the
    cache. A copy of a few columns does not: through it NumPy is more than twice as fast.
    """
    for start in range(0, read.shape[1], TRANSPOSED_COLUMNS):
        part = tile[:, : min(TRANSPOSED_COLUMNS, read.shape[1] - start)]
        stop = start + part.shape[1]
        np.copyto(part, read[:, start:stop])
        np.copyto(turned[start:stop], part.T)


class _Buffers(local):
    """Arrays of one thread, kept from block to block."""

    def __init__(self) -> None:
        self.arrays: dict[str, Bits] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Bits:
        """An array of the shape with any contents; the same memory every time."""
        size = prod(shape)
        if name not in self.arrays or self.arrays[name].size < size:
            self.arrays[name] = np.empty(size, np.uint16)
        return self.arrays[name][:size].reshape(shape)
