"""The legality lint: what works in interpret mode and fails on a chip, as early errors."""

from __future__ import annotations

from mkc.schedule.lint.code import lint_source
from mkc.schedule.lint.code import lint_traced
from mkc.schedule.lint.program import lint_program
from mkc.schedule.lint.rules import LINTS

__all__ = ["LINTS", "lint_program", "lint_source", "lint_traced"]
