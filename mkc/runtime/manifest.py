"""What a packed folder says about itself: the manifest of a finished one, the journal of others.

Both begin with the identity of the packing: everything that its bytes depend on. A folder is used
or continued only when its identity is the wanted one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from mkc.errors import PackedFolderError
from mkc.errors import PackedMismatchError
from mkc.ir.text import print_graph
from mkc.passes.pipeline import Lowered
from mkc.runtime.checkpoint import DTYPE_POLICY
from mkc.runtime.checkpoint import Checkpoint
from mkc.runtime.layout import PackedFile
from mkc.runtime.layout import PackLayout
from mkc.runtime.layout import PackPiece
from mkc.runtime.safetensors_file import Header

VERSION = 3  # of the form of a packed folder; another one is refused
MANIFEST = "manifest.json"
JOURNAL = "journal.jsonl"
CHECKSUM = "CRC-32 of the CRC-32s (4 bytes, little endian) of the piece's blocks"
SAMPLE_BYTES = 4096  # of a tensor; what one reading of a disk gives anyhow
SAMPLED_TENSORS = 256  # of a file at most, so that a checkpoint of many experts opens in seconds
# What the plan decides, and loading always compares, in this order.
PLAN_KEYS = ("version", "ranks", "dtype_policy", "drafter", "layout")


@dataclass(frozen=True, kw_only=True)
class PieceRecord:
    """A finished piece.

    Attributes:
      checksums: one per file that has the piece.
      not_finite: tensors in it with a NaN or an infinity, sorted.
    """

    checksums: tuple[int, ...]
    not_finite: tuple[str, ...]


def plan_identity(
    lowered: Lowered, layout: PackLayout, drafter: Sequence[str] = ()
) -> dict[str, Any]:
    """What the plan decides of the bytes; the keys are PLAN_KEYS.

    Args:
      drafter: see `drafter_identity`; empty for a kernel without drafts.
    """
    return {
        "version": VERSION,
        "ranks": lowered.program.ranks,
        "dtype_policy": DTYPE_POLICY,
        "drafter": list(drafter),
        "layout": list(layout.lines),
    }


def drafter_identity(name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """A drafter in lines, one for each entry of its config.json, so that one difference is shown.

    Batch and context, which the same weights serve, are no part of it.
    """
    return (name, *_entries("", config))


def _entries(prefix: str, config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in sorted(config.items()):
        if isinstance(value, Mapping):
            yield from _entries(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key} = {json.dumps(value)}"


def source_identity(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """The files that were read: name, size, and digests of header and sampled contents.

    When they were written is no part of it: a copy of a checkpoint is the same source.

    Raises:
      SafetensorsError: a file cannot be read.
    """
    return [
        {
            "file": one.path.name,
            "bytes": one.bytes,
            "header_sha256": one.digest,
            "contents_sha256": contents_digest(checkpoint, one),
        }
        for one in checkpoint.headers
    ]


def contents_digest(checkpoint: Checkpoint, header: Header) -> str:
    """SHA-256 of the first SAMPLE_BYTES of a file's tensors, or of SAMPLED_TENSORS spread over it.

    It tells checkpoints of one model from each other, not a single changed weight.

    Raises:
      SafetensorsError: the file cannot be read.
    """
    tensors = sorted(header.tensors.values(), key=lambda one: one.start)
    stride = max(1, -(-len(tensors) // SAMPLED_TENSORS))
    digest = sha256()
    for one in tensors[::stride]:
        sample = np.empty(min(one.bytes, SAMPLE_BYTES), np.uint8)
        checkpoint.read_into(one, 0, sample)
        digest.update(sample.tobytes())
    return digest.hexdigest()


def source_times(checkpoint: Checkpoint) -> list[int]:
    """When the files were last changed, ns. A packing is not continued over a changed file."""
    return [one.path.stat().st_mtime_ns for one in checkpoint.headers]


def refuse_difference(folder: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raises `PackedMismatchError` for the first difference, in the order of `expected`."""
    for key, wanted in expected.items():
        if found.get(key) != wanted:
            what, there, other = _first_difference(f"'{key}'", found.get(key), wanted)
            raise PackedMismatchError(
                path=folder, what=what, packed=_shown(there), expected=_shown(other)
            )


def _first_difference(what: str, one: object, other: object) -> tuple[str, object, object]:
    """Where two values that are not equal differ first, and both there."""
    if isinstance(one, list) and isinstance(other, list):
        pairs = enumerate(zip_longest(one, other), start=1)
        number, (first, second) = next(pair for pair in pairs if pair[1][0] != pair[1][1])
        return _first_difference(f"entry {number} of {what}", first, second)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        key = next(key for key in (*other, *one) if one.get(key) != other.get(key))
        return _first_difference(f"'{key}' of {what}", one.get(key), other.get(key))
    return what, one, other


def _shown(value: object) -> str:
    return "absent" if value is None else repr(value)


def manifest_document(
    identity: Mapping[str, Any],
    lowered: Lowered,
    checkpoint: Checkpoint,
    layout: PackLayout,
    records: Sequence[PieceRecord],
) -> dict[str, Any]:
    """The contents of manifest.json.

    Args:
      identity: of the plan, and `sources`.
    """
    return {
        **identity,
        "fingerprint": sha256(json.dumps(identity).encode()).hexdigest(),
        "model": lowered.program.name,
        "revision": checkpoint.revision,
        # These two say where the layout came from; a folder serves every graph and plan that have
        # the same layout, such as those for another batch.
        "graph_sha256": sha256(print_graph(lowered.steps.sharded.full).encode()).hexdigest(),
        "pipeline": lowered.pipeline,
        "files": [_file(one) for one in layout.files],
        "checksum": CHECKSUM,
        "pieces": [
            _piece(piece, record) for piece, record in zip(layout.pieces, records, strict=True)
        ],
        "not_finite": sorted({name for one in records for name in one.not_finite}),
    }


def _file(file: PackedFile) -> dict[str, Any]:
    return {
        "file": file.name,
        "bytes": file.bytes,
        "header_sha256": sha256(file.header).hexdigest(),
    }


def _piece(piece: PackPiece, record: PieceRecord) -> dict[str, Any]:
    return {
        "operand": piece.operand,
        "start": piece.start,
        "bytes": piece.bytes,
        "block_bytes": piece.block_bytes,
        "crc32": [f"{one:08x}" for one in record.checksums],
        "holds": piece.label,
    }


def read_manifest(folder: Path) -> Mapping[str, Any]:
    """The manifest. Raises `PackedFolderError` when the folder has none that can be read."""
    path = folder / MANIFEST
    if not path.is_file():
        finished = not (folder / JOURNAL).exists()
        raise PackedFolderError(
            path=folder,
            problem=f"has no {MANIFEST}" if finished else "is not finished",
            hint="Make it with mkc pack" if finished else "Run the same mkc pack again",
        )
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PackedFolderError(
            path=folder, problem=f"{MANIFEST} cannot be read ({error})", hint="Pack again"
        ) from error
    if not isinstance(document, dict):
        raise PackedFolderError(
            path=folder, problem=f"{MANIFEST} is not a JSON object", hint="Pack again"
        )
    return document


def write_manifest(folder: Path, document: Mapping[str, Any]) -> None:
    """Writes the manifest so that it is there whole or not at all."""
    scratch = folder / f"{MANIFEST}.new"
    with scratch.open("w", encoding="utf-8") as file:
        file.write(json.dumps(document, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, folder / MANIFEST)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """The folder's entries are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
