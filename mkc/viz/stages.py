"""The IR before and after each pass with the decisions taken, as one page."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields
from dataclasses import is_dataclass
from dataclasses import replace
from difflib import SequenceMatcher
from html import escape
from typing import Any

from mkc.ir.graph import Graph
from mkc.ir.graph import Node
from mkc.ir.text import print_graph
from mkc.passes.p10_shard import Shard
from mkc.passes.pipeline import Lowered
from mkc.passes.pipeline import Pipeline
from mkc.passes.sharding import ShardedGraph
from mkc.passes.steps import Step
from mkc.passes.steps import StepGraph
from mkc.passes.steps import StepLoop
from mkc.schedule.decisions import Decision
from mkc.schedule.decisions import DecisionLog
from mkc.schedule.program import Program
from mkc.schedule.program_text import print_program
from mkc.targets import Target
from mkc.viz.page import page

INDENT = "  "


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pass.

    Attributes:
      options: as in the pipeline's text, such as `tile{load_bytes=0}`.
      before, after: the IR it was given and what it made, as text.
      changed: the pass rewrites what it was given; otherwise it adds facts about it.
      decisions: what was decided while it ran, by passes that run inside it too.
    """

    name: str
    options: str
    before: str
    after: str
    changed: bool
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, kw_only=True)
class _Made:
    """What a pass made and decided."""

    by: Any
    result: Any
    decisions: tuple[Decision, ...]


class _Recorder:
    """A pass that remembers what it made; in all else it is the pass."""

    def __init__(self, recorded: Any, made: list[_Made]) -> None:
        self._recorded = recorded
        self._made = made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recorded, name)

    def apply(self, *arguments: Any, **options: Any) -> Any:
        logs = [one for one in arguments if isinstance(one, DecisionLog)]  # none, or the one
        before = [len(one.decisions) for one in logs]
        result = self._recorded.apply(*arguments, **options)
        decisions = tuple(
            each for log, count in zip(logs, before, strict=True) for each in log.decisions[count:]
        )
        self._made.append(_Made(by=self._recorded, result=result, decisions=decisions))
        return result


def stages(graph: Graph, lowered: Lowered, target: Target) -> tuple[Stage, ...]:
    """Runs the passes that made `lowered` again and keeps what each one made."""
    pipeline = Pipeline(shard=Shard(ranks=1)).override(lowered.pipeline)
    made: list[_Made] = []
    recorders: dict[str, Any] = {
        one.name: _Recorder(getattr(pipeline, one.name), made) for one in fields(pipeline)
    }
    again = replace(pipeline, **recorders).run(graph, target)
    assert again.program == lowered.program, "the passes make another program the second time"
    return tuple(_stages(graph, made))


def _stages(graph: Graph, made: list[_Made]) -> Iterator[Stage]:
    before = ir_text(graph)
    for one in made:
        after = ir_text(one.result)
        changed = isinstance(one.result, Graph | ShardedGraph | StepGraph | Program)
        options = (f"{part.name}={getattr(one.by, part.name)}" for part in fields(one.by))
        yield Stage(
            name=one.by.name,
            options=", ".join(options),
            before=before,
            after=after,
            changed=changed,
            decisions=one.decisions,
        )
        before = after if changed else before


def ir_text(value: Any) -> str:
    """A graph, steps, a program, or the facts that a pass found, as text."""
    match value:
        case Graph():
            return print_graph(value)
        case ShardedGraph():
            return print_graph(value.graph)
        case StepGraph():
            return "\n".join(_steps(value.body, "")) + "\n"
        case Program():
            return print_program(value)
        case _:
            return "\n".join(_facts(value, "")) + "\n"


def _steps(body: tuple[Step | StepLoop, ...], indent: str) -> Iterator[str]:
    for item in body:
        if isinstance(item, StepLoop):
            yield f"{indent}loop {item.name} x {item.count} {{"
            yield from _steps(item.body, indent + INDENT)
            yield f"{indent}}}"
            continue
        output = f" -> %{item.output}" if item.output else ""
        yield f"{indent}{item.id} {item.kind}{output}"
        yield from (f"{indent}{INDENT * 2}{_node(node)}" for node in item.nodes)


def _node(node: Node) -> str:
    results = ", ".join(f"%{one.name}" for one in node.results)
    return f"{results} = {node.op.mnemonic}({', '.join(node.operands)})"


def _facts(value: Any, indent: str) -> Iterator[str]:
    """Fields of a record; tables and lists one entry a line."""
    for part in fields(value):
        content = getattr(value, part.name)
        if isinstance(content, Mapping) and content:
            yield f"{indent}{part.name}:"
            yield from (f"{indent}{INDENT}{key}: {_short(one)}" for key, one in content.items())
        elif isinstance(content, tuple) and content and is_dataclass(content[0]):
            yield f"{indent}{part.name}:"
            yield from (f"{indent}{INDENT}{_short(one)}" for one in content)
        elif is_dataclass(content) and not isinstance(content, type):
            yield f"{indent}{part.name}:"
            yield from _facts(content, indent + INDENT)
        else:
            yield f"{indent}{part.name}: {_short(content)}"


def _short(value: Any) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        inside = (f"{part.name}={_short(getattr(value, part.name))}" for part in fields(value))
        return f"{type(value).__name__}({', '.join(inside)})"
    if isinstance(value, tuple):
        return f"({', '.join(_short(one) for one in value)})"
    return str(value)


def stages_html(name: str, target: str, found: tuple[Stage, ...]) -> str:
    """The page. Of a pass that rewrites, lines that go are red on the left, new ones green."""
    links = " ".join(f'<a href="#{one.name}">{one.name}</a>' for one in found)
    sections = "".join(_section(number, one) for number, one in enumerate(found, 1))
    body = f"""<header><h1>{escape(name)}: passes</h1>
<span class="facts">{escape(target)}; {len(found)} passes,
{sum(len(one.decisions) for one in found)} decisions</span>
<div class="controls">{links}</div></header>
<main class="stages">{sections}</main>"""
    return page(title=f"{name}: passes", body=body, scripts=())


def _section(number: int, stage: Stage) -> str:
    before, after = _marked(stage)
    opened = " open" if stage.changed else ""
    heading = "after" if stage.changed else "what it found"
    return f"""
<section id="{stage.name}"><h2>{number}. {stage.name}
<span class="facts">{escape(stage.options)}</span></h2>
{_decisions(stage.decisions)}
<div class="pair"><details{opened}><summary>before</summary><pre>{before}</pre></details>
<details open><summary>{heading}</summary><pre>{after}</pre></details></div></section>"""


def _decisions(decisions: tuple[Decision, ...]) -> str:
    if not decisions:
        return '<p class="hint">It decides nothing.</p>'
    rows = "".join(
        f'<tr id="{escape(one.id)}"><td>{escape(one.id)}</td><td>{escape(one.chosen)}</td>'
        f"<td>{escape(one.because)}</td><td>{_rejected(one)}</td></tr>"
        for one in decisions
    )
    return (
        "<table><tr><th>decision</th><th>chosen</th><th>because</th><th>instead of</th></tr>"
        f"{rows}</table>"
    )


def _rejected(decision: Decision) -> str:
    return "<br>".join(escape(f"{what}: {why}") for what, why in decision.rejected.items())


def _marked(stage: Stage) -> tuple[str, str]:
    """Both texts as HTML, changed lines marked when the pass rewrites."""
    before, after = stage.before.splitlines(), stage.after.splitlines()
    gone, new = [False] * len(before), [False] * len(after)
    if stage.changed:
        for kind, a, b, c, d in SequenceMatcher(None, before, after, False).get_opcodes():
            if kind != "equal":
                gone[a:b] = [True] * (b - a)
                new[c:d] = [True] * (d - c)
    return _lines(before, gone, "gone"), _lines(after, new, "new")


def _lines(lines: list[str], marked: list[bool], name: str) -> str:
    return "\n".join(
        f'<span class="{name}">{escape(line)}</span>' if mark else escape(line)
        for line, mark in zip(lines, marked, strict=True)
    )
