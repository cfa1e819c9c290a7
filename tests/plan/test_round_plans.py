"""What explanations and pictures say of rounds of a speculative scheme."""

from __future__ import annotations

from json import dumps
from json import loads
from re import findall

from mkc.plan.decode import decode
from mkc.plan.form import plain
from mkc.plan.phases import phase_rows
from mkc.plan.weights import find_decisions
from mkc.schedule.program import Program
from mkc.viz.colours import OTHER
from mkc.viz.colours import work_colour
from mkc.viz.graph import graph_document
from mkc.viz.graph import graph_html
from mkc.viz.timeline import timeline_document
from mkc.viz.timeline import timeline_html
from mkc.viz.vmem import vmem_document
from mkc.viz.vmem import vmem_html
from tests.plan.plans import plan
from tests.schedule.verify.round_programs import round_lowered
from tests.viz.subjects import subject

RANKS = 2
KINDS = {"accept", "kept delta rule", "rows attention", "selector walk", "tap", "top k"}


def test_every_kind_of_phase_has_a_row_and_a_colour() -> None:
    rows = [one for one in phase_rows(plan("round", ranks=RANKS)) if one.is_step]
    kinds = {one.kind for one in rows}
    assert kinds >= KINDS
    assert all(work_colour(one) != OTHER for one in kinds)
    assert all(one.kernel_line > 0 for one in rows)


def test_rows_know_what_rounds_read_and_write() -> None:
    rows = {one.kind: one for one in phase_rows(plan("round", ranks=RANKS)) if one.is_step}
    remembered = rows["rows attention"]
    assert len(remembered.reads) >= 3
    assert rows["tap"].writes == ("v_read_taps_taps",)
    assert len(rows["top k"].writes) == 2
    assert not set(rows["top k"].writes) & set(rows["top k"].reads)
    assert rows["kept delta rule"].bytes > 0
    assert rows["selector walk"].bytes > 0


def test_a_kept_state_is_a_decision_of_its_phases() -> None:
    (found,) = find_decisions(plan("round", ranks=RANKS), "state_decay")
    kinds = {one.id: one.kind for one in phase_rows(plan("round", ranks=RANKS))}
    assert {kinds[one] for one in found.phases} == {"kept delta rule"}


def test_the_report_says_what_drafting_reads() -> None:
    moved = plan("round", ranks=RANKS).report["bytes"]
    assert 0 < moved["draft"] < moved["tape"]
    assert plan("dense", ranks=1).report["bytes"]["draft"] == 0


def test_pages_speak_of_rounds() -> None:
    document = graph_document(subject("round", ranks=RANKS))
    assert document["unit"] == "round"
    page = graph_html(document)
    assert "graph of one round" in page
    taps = next(one for one in document["phases"] if one["kind"] == "tap")
    readers = [one["to"] for one in document["edges"] if one["from"] == taps["id"]]
    assert readers, "nobody reads the taps"


def test_a_program_that_samples_is_read_as_it_was_written() -> None:
    program = round_lowered(RANKS, sampling=True).program
    assert program.round is not None and program.round.rows
    written = loads(dumps(plain(program)))
    assert decode(Program, written, "program") == program


def test_the_parts_of_a_round_are_told_apart() -> None:
    """Phases up to the acceptance verify, those behind it draft; plain steps have no parts."""
    rows = phase_rows(plan("round", ranks=RANKS))
    accept = next(one.position for one in rows if one.kind == "accept")
    assert all(one.part == ("verify" if one.position <= accept else "draft") for one in rows)
    assert {one.part for one in rows if "dflash2.py" in one.location and one.kind == "matmul"} == {
        "draft"
    }
    assert {one.part for one in phase_rows(plan("dense", ranks=1))} == {""}
    page = graph_html(graph_document(subject("round", ranks=RANKS)))
    headings = findall(r'<div class="part"><b>(\w+)</b>', page)
    assert headings == ["verify", "draft"]
    assert page.index("<b>draft</b>") < page.index(f'id="{rows[accept + 1].id}"')
    assert page.index(f'id="{rows[accept].id}"') < page.index("<b>draft</b>")


def test_the_timeline_shows_when_a_round_drafts() -> None:
    document = timeline_document(subject("round", ranks=RANKS))
    verify, draft = document["parts"]
    assert (verify["part"], draft["part"]) == ("verify", "draft")
    assert 0 <= verify["start_us"] < verify["end_us"] <= draft["start_us"] + 0.001
    assert draft["end_us"] <= document["round_us"]
    assert timeline_document(subject("dense", ranks=RANKS))["parts"] == []
    assert "scheme dflash2, " in timeline_html(document)


def test_the_map_lists_scalar_memory_and_what_the_next_round_gets() -> None:
    program = plan("round", ranks=RANKS).program
    document = vmem_document(subject("round", ranks=RANKS))
    assert [one["id"] for one in document["scalars"]] == [one.name for one in program.scalars]
    assert program.round is not None
    carried = {one["id"]: one["becomes"] for one in document["scalars"] if one["becomes"]}
    assert carried == {one.source: one.target for one in program.round.carried}
    page = vmem_html(document)
    assert "Scalar memory of a round" in page
    assert all(f'<tr id="{one.name}">' in page for one in program.scalars)
    assert "Scalar memory" not in vmem_html(vmem_document(subject("dense", ranks=RANKS)))
