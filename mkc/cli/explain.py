"""`mkc explain`: the decisions of a plan, heaviest first, or one of them in full."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Annotated
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mkc.cli.output import json_text
from mkc.plan.folder import PlanFolder
from mkc.plan.folder import read_folder
from mkc.plan.weights import Weighed
from mkc.plan.weights import estimated_us
from mkc.plan.weights import find_decisions
from mkc.plan.weights import weigh

if TYPE_CHECKING:
    from mkc.cli.what_if import Alternative

MEGABYTE = 1_000_000
# How the cost of an alternative is known: of the whole step by lowering and simulating it, of one
# execution by the pass that decided; or not at all, for the reason that is given.
SIMULATED, ESTIMATED, REASON = "simulated", "estimated", "reason"


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
    others = _others(plan, found) if name is not None else {}
    if json:
        documents = [explained(one, others.get(one.decision.id, ())) for one in found]
        typer.echo(json_text({"decisions": documents}), nl=False)
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
        for line in _what_if(others.get(one.decision.id, ()), unit):
            console.print(line, soft_wrap=True)


def _others(plan: PlanFolder, found: tuple[Weighed, ...]) -> dict[str, tuple[Alternative, ...]]:
    """What other options would give, by decision."""
    from mkc.cli.what_if import WhatIf  # imports JAX

    answers = WhatIf(plan)
    return {one.decision.id: answers.alternatives(one.decision) for one in found}


def _what_if(alternatives: tuple[Alternative, ...], unit: str) -> Iterator[str]:
    if not alternatives:
        return
    yield f"  simulated    predicted us a {unit}, phase times of all from the target file:"
    for one in alternatives:
        what = _spoken(one.options.arguments) or "as chosen"
        what += ", the same plan" if one.same and one.options.arguments else ""
        time = one.problem if one.round_us is None else f"{one.round_us:.1f}"
        yield f"               {escape(time):>10}  {escape(what)}"


def _spoken(arguments: tuple[str, ...]) -> str:
    """Arguments as they are typed."""
    return " ".join(one if one.isalnum() or one[0] == "-" else f'"{one}"' for one in arguments)


def explained(one: Weighed, alternatives: tuple[Alternative, ...]) -> dict[str, Any]:
    """A decision for JSON, with what the pass said of other choices and what was simulated."""
    return {
        **asdict(one.decision),
        "alternatives": [*_told(one), *map(_simulated, alternatives)],
        "predicted_weight_us": one.weight_us,
        "bytes": one.bytes,
        "phases": list(one.phases),
        "executions": one.executions,
        "predicted_saved_us": one.saved_us,
    }


def _told(one: Weighed) -> Iterator[dict[str, Any]]:
    """What the pass said of other choices: a time of one execution, or why there is none."""
    for choice, why in one.decision.rejected.items():
        us = estimated_us(why)
        yield {
            "basis": REASON if us is None else ESTIMATED,
            "choice": choice,
            "why": why,
            "predicted_us": us,
        }


def _simulated(one: Alternative) -> dict[str, Any]:
    """A whole step with other options; the first is the plan itself."""
    return {
        "basis": SIMULATED,
        "choice": "as chosen" if one.same else "otherwise",
        "options": list(one.options.arguments),
        "why": one.problem,
        "predicted_us": one.round_us,
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
        label = "alternative" if estimated_us(why) is None else "estimated"
        each = "" if one.executions == 1 else f", {one.executions} times a {unit}"
        told = why if estimated_us(why) is None else f"{why}{each}"
        yield f"  {label:<11}  {escape(choice)}: {escape(told)}"
    where = f"phases {', '.join(one.phases)}" if one.phases else f"the whole {unit}"
    yield (
        f"  weight       predicted {one.weight_us:.1f} us: {where}, {one.bytes / MEGABYTE:.1f} MB "
        f"a {unit} and rank"
    )
    if one.saved_us is not None:
        saved = f"{one.saved_us:.1f} us a {unit}"
        yield f"  saving       predicted {saved} against the best alternative"
