"""`--emit passes`: what every pass was given and made, and what it decided."""

from __future__ import annotations

from functools import cache
from html import escape
from re import findall

import mkc
from mkc.driver import CompileRequest
from mkc.driver import compile_graph
from mkc.ir.text import print_graph
from mkc.schedule.program_text import print_program
from mkc.viz.stages import Stage
from mkc.viz.stages import stages
from mkc.viz.stages import stages_html
from tests.passes.lowering import TARGET
from tests.plan.plans import compiled


def tied(step: mkc.Step) -> mkc.Outputs:
    table = mkc.param("embed.weight", [1024, 256])
    return mkc.next_token(mkc.embed(step.tokens, table), table)


@cache
def found() -> dict[str, Stage]:
    result = compiled("27b", ranks=8)
    return {one.name: one for one in stages(result.graph, result.lowered, result.target)}


def test_all_passes_are_there_in_order() -> None:
    assert list(found()) == [
        "shard", "fuse", "tile", "collectives", "residency", "prefetch", "lower",
    ]  # fmt: skip


def test_the_first_is_given_the_graph_and_the_last_makes_the_program() -> None:
    result = compiled("27b", ranks=8)
    assert found()["shard"].before == print_graph(result.graph)
    assert found()["lower"].after == print_program(result.lowered.program)


def test_each_pass_is_given_what_the_last_rewriting_one_made() -> None:
    assert found()["fuse"].before == found()["shard"].after != found()["shard"].before
    assert found()["tile"].before == found()["fuse"].after
    assert found()["residency"].before == found()["fuse"].after


def test_facts_of_a_pass_that_rewrites_nothing_are_readable() -> None:
    assert "  p11: Tiling(K=5120, columns=4352, blocks=17" in found()["tile"].after
    assert "  p09: Collective(algorithm=one_shot" in found()["collectives"].after


def test_decisions_stand_with_their_pass() -> None:
    decisions = compiled("27b", ranks=8).lowered.log.decisions
    shown = [each for one in found().values() for each in one.decisions]
    assert shown == decisions
    assert all(each.passed == one.name for one in found().values() for each in one.decisions)


def test_decisions_of_a_pass_inside_a_pass_stand_where_they_are_taken() -> None:
    """A tied embedding is copied while the graph is divided."""
    graph = mkc.trace(tied, name="tied", batch=1, context=64)
    result = compile_graph(CompileRequest(graph=graph, target=TARGET, tp=1, aot=False))
    shard, *others = stages(result.graph, result.lowered, result.target)
    assert shard.name == "shard"
    assert "untie" in {one.passed for one in shard.decisions}
    shown = [each for one in (shard, *others) for each in one.decisions]
    assert shown == result.lowered.log.decisions
    page = stages_html("tied", result.target.name, (shard, *others))
    section = page[page.index('<section id="shard">') : page.index('<section id="fuse">')]
    assert "<td>untie.embed.weight</td>" in section
    assert f"{len(shown)} decisions" in page


def test_the_page_marks_what_changes_and_is_one_file() -> None:
    html = stages_html("27b", "target", tuple(found().values()))
    shard = html[html.index('<section id="shard">') : html.index('<section id="fuse">')]
    gone = findall(r'<span class="gone">(.*?)</span>', shard)
    new = findall(r'<span class="new">(.*?)</span>', shard)
    assert gone and new
    line = next(line for line in found()["shard"].after.splitlines() if "q_proj" in line)
    assert escape(line) in new
    assert findall(r'(?:src|href)="(?!#)', html) == []
