"""Task files, and servers that do not answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mkc.errors.base import MkcError
from mkc.errors.base import Place
from mkc.errors.base import sentence


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line of a file, counted from 1, and what is wrong with it."""

    number: int
    problem: str


class TaskFileError(MkcError):
    """A file of tasks that cannot be read, or has lines that are no tasks: all of them."""

    code: ClassVar[str] = "E360"

    def __init__(self, *, path: Place, problem: str, lines: Sequence[BadLine] = ()) -> None:
        self.lines = tuple(lines)
        listed = "".join(f"\n  line {one.number}: {one.problem}" for one in self.lines)
        super().__init__(
            f"{path}: {problem}; expected one JSON object per line with 'id', 'task', 'messages', "
            f"'check' and 'answer'. docs/bench.md describes them. Correct the file.{listed}"
        )


class ServerAnswerError(MkcError):
    """A server that cannot be reached, refuses, or answers something that is no chat completion."""

    code: ClassVar[str] = "E361"

    def __init__(self, *, url: str, problem: str, hint: str) -> None:
        super().__init__(
            f"{url}: {problem}; expected an answer of the OpenAI chat completions API. "
            f"{sentence(hint)}"
        )
