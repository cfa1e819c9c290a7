"""Weights of a checkpoint straight onto the devices of a kernel, without a packed folder.

The blocks are those that `mkc pack` writes, see `mkc.runtime.blocks`: a tensor is read once for all
ranks of the process. A large operand is filled on its devices, portion by portion, so that the host
never holds a rank's tape.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from dataclasses import field
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from mkc.passes.pipeline import Lowered
from mkc.runtime.blocks import BlockReader
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.layout import PackPiece
from mkc.runtime.layout import pack_layout
from mkc.runtime.pack import OPERAND_DTYPES
from mkc.runtime.placement import local_ranks
from mkc.runtime.placement import place_ranks
from mkc.schedule.program import Operand

# On the host for all ranks of this process; two portions are in memory, and one on its way.
PORTION_BYTES = 128 << 20
MOST_WORKERS = 4  # threads, as many as pack a folder at most

type Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Portion:
    """Consecutive blocks of an operand.

    Attributes:
      start, stop: bytes of one rank's operand.
      blocks: pieces, and the number of a block in them.
    """

    start: int
    stop: int
    blocks: tuple[tuple[PackPiece, int], ...]


def portions(pieces: Sequence[PackPiece], limit: int) -> Iterator[Portion]:
    """The blocks of an operand's pieces, together as long as they are not more than `limit` bytes.

    A block that is larger is a portion of its own.
    """
    blocks: list[tuple[PackPiece, int]] = []
    first = end = 0
    for piece in pieces:
        for block in range(piece.blocks):
            start = piece.start + block * piece.block_bytes
            stop = min(start + piece.block_bytes, piece.start + piece.bytes)
            if blocks and stop - first > limit:
                yield Portion(start=first, stop=end, blocks=tuple(blocks))
                blocks, first = [], start
            blocks.append((piece, block))
            end = stop
    if blocks:
        yield Portion(start=first, stop=end, blocks=tuple(blocks))


def read_operands(
    checkpoint: Checkpoint,
    lowered: Lowered,
    format_of: Callable[[str], Any],
    *,
    portion_bytes: int = PORTION_BYTES,
) -> tuple[dict[str, jax.Array], tuple[str, ...]]:
    """The weight operands of a plan, on their devices.

    Of several processes all have to call this; each reads what its own ranks need.

    Args:
      checkpoint: one that `check` has accepted for the plan's graph.
      format_of: sharding or format with which an operand is placed.

    Returns:
      Arrays by operand, and the names of tensors with a NaN or an infinity, sorted.

    Raises:
      SafetensorsError: a file cannot be read, or has become shorter.
    """
    program = lowered.program
    pieces: dict[str, list[PackPiece]] = {}
    for piece in pack_layout(lowered).pieces:
        pieces.setdefault(piece.operand, []).append(piece)
    workers = min(MOST_WORKERS, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers, thread_name_prefix="mkc-fill") as pool:
        filling = _Filling(
            reader=BlockReader(checkpoint=checkpoint, lowered=lowered),
            pool=pool,
            portion_bytes=portion_bytes,
        )
        arrays = {
            one.name: filling.operand(
                one,
                pieces[one.name],
                format_of(one.name),
                1 if one.role == "table" else program.ranks,
            )
            for one in program.operands
            if one.name in pieces
        }
    return arrays, tuple(sorted(filling.not_finite))


@dataclass(frozen=True, kw_only=True)
class _Filling:
    """Attributes:
    not_finite: tensors with a NaN or an infinity in what was read so far.
    """

    reader: BlockReader
    pool: ThreadPoolExecutor
    portion_bytes: int
    not_finite: set[str] = field(default_factory=set)

    def operand(
        self, operand: Operand, pieces: Sequence[PackPiece], format_: Any, ranks: int
    ) -> jax.Array:
        """All parts of an operand, one for each of `ranks`."""
        unit = prod(operand.shape[1:]) * operand.dtype.bytes  # of the axis that is filled
        own = local_ranks(format_, ranks)
        found = list(portions(pieces, self.portion_bytes // len(own)))
        if len(found) == 1:
            return place_ranks(format_, ranks, self._read(found[0], own, operand).__getitem__)
        longest = max(one.stop - one.start for one in found)
        writer = portion_writer(format_)
        whole = zeros(operand, format_, ranks)
        for portion in found:
            # Of one length, so that one program writes nearly all of them; what is behind a
            # portion's end is written by the next one.
            length = min(longest, pieces[-1].start + pieces[-1].bytes - portion.start)
            parts = self._read(portion, own, operand, length)
            jax.block_until_ready(whole)  # the portion before has left the host
            placed = place_ranks(format_, ranks, parts.__getitem__)
            whole = writer(whole, placed, portion.start // unit)
        return whole

    def _read(
        self, portion: Portion, ranks: Sequence[int], operand: Operand, length: int | None = None
    ) -> Mapping[int, Any]:
        """A portion of every rank, zeros behind it up to `length` bytes."""
        size = length or portion.stop - portion.start
        parts = {rank: np.zeros(size, np.uint8) for rank in ranks}
        fill = partial(self._fill, portion, parts)
        for names in self.pool.map(fill, portion.blocks):
            self.not_finite.update(names)
        dtype = np.dtype(OPERAND_DTYPES[operand.dtype])
        return {
            rank: one.view(dtype).reshape(-1, *operand.shape[1:]) for rank, one in parts.items()
        }

    def _fill(
        self, portion: Portion, parts: Mapping[int, Bytes], at: tuple[PackPiece, int]
    ) -> set[str]:
        """Reads a block into its place. Returns the names of tensors that are not finite."""
        piece, block = at
        start = piece.start + block * piece.block_bytes - portion.start
        ends = dict.fromkeys(parts, start)
        not_finite: set[str] = set()
        for content in self.reader.contents(piece, block, not_finite, ranks=parts):
            for rank in content.ranks:
                stop = ends[rank] + content.array.nbytes
                parts[rank][ends[rank] : stop] = content.array.reshape(-1).view(np.uint8)
                ends[rank] = stop
        return not_finite


def zeros(operand: Operand, format_: Any, ranks: int) -> jax.Array:
    """An operand of zeros, made where it is to be."""
    shape = (ranks * operand.shape[0], *operand.shape[1:])
    make = jax.jit(
        partial(jnp.zeros, shape, np.dtype(OPERAND_DTYPES[operand.dtype])), out_shardings=format_
    )
    found: jax.Array = make()
    return found


def portion_writer(format_: Any) -> Callable[[jax.Array, jax.Array, int], jax.Array]:
    """A function `(operand, portion, start) -> operand` that writes in place, on every device.

    `portion` has a part of every rank as the operand has, `start` is its first row in each of them.
    """
    sharding = format_ if isinstance(format_, NamedSharding) else format_.sharding
    alike = NamedSharding(sharding.mesh, PartitionSpec())
    program = writing_program(format_)

    def write(whole: jax.Array, portion: jax.Array, start: int) -> jax.Array:
        row = jax.make_array_from_callback((), alike, lambda index: np.int32(start))
        written: jax.Array = program(whole, portion, row)
        return written

    return write


def writing_program(format_: Any) -> Any:
    """What `portion_writer` launches; `start` is an i32 on every device."""
    sharding = format_ if isinstance(format_, NamedSharding) else format_.sharding
    everywhere = PartitionSpec()

    def write(whole: jax.Array, portion: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice_in_dim(whole, portion, start, axis=0)

    mapped = jax.shard_map(
        write,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, sharding.spec, everywhere),
        out_specs=sharding.spec,
        check_vma=False,
    )
    return jax.jit(
        mapped,
        donate_argnums=0,
        in_shardings=(format_, format_, NamedSharding(sharding.mesh, everywhere)),
        out_shardings=format_,
    )
