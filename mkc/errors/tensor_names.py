"""Many tensor names in few words, none of them lost."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Iterator
from functools import cache
from math import prod

type Box = tuple[tuple[int, ...], ...]  # the numbers at each place, in all combinations

NUMBER = None  # in a pattern, where the names have a number


def grouped_names(names: Iterable[str]) -> list[tuple[str, int]]:
    """Names that differ in their numbers as one, such as `layers.{0..3,7}.w`, and how many.

    A number is a whole part between dots. Written out, the groups are exactly the names: where not
    every combination of numbers is there, a pattern has several groups.
    """
    patterns: dict[tuple[str | None, ...], set[tuple[int, ...]]] = {}
    for name in names:
        parts = name.split(".")
        pattern = tuple([NUMBER if _is_number(part) else part for part in parts])
        numbers = tuple([int(part) for part in parts if _is_number(part)])
        patterns.setdefault(pattern, set()).add(numbers)
    return [
        (_written(pattern, box), prod(len(choices) for choices in box))
        for pattern, found in patterns.items()
        for box in _boxes(found)
    ]


@cache
def _is_number(part: str) -> bool:
    """True for digits that are printed as they were read: not for `07`."""
    return part.isascii() and part.isdecimal() and str(int(part)) == part


def _boxes(found: set[tuple[int, ...]]) -> Iterator[Box]:
    """Disjoint boxes that together are `found`; first numbers with the same rest share one."""
    if () in found:
        yield ()
        return
    rests: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in sorted(found):
        rests.setdefault(first, set()).add(tuple(rest))
    alike: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first, rest_set in rests.items():
        alike.setdefault(frozenset(rest_set), []).append(first)
    for rest_of_all, firsts in alike.items():
        for box in _boxes(set(rest_of_all)):
            yield (tuple(firsts), *box)


def _written(pattern: tuple[str | None, ...], box: Box) -> str:
    choices = iter(box)
    return ".".join(_choice(next(choices)) if part is NUMBER else part for part in pattern)


def _choice(numbers: tuple[int, ...]) -> str:
    """`7` for one number, `{0..2,7}` for several."""
    parts = number_runs(numbers)
    return parts[0] if len(numbers) == 1 else f"{{{','.join(parts)}}}"


def number_runs(numbers: Iterable[int]) -> list[str]:
    """Ascending numbers, consecutive ones together: `0..2`, `7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs]
