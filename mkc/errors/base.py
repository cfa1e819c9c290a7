"""What all user errors have in common."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

# Anything whose `str` is a place in the user's input: an `mkc.ir.graph.Location`, a path, text.
type Place = object

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


class MkcError(Exception):
    """Base of all user errors; catch it to report any of them.

    Attributes:
      code: stable identifier of the kind of error.
      message: the whole text, without the code.
    """

    code: ClassVar[str] = "E000"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def report(self) -> str:
        """The form for a terminal: `error[E101]: message`."""
        return f"error[{self.code}]: {self.message}"


def at(location: Place | None) -> str:
    return f"{location}: " if location is not None else ""


def size(count: int) -> str:
    """Bytes in the largest unit that they fill: `6.29 MiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"


def sentence(text: str) -> str:
    """`text` with a full stop."""
    return text if text.endswith((".", "!", "?")) else f"{text}."


def listed(label: str, names: Iterable[str]) -> str:
    """` label: a, b.` sorted, or nothing when there are no names."""
    listed = ", ".join(sorted(names))
    return f" {label[0].upper()}{label[1:]}: {listed}." if listed else ""
