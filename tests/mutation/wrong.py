"""Mistakes in what a kernel computes: no copy moves, so no proof of a schedule sees them.

A mistake is a function in another one's place. The lists of kinds are in `docs/verifier.md`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import getsource
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "verifier.md"
SUPPORT = "mkc.codegen_pallas.support"

type Function = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A mistake.

    Attributes:
      name: of the function, in `module`.
      instead: what takes its place; None changes nothing.
    """

    story: str
    name: str = ""
    module: str = SUPPORT
    instead: Callable[[Function], Function] | None = None

    def make(self, patch: pytest.MonkeyPatch) -> None:
        """The functions of a kernel are found in the package, those that they call beside them."""
        if self.instead is None:
            return
        function = getattr(import_module(self.module), self.name)
        wrong = self.instead(function)
        for module in {self.module, SUPPORT}:
            if getattr(import_module(module), self.name, None) is function:
                patch.setattr(import_module(module), self.name, wrong)


def rewritten(*edits: tuple[str, str]) -> Callable[[Function], Function]:
    """The function with other words in its text, each of which stands there once."""

    def of(function: Function) -> Function:
        text = dedent(getsource(function))
        for old, new in edits:
            assert text.count(old) == 1, f"{old!r} stands there {text.count(old)} times"
            text = text.replace(old, new)
        names = dict(function.__globals__)
        exec(compile(text, function.__name__, "exec"), names)
        return names[function.__name__]  # type: ignore[no-any-return]

    return of


@dataclass(frozen=True, kw_only=True)
class Changed:
    """Scalars that are read with a change."""

    scalars: Any
    change: Callable[[Any, Any], Any]

    @property
    def shape(self) -> Any:
        return self.scalars.shape

    def __getitem__(self, index: Any) -> Any:
        return self.change(self.scalars, index)


def changed(
    argument: str | int, change: Callable[[Any, Any], Any]
) -> Callable[[Function], Function]:
    """The function with one of its arguments, scalars, changed."""

    def of(function: Function) -> Function:
        def wrong(*arguments: Any, **named: Any) -> Any:
            given = list(arguments)
            if isinstance(argument, int):
                given[argument] = Changed(scalars=given[argument], change=change)
            else:
                named[argument] = Changed(scalars=named[argument], change=change)
            return function(*given, **named)

        return wrong

    return of


def result(change: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """The function with another result."""
    return lambda function: lambda *given, **named: change(function(*given, **named))


def names(mistakes: Iterable[str], quick: Iterable[str]) -> list[Any]:
    """For `parametrize`: all but the quick ones are left to the long tests."""
    return [one if one in quick else pytest.param(one, marks=pytest.mark.long) for one in mistakes]


def table(heading: str, mistakes: Mapping[str, Wrong]) -> str:
    """As it stands on the page."""
    lines = [f"| {heading} |", "|---|"]
    lines += [f"| {one.story} |" for one in mistakes.values()]
    return "\n".join(lines) + "\n"


def on_the_page(mark: str) -> str:
    """What stands between a mark and its end."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    return text[text.index(begin) + len(begin) : text.index(end)]
