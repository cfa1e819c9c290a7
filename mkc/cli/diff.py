"""`mkc diff`: what changed between two plans, and what that does to the predicted time."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mkc.cli.output import json_text
from mkc.plan.compare import Change
from mkc.plan.compare import Comparison
from mkc.plan.compare import compare
from mkc.plan.folder import read_folder

ABSENT = "-"
HEADINGS = (
    ("request", "Request"),
    ("decisions", "Decisions"),
    ("loads", "Loads"),
    ("buffers", "Buffers in VMEM"),
)


def diff_command(
    before: Annotated[Path, typer.Argument(help="Folder that mkc compile wrote.")],
    after: Annotated[Path, typer.Argument(help="Another one.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Compare two plans: decisions, loads, buffers and predicted times."""
    comparison = compare(read_folder(before), read_folder(after))
    if json:
        typer.echo(json_text(asdict(comparison)), nl=False)
        return
    _print(Console(highlight=False), comparison)


def _print(console: Console, comparison: Comparison) -> None:
    same = True
    for key, heading in HEADINGS:
        changes: tuple[Change, ...] = getattr(comparison, key)
        if changes:
            same = False
            console.print(_table(heading, changes))
            console.print()
    if same:
        console.print("The plans are the same.\n")
    console.print(_table("Predicted times", comparison.predicted))


def _table(heading: str, changes: tuple[Change, ...]) -> Table:
    measured = any(one.unit for one in changes)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(heading, overflow="fold")
    for name in ("before", "after"):
        table.add_column(name, overflow="fold", justify="right" if measured else "left")
    if measured:
        table.add_column("difference", justify="right")
    for one in changes:
        cells = [one.name, _text(one.before, one.unit), _text(one.after, one.unit)]
        table.add_row(*map(escape, [*cells, _difference(one)] if measured else cells))
    return table


def _text(value: str | float | None, unit: str) -> str:
    if value is None:
        return ABSENT
    if not unit or isinstance(value, str):
        return str(value)
    return f"{value:,.1f} {unit}" if unit == "us" else f"{value:,.0f} {unit}"


def _difference(change: Change) -> str:
    if isinstance(change.before, str) or isinstance(change.after, str):
        return ""
    difference = (change.after or 0) - (change.before or 0)
    return f"{difference:+,.1f} {change.unit}" if change.unit == "us" else f"{difference:+,.0f}"
