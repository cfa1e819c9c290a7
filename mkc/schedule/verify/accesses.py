"""Everything that a traced kernel touches, down to the element: an edited kernel beside another.

What the verifier knows of a kernel leaves out what cannot move a copy, rows of activations and
scalars. Between a generated kernel and an edited one those must agree too, or the proof of the one
says nothing about the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

type Part = tuple[object, ...]
"""Ranges of an array, and of a scalar its value where that is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Attributes:
    kind: READ, WRITE, or what orders the kernel: a copy, a wait, a signal.
    array: name, empty for what orders.
    part: of the array, or of everything that takes part.
    """

    kind: str
    array: str
    part: Part


READ, WRITE = "reads", "writes"

type Steps = list[tuple[set[Part], Part | None]]
"""What is read before each write; at the end what is read behind the last one."""

type Gap = dict[str, Steps]
"""By array, between two copies or waits."""


def access_difference(expected: Sequence[Access], found: Sequence[Access]) -> str | None:
    """The first thing in which a kernel touches something else; None when nothing differs.

    Copies, waits and signals are the same, one by one. Between two of them every array is written
    alike in the same order, and nothing is read from it that was not read between the same writes.
    """
    both = zip(_gaps(expected), _gaps(found), strict=False)  # the last one of each has no order
    for number, ((mine, order), (theirs, other)) in enumerate(both):
        for array in dict.fromkeys((*mine, *theirs)):
            problem = _different(mine.get(array, []), theirs.get(array, []))
            if problem:
                return f"before copy or wait {number} it {problem[0]} {array}{problem[1]}"
        if order != other:
            return f"copy or wait {number} is another"
    return None


def _gaps(accesses: Sequence[Access]) -> Iterator[tuple[Gap, Access | None]]:
    gap: Gap = {}
    for one in accesses:
        if one.kind not in (READ, WRITE):
            yield gap, one
            gap = {}
            continue
        steps = gap.setdefault(one.array, [(set(), None)])
        reads, _ = steps[-1]
        if one.kind == READ:
            reads.add(one.part)
        else:
            steps[-1] = (reads, one.part)
            steps.append((set(), None))
    yield gap, None


def _different(expected: Steps, found: Steps) -> tuple[str, str] | None:
    empty: tuple[set[Part], Part | None] = (set(), None)
    for (reads, write), (others, other) in zip_longest(expected, found, fillvalue=empty):
        if not others <= reads:
            return READ, _text(min(others - reads, key=str))
        if write != other:
            return "does not write" if other is None else WRITE, _text(other or write)
    return None


def _text(part: Part | None) -> str:
    return "".join(f" {one}" for one in part or ())
