"""The contents of packed weights, block by block, from a checkpoint.

A block of the tape is 256 output columns: the rows of the checkpoint that hold them are read,
transposed once, and handed out to every rank that needs them. Nothing larger than a block and its
transposed copy is in memory.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from functools import cached_property
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
from mkc.runtime.pack import LoadTensor
from mkc.runtime.pack import Packer
from mkc.runtime.pack import expert_plan
from mkc.runtime.shards import Array
from mkc.runtime.shards import Run
from mkc.schedule.program import TAPE_LANES

type Bits = NDArray[np.uint16]  # bf16 as it is in memory

# A matrix is transposed in tiles of so many columns; the distance of a tile's rows is no power of
# two, which would put them all into a few sets of the cache. Measured: 4 GB/s on a server core;
# NumPy's own transposition of the whole has 1.4.
TILE_COLUMNS = 128
TILE_PITCH = 160
CHUNK_ROWS = 1024  # of a transposed block, 512 KiB: summed and written while a cache holds it
READ_ELEMENTS = 1 << 18  # read and looked at while a cache holds them
# A bf16 that is not finite is at least so much: a positive one read as i16, a negative one as u16.
INFINITY = 0x7F80
NEGATIVE_INFINITY = 0xFF80
ELEMENT = 2


@dataclass(frozen=True, kw_only=True)
class Content:
    """The next bytes of a block, the same for some ranks.

    The array is contiguous, and valid until the next content is asked for.
    """

    ranks: tuple[int, ...]
    array: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockReader:
    """Makes blocks; several threads may use one reader."""

    checkpoint: Checkpoint
    lowered: Lowered
    _buffers: _Buffers = field(default_factory=lambda: _Buffers(), repr=False)

    @cached_property
    def _load(self) -> LoadTensor:
        return self.checkpoint.loader(self.lowered.steps.sharded.full)

    def contents(
        self,
        piece: PackPiece,
        block: int,
        not_finite: set[str],
        *,
        ranks: Collection[int] | None = None,
    ) -> Iterator[Content]:
        """The contents of one block, for every rank from its first byte to its last.

        Args:
          not_finite: names of tensors with a NaN or an infinity are added here.
          ranks: those that are wanted, None for all; what no other rank needs is not read. A table
            is one for all ranks, that of rank 0.
        """
        wanted = range(self.lowered.program.ranks) if ranks is None else ranks
        match piece:
            case TapePiece():
                yield from self._tape(piece, block, not_finite, wanted)
            case TablePiece():
                yield self._table(piece, block, not_finite)
            case ItemPiece():
                yield from self._item(piece, block, not_finite, wanted)
            case _:
                raise AssertionError(f"a piece of an unknown kind: {piece}")

    def _tape(
        self, piece: TapePiece, block: int, not_finite: set[str], wanted: Collection[int]
    ) -> Iterator[Content]:
        first = (piece.first_block + block) * TAPE_LANES
        sharing: dict[tuple[Source, ...], list[int]] = {}
        for rank in wanted:
            rows = rows_between(piece.matrices[rank].rows, first, first + TAPE_LANES)
            sharing.setdefault(rows, []).append(rank)
        for rows, ranks in sharing.items():
            read = self._buffers.take("read", (TAPE_LANES, piece.full_columns))
            filled = self._read_rows(rows, read, not_finite)
            read[filled:] = 0
            for matrix, same in _alike(piece, ranks).items():
                for run in matrix.columns or (Run(start=0, stop=piece.full_columns),):
                    for start in range(run.start, run.stop, CHUNK_ROWS):
                        part = read[:, start : min(start + CHUNK_ROWS, run.stop)]
                        yield Content(ranks=same, array=self._turned(part, matrix.zeros))

    def _turned(self, read: Bits, zeros: bool) -> Bits:
        """read [256, K] transposed, or zeros in its place."""
        turned = self._buffers.take("turned", read.shape[::-1])
        if zeros:
            turned[:] = 0
        else:
            tiles = -(-read.shape[1] // TILE_COLUMNS)
            shape = (tiles, TAPE_LANES, TILE_PITCH)
            transpose(read, turned, self._buffers.take("tiles", shape))
        return turned

    def _read_rows(self, rows: tuple[Source, ...], out: Bits, not_finite: set[str]) -> int:
        """Fills the first rows of `out`; returns how many."""
        filled = 0
        together = max(1, READ_ELEMENTS // out.shape[1])
        for source in rows:
            for first in range(source.start, source.stop, together):
                count = min(together, source.stop - first)
                part = out[filled : filled + count]
                self._read(source.tensor, first * out.shape[1], part)
                if not all_finite(part):
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
        if not all_finite(out):
            not_finite.add(piece.tensor)
        return Content(ranks=(0,), array=out)

    def _item(
        self, piece: ItemPiece, block: int, not_finite: set[str], wanted: Collection[int]
    ) -> Iterator[Content]:
        """Small vectors, narrow weights and experts: each tensor is read once for all ranks."""
        program = self.lowered.program
        seen: dict[str, Array] = {}

        def load_once(name: str) -> Array:
            if name not in seen:
                seen[name] = self._load(name)
                is_bytes = seen[name].dtype == np.uint8
                if not is_bytes and not np.isfinite(seen[name].astype(np.float32)).all():
                    not_finite.add(name)
            return seen[name]

        packer = Packer(program=program, sharded=self.lowered.steps.sharded, load=load_once)
        role = next(one.role for one in program.operands if one.name == piece.operand)
        build = {
            "page": packer.page_item,
            "narrow": packer.narrow_item,
            "matrix": packer.matrix_item,
            "experts": packer.expert_item,
        }[role]
        # Ranks that share tensors: those of a group have slices of the same expert.
        together = expert_plan(program, piece.operand).slices if role == "experts" else 0
        group = 0
        for rank in wanted:
            if together and rank // together != group:
                group = rank // together
                seen.clear()
            yield Content(ranks=(rank,), array=build(piece.operand, piece.first + block, rank))


def _alike(piece: TapePiece, ranks: list[int]) -> dict[LocalMatrix, tuple[int, ...]]:
    """Ranks that have the same columns of the same rows; the rows are left out of the keys."""
    alike: dict[LocalMatrix, tuple[int, ...]] = {}
    for rank in ranks:
        key = replace(piece.matrices[rank], rows=())
        alike[key] = (*alike.get(key, ()), rank)
    return alike


def all_finite(values: Bits) -> bool:
    """True without a NaN or an infinity among bf16 values."""
    positive = int(values.view(np.int16).max()) < INFINITY
    return positive and int(values.max()) < NEGATIVE_INFINITY


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


def transpose(read: Bits, turned: Bits, scratch: Bits) -> None:
    """turned [K, 256] = read [256, K] transposed.

    Args:
      scratch: [tiles, 256, TILE_PITCH] for all tiles of K; the last one may be narrower.
    """
    rows, columns = read.shape
    whole = columns // TILE_COLUMNS
    edge = whole * TILE_COLUMNS
    if whole:
        tiles = scratch[:whole, :, :TILE_COLUMNS]
        np.copyto(tiles, read[:, :edge].reshape(rows, whole, TILE_COLUMNS).transpose(1, 0, 2))
        np.copyto(turned[:edge].reshape(whole, TILE_COLUMNS, rows), tiles.transpose(0, 2, 1))
    if edge < columns:
        tile = scratch[whole, :, : columns - edge]
        np.copyto(tile, read[:, edge:])
        np.copyto(turned[edge:], tile.T)


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
