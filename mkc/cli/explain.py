"""`mkc explain`: the decisions of a plan, heaviest first, or one of them in full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mkc.cli.output import json_text
from mkc.plan.folder import read_folder
from mkc.plan.weights import Weighed
from mkc.plan.weights import find_decisions
from mkc.plan.weights import weigh

MEGABYTE = 1_000_000


def explain_command(
    folder: Annotated[Path, typer.Argument(help="Folder that mkc compile wrote.")],
    name: Annotated[
        str | None, typer.Argument(help="A decision, a phase, or a part of such a name.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
) -> None:
    """List a plan's decisions by weight, or explain one."""
    plan = read_folder(folder)
    found = weigh(plan) if name is None else find_decisions(plan, name)
    if json:
        typer.echo(json_text({"decisions": [_document(one) for one in found]}), nl=False)
        return
    console = Console(highlight=False)
    unit = plan.unit
    if name is None:
        console.print(_table(found))
        console.print(f"\nWeight: predicted time of a {unit} that a decision governs or saves.")
        console.print(f"`mkc explain {escape(str(folder))} NAME` says why.")
        return
    for index, one in enumerate(found):
        if index:
            console.print()
        for line in _lines(one, unit):
            console.print(line, soft_wrap=True)


def _document(one: Weighed) -> dict[str, Any]:
    return {
        **asdict(one.decision),
        "predicted_weight_us": one.weight_us,
        "bytes": one.bytes,
        "phases": list(one.phases),
        "predicted_saved_us": one.saved_us,
    }


def _table(found: tuple[Weighed, ...]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("weight", justify="right", no_wrap=True)
    table.add_column("decision", overflow="fold", ratio=1)
    table.add_column("chosen", overflow="fold", ratio=1)
    for one in found:
        table.add_row(
            f"{one.weight_us:.1f} us", escape(one.decision.id), escape(one.decision.chosen)
        )
    return table


def _lines(one: Weighed, unit: str) -> Iterator[str]:
    decision = one.decision
    yield f"[bold]{escape(decision.id)}[/bold], decided by pass {escape(decision.passed)}"
    yield f"  chosen       {escape(decision.chosen)}"
    yield f"  because      {escape(decision.because)}"
    for choice, why in decision.rejected.items():
        yield f"  alternative  {escape(choice)}: {escape(why)}"
    if not decision.rejected:
        yield "  alternative  none was considered"
    where = f"phases {', '.join(one.phases)}" if one.phases else f"the whole {unit}"
    yield (
        f"  weight       predicted {one.weight_us:.1f} us: {where}, {one.bytes / MEGABYTE:.1f} MB "
        f"a {unit} and rank"
    )
    if one.saved_us is not None:
        saved = f"{one.saved_us:.1f} us a {unit}"
        yield f"  saving       predicted {saved} against the best alternative"
