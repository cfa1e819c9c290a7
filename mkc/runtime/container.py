"""Packed weights: a folder of one safetensors file per rank, written by `pack`, mapped by
`load_packed`.

Packing streams: see `mkc.runtime.blocks`. It may be killed at any moment and continues when it is
called again with the same checkpoint and plan; the finished folder is the same, byte for byte.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections import deque
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from mkc.errors import DiskFullError
from mkc.errors import PackedDamagedError
from mkc.errors import PackedFolderError
from mkc.passes.pipeline import Lowered
from mkc.runtime.blocks import BlockReader
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.journal import Journal
from mkc.runtime.journal import open_journal
from mkc.runtime.layout import SHARED
from mkc.runtime.layout import PackedFile
from mkc.runtime.layout import PackLayout
from mkc.runtime.layout import PackPiece
from mkc.runtime.layout import pack_layout
from mkc.runtime.manifest import JOURNAL
from mkc.runtime.manifest import MANIFEST
from mkc.runtime.manifest import PieceRecord
from mkc.runtime.manifest import manifest_document
from mkc.runtime.manifest import plan_identity
from mkc.runtime.manifest import read_manifest
from mkc.runtime.manifest import refuse_difference
from mkc.runtime.manifest import source_identity
from mkc.runtime.manifest import source_times
from mkc.runtime.manifest import sync_folder
from mkc.runtime.manifest import write_manifest
from mkc.runtime.pack import OPERAND_DTYPES
from mkc.runtime.shards import Array

type Progress = Callable[[int], None]  # called with the bytes that were just finished

MOST_WORKERS = 4  # more threads wait for each other's memory and disk
PIECES_AHEAD = 4  # pieces whose blocks are queued, so that small pieces keep all workers busy
FLUSHED_BYTES = 128 << 20  # written before the disk is asked to begin with them
RECORD_BYTES = 256  # of a piece in journal and manifest, about
OURS = re.compile(rf"rank-\d+\.safetensors|{SHARED}|{MANIFEST}(\.new)?|{JOURNAL}")
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class PackResult:
    """What `pack` did.

    Attributes:
      bytes: size of the packed files.
      continued_bytes: how much of it an earlier call had finished.
      not_finite: tensors with a NaN or an infinity, sorted.
    """

    bytes: int
    continued_bytes: int
    not_finite: tuple[str, ...]


def pack(
    checkpoint: Checkpoint,
    lowered: Lowered,
    folder: Path,
    *,
    drafter: Sequence[str] = (),
    progress: Progress | None = None,
    workers: int | None = None,
) -> PackResult:
    """Packs a checkpoint for a plan, or continues to; does nothing when the folder is finished.

    Args:
      drafter: identity of the drafter in it, see `mkc.runtime.manifest.drafter_identity`.
      progress: called from several threads; what it raises ends the packing.
      workers: threads; None takes the processors, up to MOST_WORKERS.

    Raises:
      CheckpointMismatchError: the checkpoint is not one of the model; nothing was written.
      PackedFolderError: the folder holds something else or cannot be written.
      PackedMismatchError: the folder was packed, or begun, for something else.
      DiskFullError: there is no room; the same call continues later.
    """
    checkpoint.check(lowered.steps.sharded.full)
    layout = pack_layout(lowered)
    plan = plan_identity(lowered, layout, drafter)
    identity = {**plan, "sources": source_identity(checkpoint)}
    _check_folder(folder)
    if (folder / MANIFEST).exists():
        manifest = read_manifest(folder)
        refuse_difference(folder, manifest, identity)
        (folder / JOURNAL).unlink(missing_ok=True)  # of a packing killed at the very end
        return PackResult(
            bytes=layout.bytes,
            continued_bytes=layout.bytes,
            not_finite=tuple(manifest["not_finite"]),
        )
    journal_identity = {**identity, "source_times": source_times(checkpoint)}
    with _write_errors(folder, layout):
        folder.mkdir(parents=True, exist_ok=True)
        with open_journal(folder, journal_identity) as journal:
            packing = _Packing(
                reader=BlockReader(checkpoint=checkpoint, lowered=lowered),
                layout=layout,
                folder=folder,
                journal=journal,
                progress=progress or (lambda count: None),
                workers=workers or min(MOST_WORKERS, os.cpu_count() or 1),
            )
            continued = packing.run()
            records = [journal.records[number] for number in range(len(layout.pieces))]
            document = manifest_document(identity, lowered, checkpoint, layout, records)
            write_manifest(folder, document)
            (folder / JOURNAL).unlink()  # what a kill before this leaves is finished
    return PackResult(
        bytes=layout.bytes,
        continued_bytes=continued,
        not_finite=tuple(document["not_finite"]),
    )


def _check_folder(folder: Path) -> None:
    """Raises `PackedFolderError` for a folder with anything but a packing, finished or not."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise PackedFolderError(
            path=folder, problem="is a file", hint="Choose another folder with --out"
        )
    names = {one.name for one in folder.iterdir()}
    foreign = {name for name in names if not OURS.fullmatch(name)}
    if foreign or (names and not names & {MANIFEST, JOURNAL}):
        raise PackedFolderError(
            path=folder,
            problem=f"holds files mkc pack did not write: {min(foreign or names)}",
            hint="Choose a new or empty folder with --out",
        )


@contextmanager
def _write_errors(folder: Path, layout: PackLayout) -> Iterator[None]:
    """What the system says about writing, as errors of mkc."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskFullError(
                path=folder, needed_bytes=_missing_bytes(folder, layout), free_bytes=_free(folder)
            ) from error
        raise PackedFolderError(
            path=folder,
            problem=f"cannot be written ({error.strerror})",
            hint="Choose another folder with --out",
        ) from error


def _missing_bytes(folder: Path, layout: PackLayout) -> int:
    """Bytes that the folder still needs; blocks not written yet take no room."""
    paths = [folder / one.name for one in layout.files]
    held = sum(one.stat().st_blocks * 512 for one in paths if one.exists())
    notes = sum(map(len, layout.lines)) + RECORD_BYTES * len(layout.pieces)
    return max(0, layout.bytes - held) + notes


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder if folder.exists() else folder.parent).free


@dataclass(frozen=True, kw_only=True)
class _Packing:
    """One call of `pack` on a folder that is not finished."""

    reader: BlockReader
    layout: PackLayout
    folder: Path
    journal: Journal
    progress: Progress
    workers: int

    def run(self) -> int:
        """Writes all files. Returns the bytes that were there already."""
        missing, free = _missing_bytes(self.folder, self.layout), _free(self.folder)
        if missing > free:
            raise DiskFullError(path=self.folder, needed_bytes=missing, free_bytes=free)
        with ExitStack() as stack:
            files = {one.name: stack.enter_context(self._open(one)) for one in self.layout.files}
            self._drop_damaged(files)
            continued = sum(self._size(self.layout.pieces[one]) for one in self.journal.records)
            with ThreadPoolExecutor(1, thread_name_prefix="mkc-flush") as flusher:
                self._write_missing(files, flusher)
                flush(files.values())
        sync_folder(self.folder)
        return continued

    @contextmanager
    def _open(self, file: PackedFile) -> Iterator[int]:
        """A file at its full size with its header; what is in it stays."""
        descriptor = os.open(self.folder / file.name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, file.bytes)
            write_at(descriptor, np.frombuffer(file.header, np.uint8), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def _drop_damaged(self, files: Mapping[str, int]) -> None:
        """Forgets records whose bytes did not reach the disk."""
        for number, record in list(self.journal.records.items()):
            piece = self.layout.pieces[number]
            places = self.layout.files_of(piece)
            found = tuple(
                piece_checksum(files[one.name], one.tensors[piece.operand].start, piece)
                for one in places
            )
            if found == record.checksums:
                self.progress(self._size(piece))
            else:
                del self.journal.records[number]

    def _size(self, piece: PackPiece) -> int:
        return piece.bytes * len(self.layout.files_of(piece))

    def _write_missing(self, files: Mapping[str, int], flusher: ThreadPoolExecutor) -> None:
        """Writes pieces in order; several are in work, and are recorded in order.

        Meanwhile what was written goes to the disk, which would otherwise wait for the end.
        """
        flushed = flusher.submit(flush, ())
        written = 0
        missing = [n for n in range(len(self.layout.pieces)) if n not in self.journal.records]
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="mkc-pack")
        queued: deque[tuple[int, list[Future[_Block]]]] = deque()
        try:
            for number in missing:
                piece = self.layout.pieces[number]
                blocks = range(piece.blocks)
                queued.append(
                    (number, [pool.submit(self._write_block, files, piece, b) for b in blocks])
                )
                written += self._size(piece)
                if len(queued) > PIECES_AHEAD:
                    self._finish(*queued.popleft())
                if written > FLUSHED_BYTES and flushed.done():
                    flushed.result()
                    flushed = flusher.submit(flush, files.values())
                    written = 0
            while queued:
                self._finish(*queued.popleft())
            flushed.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _finish(self, number: int, futures: Sequence[Future[_Block]]) -> None:
        blocks = [one.result() for one in futures]
        ranks = range(len(blocks[0].checksums))
        checksums = tuple(combined([one.checksums[rank] for one in blocks]) for rank in ranks)
        names = tuple(sorted({name for one in blocks for name in one.not_finite}))
        self.journal.add(number, PieceRecord(checksums=checksums, not_finite=names))

    def _write_block(self, files: Mapping[str, int], piece: PackPiece, block: int) -> _Block:
        """Writes one block of all files that have it."""
        places = self.layout.files_of(piece)
        first = block * piece.block_bytes
        starts = [one.tensors[piece.operand].start + piece.start + first for one in places]
        checksums, written = [0] * len(places), [0] * len(places)
        not_finite: set[str] = set()
        for content in self.reader.contents(piece, block, not_finite):
            # Ranks that share a content have shared all of the block so far.
            checksum = crc32(content.array, checksums[content.ranks[0]])
            for rank in content.ranks:
                write_at(files[places[rank].name], content.array, starts[rank] + written[rank])
                written[rank] += content.array.nbytes
                checksums[rank] = checksum
        size = min(piece.block_bytes, piece.bytes - first)
        assert set(written) == {size}, f"{piece.label}, block {block}: {written} of {size} bytes"
        self.progress(sum(written))
        return _Block(checksums=tuple(checksums), not_finite=frozenset(not_finite))


@dataclass(frozen=True, kw_only=True)
class _Block:
    """A block that was written; the fields are those of `PieceRecord`."""

    checksums: tuple[int, ...]
    not_finite: frozenset[str]


def flush(descriptors: Collection[int]) -> None:
    """What was written to the files is on the disk."""
    for descriptor in descriptors:
        os.fsync(descriptor)


def write_at(descriptor: int, array: Array, offset: int) -> None:
    """Writes a contiguous array."""
    view = memoryview(array.reshape(-1).view(np.uint8))
    while len(view):
        count = os.pwrite(descriptor, view, offset)
        if count == 0:  # no file system should; trying for ever would be the worst answer
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[count:]
        offset += count


def piece_checksum(descriptor: int, tensor_start: int, piece: PackPiece) -> int:
    """The checksum of a piece as it is in a file."""
    checksums = []
    for at in range(0, piece.bytes, piece.block_bytes):
        size = min(piece.block_bytes, piece.bytes - at)
        checksums.append(crc32(os.pread(descriptor, size, tensor_start + piece.start + at)))
    return combined(checksums)


def combined(checksums: Sequence[int]) -> int:
    """The checksum of a piece from those of its blocks, see `mkc.runtime.manifest.CHECKSUM`."""
    return crc32(b"".join(one.to_bytes(4, "little") for one in checksums))


@dataclass(frozen=True, kw_only=True)
class PackedWeights:
    """A finished folder that fits a plan; nothing of it is in memory."""

    folder: Path
    layout: PackLayout
    manifest: Mapping[str, Any]

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the packed operands, sorted."""
        return tuple(sorted({name for one in self.layout.files for name in one.tensors}))

    def operand(self, name: str) -> list[Array]:
        """An operand's part of every rank, mapped read-only; one part where all ranks share it."""
        return [_mapped(self.folder, one, name) for one in self.layout.files if name in one.tensors]

    def verify(self, progress: Progress | None = None) -> None:
        """Reads everything and compares checksums. Raises `PackedDamagedError`."""
        with ExitStack() as stack:
            for file in self.layout.files:
                path = self.folder / file.name
                opened = stack.enter_context(path.open("rb"))
                for piece, entry in zip(self.layout.pieces, self.manifest["pieces"], strict=True):
                    places = self.layout.files_of(piece)
                    if file not in places:
                        continue
                    start = file.tensors[piece.operand].start
                    found = piece_checksum(opened.fileno(), start, piece)
                    if f"{found:08x}" != entry["crc32"][places.index(file)]:
                        raise PackedDamagedError(
                            path=path, problem=f"the checksum of {piece.label} is wrong"
                        )
                    if progress is not None:
                        progress(piece.bytes)


def load_packed(
    folder: Path,
    lowered: Lowered,
    drafter: Sequence[str] = (),
    *,
    checkpoint: Checkpoint | None = None,
) -> PackedWeights:
    """Opens a packed folder for a plan; reads headers, and samples of the checkpoint, only.

    Args:
      drafter: as for `pack`.
      checkpoint: what it has to be packed from; None takes any.

    Raises:
      PackedFolderError: it is not a finished packed folder.
      PackedMismatchError: it was packed for something else.
      PackedDamagedError: a file is not as long as it was or has another header.
    """
    layout = pack_layout(lowered)
    manifest = read_manifest(folder)
    expected = plan_identity(lowered, layout, drafter)
    if checkpoint is not None:
        expected["sources"] = source_identity(checkpoint)
    refuse_difference(folder, manifest, expected)
    for file in layout.files:
        path = folder / file.name
        try:
            with path.open("rb") as opened:
                size, header = os.fstat(opened.fileno()).st_size, opened.read(len(file.header))
        except OSError as error:
            raise PackedDamagedError(
                path=path, problem=f"cannot be read ({error.strerror})"
            ) from error
        if size != file.bytes:
            raise PackedDamagedError(path=path, problem=f"has {size} bytes and had {file.bytes}")
        if header != file.header:
            raise PackedDamagedError(path=path, problem="has another header than was written")
    return PackedWeights(folder=folder, layout=layout, manifest=manifest)


def _mapped(folder: Path, file: PackedFile, name: str) -> Array:
    tensor = file.tensors[name]
    dtype = np.dtype(OPERAND_DTYPES[tensor.operand.dtype])
    mapped = np.memmap(
        folder / file.name,
        np.uint8,
        "r",
        offset=tensor.start,
        shape=(int(np.prod(tensor.operand.shape)) * dtype.itemsize,),
    )
    array: Array = np.asarray(mapped).view(dtype).reshape(tensor.operand.shape)
    return array
