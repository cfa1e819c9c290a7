"""A plan is read back as it was: every record, every line of the kernel."""

from __future__ import annotations

from json import dumps
from json import loads
from pathlib import Path

import pytest

from mkc.passes.p50_residency import Allocation
from mkc.plan.decode import DecodeError
from mkc.plan.decode import decode
from mkc.plan.folder import read_folder
from mkc.plan.form import digest
from mkc.plan.form import plain
from mkc.plan.phases import kernel_lines
from mkc.plan.phases import phase_rows
from mkc.schedule.exchange_plan import Part
from mkc.schedule.program import MatmulPhase
from mkc.schedule.program import phases_of
from tests.passes.overlapped import ends
from tests.passes.overlapped import starts
from tests.plan.plans import compiled
from tests.plan.plans import plan
from tests.plan.plans import write_plan

PLANS = [("27b", 8), ("qwen38_mini", 2), ("dense", 1), ("round", 2), ("overlapped", 2)]


@pytest.mark.parametrize(("name", "ranks"), PLANS)
def test_a_program_is_read_as_it_was_written(name: str, ranks: int) -> None:
    result, folder = compiled(name, ranks=ranks), plan(name, ranks=ranks)
    assert folder.program == result.lowered.program
    assert folder.allocations == result.lowered.residency.allocations
    assert list(folder.decisions) == result.lowered.log.decisions
    assert folder.target == result.target


def test_parts_of_an_exchange_are_read_as_such() -> None:
    """The example has no gathers here; its sum is in two parts."""
    program = plan("overlapped", ranks=2).program
    assert [one.part for one in (*starts(program), *ends(program))] == [Part.START, Part.FINISH]


def test_a_folder_on_disk_is_the_same_plan(tmp_path: Path) -> None:
    folder = read_folder(write_plan(tmp_path / "here", "dense", ranks=1))
    assert folder.program == plan("dense", ranks=1).program
    assert folder.kernel_source == plan("dense", ranks=1).kernel_source


def test_the_digest_sees_every_change_and_no_order() -> None:
    document = loads(dumps(plan("dense", ranks=1).plan))
    assert digest(document) == document["digest"]
    assert digest(dict(reversed(document.items()))) == document["digest"]
    document["program"]["tape"]["slots"] += 1
    assert digest(document) != document["digest"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bytes": "many"}, "one.bytes: is 'many', not a value of type"),
        ({"bytes": True}, "one.bytes: is True"),
        ({"record": "Deallocation"}, "one: has record 'Deallocation'; expected one of"),
        ({"colour": "red"}, "one: has other fields than"),
    ],
)
def test_what_is_not_of_the_form_is_named(change: dict[str, object], said: str) -> None:
    written = plain(Allocation(name="ring", bytes=8, op="stream"))
    assert decode(Allocation, written, "one") == Allocation(name="ring", bytes=8, op="stream")
    with pytest.raises(DecodeError) as raised:
        decode(Allocation, {**written, **change}, "one")
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(("name", "ranks"), PLANS)
def test_every_phase_has_its_line_of_the_kernel(name: str, ranks: int) -> None:
    folder = plan(name, ranks=ranks)
    lines = folder.kernel_source.splitlines()
    for row in phase_rows(folder):
        line = lines[row.kernel_line - 1]
        if row.kind.startswith("stream"):
            stream, _, what = row.id.rpartition("_")
            assert f"support.stream_{what}(m.{stream}, c.{stream})" in line
        else:
            assert line.startswith(f"def {row.id}_")


def test_lines_follow_an_edited_kernel() -> None:
    source = plan("dense", ranks=1).kernel_source
    before = kernel_lines(source)
    after = kernel_lines(f"# three\n# new\n# lines\n{source}")
    assert {id: line + 3 for id, line in before.items()} == after


def test_rows_account_for_every_weight_and_execution() -> None:
    """64 layers: 48 recurrent ones, 16 of attention; the tape's bytes are those of the report."""
    folder = plan("27b", ranks=8)
    rows = {one.id: one for one in phase_rows(folder)}
    matmuls = [one for one in phases_of(folder.program.body) if isinstance(one, MatmulPhase)]
    assert {rows[one.id].executions for one in matmuls} == {1, 16, 48}
    tape = sum(rows[one.id].bytes * rows[one.id].executions for one in matmuls)
    assert tape == folder.program.tape.rows * 512
    states = sum(one.bytes * one.executions for one in rows.values() if one.kind == "delta rule")
    convolutions = sum(one.bytes * one.executions for one in rows.values() if one.kind == "vector")
    assert states + convolutions == folder.report["bytes"]["state"]
    caches = sum(one.bytes * one.executions for one in rows.values() if one.kind == "attention")
    assert caches == folder.report["bytes"]["kv"]
