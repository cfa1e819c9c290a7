"""Where every byte of packed weights goes: files, tensors in them, and the pieces to write.

The layout follows from a graph and its plan, and only from what decides bytes: the same folder
serves every batch, context and ring for which the matrices, their order and their division are the
same. It has a text form, one line for each thing packed, that is compared line by line.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod

from mkc.ir.graph import Param
from mkc.ir.types import DType
from mkc.passes.pipeline import Lowered
from mkc.passes.sharding import ShardedGraph
from mkc.passes.sharding import Sharding
from mkc.runtime.pack import executions
from mkc.runtime.pack import expert_plan
from mkc.runtime.pack import narrow_phase
from mkc.runtime.safetensors_file import header_bytes
from mkc.runtime.shards import Run
from mkc.runtime.shards import holds_zeros
from mkc.runtime.shards import shard_runs
from mkc.schedule.program import TAPE_LANES
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import Operand
from mkc.schedule.program import Piece
from mkc.schedule.program import Program
from mkc.schedule.stream_plans import PageRow

ELEMENT = 2  # bytes of bf16
ROW_BYTES = TAPE_LANES * ELEMENT
PIECE_BYTES = 64 << 20  # of one rank: what a kill loses, and what is checked at once
TABLE_BLOCK_BYTES = 4 << 20
WEIGHT_ROLES = ("tape", "page", "narrow", "matrix", "experts", "table")
STORED = {DType.BF16: "BF16", DType.F32: "F32", DType.E2M1X2: "I8"}
SHARED = "shared.safetensors"  # what all ranks have alike


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows `start` .. `stop` of a checkpoint tensor."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class LocalMatrix:
    """One rank's weight [N, K] in terms of the checkpoint.

    Attributes:
      rows: the rows of the checkpoint that are its rows, in order.
      columns: of these rows the columns it has, None for all.
      zeros: another rank holds the weights, this one has zeros.
    """

    rows: tuple[Source, ...]
    columns: tuple[Run, ...] | None
    zeros: bool


@dataclass(frozen=True, kw_only=True)
class PackPiece:
    """A run of bytes of an operand, of all ranks, that is written and recorded as one.

    Attributes:
      operand: name of the operand.
      label: for people.
      start, bytes: place in one rank's operand.
      block_bytes: it is written, and its checksum taken, in blocks of this size.
    """

    operand: str
    label: str
    start: int
    bytes: int
    block_bytes: int

    @property
    def blocks(self) -> int:
        return -(-self.bytes // self.block_bytes)


@dataclass(frozen=True, kw_only=True)
class TapePiece(PackPiece):
    """Column blocks `first_block` .. of one matrix of the tape.

    Attributes:
      full_columns: columns of the checkpoint's rows.
      matrices: of every rank, the whole matrix.
    """

    first_block: int
    full_columns: int
    matrices: tuple[LocalMatrix, ...]


@dataclass(frozen=True, kw_only=True)
class ItemPiece(PackPiece):
    """Items of a page, narrow or matrix stream, or experts; each is a block.

    Attributes:
      first: number of the first one.
    """

    first: int


@dataclass(frozen=True, kw_only=True)
class TablePiece(PackPiece):
    """Rows of an embedding table, zeros behind its last row.

    Attributes:
      tensor: checkpoint tensor.
      tensor_bytes: its size in bf16.
    """

    tensor: str
    tensor_bytes: int


@dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """An operand in its file.

    Attributes:
      start: offset of its first byte.
    """

    operand: Operand
    start: int


@dataclass(frozen=True, kw_only=True)
class PackedFile:
    """A file of the folder, the same for all ranks or of one rank.

    Attributes:
      header: its first bytes.
      bytes: its size.
    """

    name: str
    header: bytes
    bytes: int
    tensors: Mapping[str, PackedTensor]


@dataclass(frozen=True, kw_only=True)
class PackLayout:
    """Everything that is packed.

    Attributes:
      shared: the file of the tables, None when there are none.
      ranks: the file of every rank.
      pieces: in the order in which they are written.
      lines: the text form.
    """

    shared: PackedFile | None
    ranks: tuple[PackedFile, ...]
    pieces: tuple[PackPiece, ...]
    lines: tuple[str, ...]

    def files_of(self, piece: PackPiece) -> tuple[PackedFile, ...]:
        """The files that hold a piece."""
        if self.shared is not None and piece.operand in self.shared.tensors:
            return (self.shared,)
        return self.ranks

    @property
    def files(self) -> tuple[PackedFile, ...]:
        return (*self.ranks, *([] if self.shared is None else [self.shared]))

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(one.bytes for one in self.files)


def pack_layout(lowered: Lowered) -> PackLayout:
    """The layout of a plan's weights."""
    program = lowered.program
    weights = [one for one in program.operands if one.role in WEIGHT_ROLES]
    tables = [one for one in weights if one.role == "table"]
    local = [one for one in weights if one.role != "table"]
    pieces = list(_pieces(program, lowered.steps.sharded))
    for operand in weights:
        covered = sum(one.bytes for one in pieces if one.operand == operand.name)
        planned = prod(operand.shape) * operand.dtype.bytes
        assert covered == planned, f"{operand.name}: {covered} bytes packed, {planned} planned"
    return PackLayout(
        shared=_file(SHARED, tables) if tables else None,
        ranks=tuple(_file(rank_file(rank), local) for rank in range(program.ranks)),
        pieces=tuple(pieces),
        lines=tuple(_lines(lowered)),
    )


def rank_file(rank: int) -> str:
    """File name of one rank."""
    return f"rank-{rank:03}.safetensors"


def _file(name: str, operands: Sequence[Operand]) -> PackedFile:
    header = header_bytes({one.name: (STORED[one.dtype], one.shape) for one in operands})
    start = len(header)
    tensors = {}
    for one in operands:
        tensors[one.name] = PackedTensor(operand=one, start=start)
        start += prod(one.shape) * one.dtype.bytes
    return PackedFile(name=name, header=header, bytes=start, tensors=tensors)


def _pieces(program: Program, sharded: ShardedGraph) -> Iterator[PackPiece]:
    """All pieces: the tape in its order, then tables, pages and narrow weights."""
    yield from _tape_pieces(program, sharded)
    for operand in program.operands:
        if operand.role == "table":
            yield from _table_pieces(sharded, operand)
        elif operand.role in ("page", "narrow", "matrix", "experts"):
            item = prod(operand.shape[1:]) * operand.dtype.bytes
            together = max(1, PIECE_BYTES // item)
            for first in range(0, operand.shape[0], together):
                count = min(together, operand.shape[0] - first)
                yield ItemPiece(
                    operand=operand.name,
                    label=f"{operand.name} items {first} to {first + count}",
                    start=first * item,
                    bytes=count * item,
                    block_bytes=item,
                    first=first,
                )


def _tape_pieces(program: Program, sharded: ShardedGraph) -> Iterator[TapePiece]:
    tape = next(one for one in program.operands if one.role == "tape")
    start = 0
    for phase, instance in executions(program.body):
        if not isinstance(phase, MatmulPhase):
            continue
        block = phase.K * ROW_BYTES
        together = max(1, PIECE_BYTES // block)
        matrices = tuple(
            local_matrix(sharded, phase.pieces, instance, rank) for rank in range(program.ranks)
        )
        for first in range(0, phase.blocks, together):
            count = min(together, phase.blocks - first)
            yield TapePiece(
                operand=tape.name,
                label=f"{matrices[0].rows[0].tensor} blocks {first} to {first + count}",
                start=start,
                bytes=count * block,
                block_bytes=block,
                first_block=first,
                full_columns=sharded.full.params[phase.pieces[0].param].type.shape[1],
                matrices=matrices,
            )
            start += count * block


def local_matrix(
    sharded: ShardedGraph, pieces: tuple[Piece, ...], instance: int, rank: int
) -> LocalMatrix:
    """One rank's fused weight of one execution of a matmul."""
    rows: list[Source] = []
    columns: set[tuple[Run, ...] | None] = set()
    zeros: set[bool] = set()
    for piece in pieces:
        param, sharding = sharded.full.params[piece.param], sharded.params[piece.param]
        tensor = param.tensor_name(instance)
        shard = sharding.shard_of(rank)
        zeros.add(holds_zeros(sharding, rank))
        divides_rows = sharding.axis == 0
        columns.add(shard_runs(param.type, sharding, shard) if sharding.axis == 1 else None)
        runs = (
            shard_runs(param.type, sharding, shard)
            if divides_rows
            else (Run(start=0, stop=param.type.shape[0]),)
        )
        rows += [Source(tensor=tensor, start=run.start, stop=run.stop) for run in runs]
    assert len(columns) == 1 and len(zeros) == 1, f"{pieces}: divided in several ways"
    return LocalMatrix(rows=_joined(rows), columns=columns.pop(), zeros=zeros.pop())


def _joined(rows: list[Source]) -> tuple[Source, ...]:
    """The same with neighbours joined; on one rank all parts of an axis lie side by side."""
    joined: list[Source] = []
    for row in rows:
        last = joined[-1] if joined else None
        if last is not None and (last.tensor, last.stop) == (row.tensor, row.start):
            joined[-1] = Source(tensor=row.tensor, start=last.start, stop=row.stop)
        else:
            joined.append(row)
    return tuple(joined)


def _table_pieces(sharded: ShardedGraph, operand: Operand) -> Iterator[TablePiece]:
    param = sharded.full.params[operand.param]
    row = operand.shape[1] * ELEMENT
    total = operand.shape[0] * row
    block = max(1, TABLE_BLOCK_BYTES // row) * row
    together = max(1, PIECE_BYTES // block) * block
    for start in range(0, total, together):
        yield TablePiece(
            operand=operand.name,
            label=f"{operand.name} from row {start // row}",
            start=start,
            bytes=min(together, total - start),
            block_bytes=block,
            tensor=param.tensor_name(0),
            tensor_bytes=param.type.elements * ELEMENT,
        )


def _lines(lowered: Lowered) -> Iterator[str]:
    """The text form: everything that decides a byte, names of phases and buffers left out."""
    program, sharded = lowered.program, lowered.steps.sharded
    for phase, instance in executions(program.body):
        if isinstance(phase, MatmulPhase):
            weights = " + ".join(_weight(sharded, one.param, instance) for one in phase.pieces)
            yield f"tape K={phase.K} blocks={phase.blocks}: {weights}"
    for operand in program.operands:
        place = f"{operand.name} {operand.dtype}{list(operand.shape)}"
        if operand.role == "table":
            yield f"table {place}: {_weight(sharded, operand.param, 0)}"
        elif operand.role == "experts":
            plan = expert_plan(program, operand.name)
            weights = " + ".join(_weight(sharded, key, None) for key in plan.params)
            yield f"experts {place} {plan.groups} groups of {plan.slices}: {weights}"
        elif operand.role == "matrix":
            yield f"matrix {place}: {_weight(sharded, operand.param, None)}"
        elif operand.role == "narrow":
            phase = narrow_phase(program, operand.name)
            weights = " + ".join(_weight(sharded, one.param, None) for one in phase.pieces)
            yield f"narrow {place} K={phase.K}: {weights}"
        elif operand.role == "page":
            yield f"page {place}"
            stream = next(one for one in program.streams if one.array == operand.name)
            for row in program.pages[stream.name]:
                yield f"page {operand.name} row {row.row}: {_vector(sharded, row)}"


def _vector(sharded: ShardedGraph, row: PageRow) -> str:
    if not row.param:
        values = ",".join(value.hex() for value in row.constant)
        return f"{row.length} constants {sha256(values.encode()).hexdigest()}"
    tap = "" if row.tap is None else f" tap {row.tap}"
    index = f" at {list(row.index)}" if row.index else ""
    return f"{_weight(sharded, row.param, None)}{tap}{index}"


def _weight(sharded: ShardedGraph, key: str, instance: int | None) -> str:
    """`name bf16[...] divided ...` of one instance, or of all of them."""
    param = sharded.full.params[key]
    return f"{_names(param, instance)} {param.type}{_divided(param, sharded.params[key])}"


def _names(param: Param, instance: int | None) -> str:
    if instance is not None:
        return param.tensor_name(instance)
    indices = ",".join(str(one) for one in param.indices)
    return f"{param.pattern} of {indices}" if indices else param.pattern


def _divided(param: Param, sharding: Sharding) -> str:
    if sharding.axis is None:
        return ""
    parts = "+".join(f"{one.count}x{one.unit}" for one in param.type.axes[sharding.axis].parts)
    once = " once" if sharding.once else ""
    copies = f" copied {sharding.copies} times" if sharding.copies > 1 else ""
    return f" axis {sharding.axis} ({parts}) in {sharding.shards} shards{copies}{once}"
