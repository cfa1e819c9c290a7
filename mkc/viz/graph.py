"""The graph: every phase with its ops, bytes and predicted time; loops fold; arcs show the data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from html import escape
from typing import Any

from mkc.ir.graph import Node
from mkc.plan.phases import PhaseRow
from mkc.plan.phases import phase_buffers
from mkc.schedule.program import Loop
from mkc.schedule.program import Phase
from mkc.schedule.program import VectorPhase
from mkc.schedule.program import phases_of
from mkc.viz.colours import work_colour
from mkc.viz.page import page
from mkc.viz.page import scheme_and_target
from mkc.viz.source import Subject

VERSION = 1
MEGABYTE = 1_000_000


def graph_document(subject: Subject) -> dict[str, Any]:
    """The graph's JSON twin: phases in program order, loops around them, who reads from whom."""
    program = subject.folder.program
    phases = {one.id: one for one in phases_of(program.body)}
    total = sum(one.bytes * one.executions for one in subject.rows)
    return {
        "version": VERSION,
        "picture": "graph",
        "predicted": True,
        **subject.heading,
        "round_us": round(subject.round_us, 3),
        "bytes": total,
        "phases": [_phase(subject, one, phases[one.id]) for one in subject.rows],
        "body": [_tree(one) for one in program.body],
        "edges": [
            {"from": writer, "to": reader, "buffer": buffer, "next_iteration": again}
            for (writer, reader, buffer), again in _edges(program.body).items()
        ],
    }


def _phase(subject: Subject, row: PhaseRow, phase: Phase) -> dict[str, Any]:
    step_us = subject.phase_us.get(row.id, 0.0)
    return {
        "id": row.id,
        "title": row.title,
        "kind": row.kind,
        "part": row.part,
        "inline": not row.is_step,
        "location": row.location,
        "kernel_line": row.kernel_line,
        "executions": row.executions,
        "bytes": row.bytes,
        "step_bytes": row.bytes * row.executions,
        "step_us": round(step_us, 3),
        "us": round(step_us / row.executions, 3),
        "reads": list(row.reads),
        "writes": list(row.writes),
        "ops": [_op(node) for node in phase.nodes] if isinstance(phase, VectorPhase) else [],
    }


def _op(node: Node) -> str:
    results = ", ".join(f"%{one.name}" for one in node.results)
    options = [f"{part.name}={getattr(node.op, part.name)}" for part in fields(node.op)]
    written = f" {{{', '.join(options)}}}" if options else ""
    return f"{results} = {node.op.mnemonic}({', '.join(node.operands)}){written}"


def _tree(item: Phase | Loop, outside: int = 1) -> Any:
    """A phase's id, or a loop with what is in it; `outside` executes the loop as a whole."""
    if not isinstance(item, Loop):
        return item.id
    executions = outside * item.count
    return {
        "loop": item.name,
        "count": item.count,
        "executions": executions,
        "body": [_tree(one, executions) for one in item.body],
    }


def _edges(body: tuple[Phase | Loop, ...]) -> dict[tuple[str, str, str], bool]:
    """(writer, reader, buffer) -> the reader is in the next iteration of a loop."""
    order = {one.id: position for position, one in enumerate(phases_of(body))}
    return {edge: order[edge[0]] >= order[edge[1]] for edge in _flow(body, {})}


def _flow(
    body: tuple[Phase | Loop, ...], writers: dict[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Every read with the last writer before it; `writers` holds them by buffer."""
    for item in body:
        if isinstance(item, Loop):
            # Twice: what the end of an iteration leaves is what the next one begins with.
            yield from _flow(item.body, writers)
            yield from _flow(item.body, writers)
            continue
        for buffer in phase_buffers(item, written=False):
            if buffer in writers:
                yield writers[buffer], item.id, buffer
        writers.update(dict.fromkeys(phase_buffers(item, written=True), item.id))


def graph_html(document: dict[str, Any]) -> str:
    """The page. Folding needs no script; the arcs do."""
    title = f"{document['model']}: graph of one {document['unit']}"
    phases = {one["id"]: one for one in document["phases"]}
    most_bytes = max(*(one["step_bytes"] for one in document["phases"]), 1)
    most_us = max(*(one["step_us"] for one in document["phases"]), 1e-9)
    rows = "\n".join(_items(document["body"], phases, most_bytes, most_us))
    body = f"""<header><h1>{escape(title)}</h1>
<span class="badge">times predicted, not measured</span>
<span class="facts">{escape(scheme_and_target(document))}, {document["ranks"]} ranks, batch
{document["batch"]}; {document["bytes"] / MEGABYTE:,.1f} MB and {document["round_us"]:,.1f} &micro;s
a {document["unit"]} and rank</span>
<div class="controls"><button id="unfold">Unfold all</button><button id="fold">Fold all</button>
<span class="hint">Arcs lead from who writes a buffer to who reads it; rest the pointer on a phase
to see its own. Dashed: into the next iteration.</span></div></header>
<main class="graph"><svg class="arcs"></svg>
<div class="row head"><span></span><span>phase</span><span>what it does</span>
<span class="number">runs</span><span>MB in all</span><span>predicted &micro;s in all</span>
<span>kernel</span></div>
{rows}
</main>"""
    return page(title=title, body=body, document=document, scripts=("canvas.js", "graph.js"))


def _items(
    body: list[Any], phases: dict[str, Any], most_bytes: float, most_us: float
) -> Iterator[str]:
    """The outermost level, with a heading where another part of a round begins."""
    before = ""
    for one in body:
        part = phases[_ids(one)[0]]["part"]
        if part != before:
            inside = [each for each in phases.values() if each["part"] == part]
            moved = sum(each["step_bytes"] for each in inside) / MEGABYTE
            taken = sum(each["step_us"] for each in inside)
            yield (
                f'<div class="part"><b>{escape(part)}</b><span class="facts">'
                f"{moved:,.1f} MB, {taken:,.1f} &micro;s predicted</span></div>"
            )
        before = part
        yield _item(one, phases, most_bytes, most_us)


def _item(item: Any, phases: dict[str, Any], most_bytes: float, most_us: float) -> str:
    if isinstance(item, str):
        return _row(phases[item], most_bytes, most_us)
    inside = [phases[one] for one in _ids(item)]
    moved = sum(one["step_bytes"] for one in inside) / MEGABYTE
    taken = sum(one["step_us"] for one in inside)
    rows = "\n".join(_item(one, phases, most_bytes, most_us) for one in item["body"])
    return (
        f'<details open class="loop" data-phases="{" ".join(_ids(item))}"><summary>'
        f"<b>{escape(item['loop'])}</b> &times; {item['count']}<span class='facts'>"
        f"{moved:,.1f} MB, {taken:,.1f} &micro;s predicted</span></summary>\n"
        f"{rows}\n</details>"
    )


def _ids(item: Any) -> list[str]:
    if isinstance(item, str):
        return [item]
    return [one for part in item["body"] for one in _ids(part)]


def _row(one: dict[str, Any], most_bytes: float, most_us: float) -> str:
    line = one["kernel_line"]
    kernel = f'<a href="../kernel.py#L{line}">kernel.py:{line}</a>' if line else ""
    ops = "".join(f"<code>{escape(op)}</code>" for op in one["ops"])
    where = f'<span class="hint">{escape(one["location"])}</span>' if one["location"] else ""
    flow = escape(
        f"reads {', '.join(one['reads']) or '-'}; writes {', '.join(one['writes']) or '-'}"
    )
    return (
        f'<div class="row{" inline" if one["inline"] else ""}" id="{one["id"]}" title="{flow}">'
        f'<i style="background:{work_colour(one["kind"])}"></i><span>{one["id"]}</span>'
        f"<span>{escape(one['title'])} {where}{ops}</span>"
        f'<span class="number">{one["executions"]}</span>'
        f"{_bar(one['step_bytes'] / MEGABYTE, one['step_bytes'] / most_bytes, '#76b7a5')}"
        f"{_bar(one['step_us'], one['step_us'] / most_us, '#4e79a7')}<span>{kernel}</span></div>"
    )


def _bar(value: float, part: float, colour: str) -> str:
    words = f"{value:,.1f}" if value else ""
    style = f"width:{100 * part:.1f}px;background:{colour}"
    return f'<span class="bar"><i style="{style}"></i>{words}</span>'
