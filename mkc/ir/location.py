"""Finds the author's line: the innermost frame of the call stack outside mkc."""

from __future__ import annotations

from collections.abc import Callable
from os import getcwd
from os import sep
from os.path import dirname
from sys import _getframe
from types import FrameType
from typing import Any

from mkc.ir.graph import Location

_PACKAGE = dirname(dirname(__file__)) + sep


class Places:
    """Makes one object per line, and looks each one up cheaply: tracing asks for every op."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Location] = {}

    def author(self) -> Location:
        """The author's line that is being run."""
        frame = _author_frame()
        place = (frame.f_code.co_filename, frame.f_lineno)
        found = self._known.get(place)
        if found is None:
            found = self._known[place] = _location(*place)
        return found


def author_location() -> Location:
    """The author's line that is being run."""
    frame = _author_frame()
    return _location(frame.f_code.co_filename, frame.f_lineno)


def definition(function: Callable[..., Any]) -> Location | None:
    """Where a function is defined; None for callables without code of their own."""
    code = getattr(function, "__code__", None)
    return None if code is None else _location(code.co_filename, code.co_firstlineno)


def _author_frame() -> FrameType:
    frame = _getframe(2)
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _location(file: str, line: int) -> Location:
    """The path is relative below the working directory: short, and the same in every clone."""
    return Location(file=file.removeprefix(getcwd() + sep), line=line)
