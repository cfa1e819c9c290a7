"""Finds the author's line: the innermost frame of the call stack outside mkc."""

from __future__ import annotations

from collections.abc import Callable
from os import sep
from os.path import dirname
from sys import _getframe
from types import FrameType
from typing import Any

from mkc.ir.graph import Location

_PACKAGE = dirname(dirname(__file__)) + sep
_PACKAGE_FILE = "__init__.py"


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
            found = self._known[place] = _location(frame)
        return found


def author_location() -> Location:
    """The author's line that is being run."""
    return _location(_author_frame())


def definition(function: Callable[..., Any]) -> Location | None:
    """Where a function is defined; None for callables without code of their own."""
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    module = str(getattr(function, "__module__", ""))
    return Location(file=portable_path(code.co_filename, module), line=code.co_firstlineno)


def _author_frame() -> FrameType:
    frame = _getframe(2)
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _location(frame: FrameType) -> Location:
    module = str(frame.f_globals.get("__name__", ""))
    return Location(file=portable_path(frame.f_code.co_filename, module), line=frame.f_lineno)


def portable_path(file: str, module: str) -> str:
    """A file's path below the folder that its module is imported from.

    It stands in the outputs, so it depends neither on the current directory nor on the machine:
    `family/decoder.py` for the module `family.decoder`, `mine.py` for a file of its own.
    """
    words = file.split(sep)
    named = module.split(".")
    named = [*named, _PACKAGE_FILE] if words[-1] == _PACKAGE_FILE else [*named[:-1], words[-1]]
    return "/".join(named) if words[-len(named) :] == named else words[-1]
