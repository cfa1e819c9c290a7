"""The journal of a packing that is under way: one JSON line for its identity, one for each piece.

A line counts when it is whole, so a kill in the middle of one loses that piece only. What a record
claims is checked against the files before it is believed.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from io import FileIO
from pathlib import Path
from typing import Any

from mkc.errors import PackedFolderError
from mkc.runtime.manifest import JOURNAL
from mkc.runtime.manifest import PieceRecord
from mkc.runtime.manifest import refuse_difference


@dataclass(frozen=True, kw_only=True)
class Journal:
    """An open, locked journal.

    Attributes:
      records: finished pieces by their number; the last record of a piece counts.
    """

    file: FileIO
    records: dict[int, PieceRecord] = field(default_factory=dict)

    def begin(self, identity: Mapping[str, Any]) -> None:
        """Writes the first line."""
        self._line(identity)

    def add(self, number: int, record: PieceRecord) -> None:
        """Records a piece as finished."""
        self._line(
            {
                "piece": number,
                "checksums": list(record.checksums),
                "not_finite": list(record.not_finite),
            }
        )
        self.records[number] = record

    def _line(self, document: Mapping[str, Any]) -> None:
        line = json.dumps(document).encode() + b"\n"
        while line:
            line = line[self.file.write(line) :]


@contextmanager
def open_journal(folder: Path, identity: Mapping[str, Any]) -> Iterator[Journal]:
    """Opens the folder's journal, or begins one, and holds its lock.

    Raises:
      PackedMismatchError: it belongs to another packing.
      PackedFolderError: another process is packing into the folder.
    """
    with FileIO(folder / JOURNAL, "a+") as file:
        file.seek(0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PackedFolderError(
                path=folder,
                problem="another process is packing into it",
                hint="Wait for it, or choose another folder with --out",
            ) from error
        text = file.read()
        lines = _whole_lines(text)
        file.truncate(sum(len(line) + 1 for line in text.split(b"\n")[: len(lines)]))
        if lines:
            refuse_difference(folder, lines[0], identity)
        records = {
            line["piece"]: PieceRecord(
                checksums=tuple(line["checksums"]), not_finite=tuple(line["not_finite"])
            )
            for line in lines[1:]
        }
        journal = Journal(file=file, records=records)
        if not lines:
            journal.begin(identity)
        yield journal


def _whole_lines(text: bytes) -> list[dict[str, Any]]:
    """The lines up to the first that is torn."""
    found = []
    for line in text.split(b"\n")[:-1]:
        try:
            document = json.loads(line)
        except ValueError:
            break
        if not isinstance(document, dict):
            break
        found.append(document)
    return found
