"""Plan folders that cannot be read, and pictures that cannot be made."""

from __future__ import annotations

import sys
from collections.abc import Callable
from json import dumps
from json import loads
from pathlib import Path
from typing import Any

import pytest

from mkc.cli.output import emit_text
from mkc.cli.output import write_pictures
from mkc.errors import EmitError
from mkc.errors import MissingPackageError
from mkc.errors import PicturesError
from mkc.errors import PlanDamagedError
from mkc.errors import PlanFolderError
from mkc.errors import PlanVersionError
from mkc.errors import UnknownDecisionError
from mkc.plan.folder import read_folder
from mkc.plan.form import digest
from mkc.plan.weights import find_decisions
from mkc.viz.png import timeline_png
from tests.errors.command import Command
from tests.errors.expect import refused
from tests.plan.plans import plan
from tests.plan.plans import write_plan


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_plan(tmp_path / "here", "dense", ranks=1)


def edit(file: Path, **changes: object) -> None:
    file.write_text(dumps({**loads(file.read_text()), **changes}))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with refused(PlanFolderError, "here: does not exist", "mkc compile wrote", "compile again"):
        read_folder(tmp_path / "here")


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    with refused(PlanFolderError, "kernel.py: is not a folder"):
        read_folder(folder / "kernel.py")


@pytest.mark.parametrize("name", ["plan.json", "report.json", "kernel.py"])
def test_a_folder_without_one_of_its_files(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with refused(PlanFolderError, f"has no {name}"):
        read_folder(folder)


@pytest.mark.parametrize(("version", "said"), [(1, "has version 1"), (None, "names no version")])
def test_a_plan_of_another_version(folder: Path, version: object, said: str) -> None:
    edit(folder / "plan.json", version=version)
    with refused(PlanVersionError, "plan.json", said, "Compile again, or use the mkc"):
        read_folder(folder)


def test_a_plan_whose_records_are_of_another_version(folder: Path) -> None:
    """The digest holds, so nobody edited it; a record just has other fields today."""
    document = loads((folder / "plan.json").read_text())
    document["program"]["tape"]["colour"] = "red"
    document["digest"] = digest(document)
    (folder / "plan.json").write_text(dumps(document))
    report = {**loads((folder / "report.json").read_text()), "plan": document["digest"]}
    (folder / "report.json").write_text(dumps({**report, "digest": digest(report)}))
    with refused(PlanVersionError, "program.tape: has other fields than", "another version"):
        _ = read_folder(folder).program


@pytest.mark.parametrize("name", ["plan.json", "report.json"])
def test_a_truncated_document(folder: Path, name: str) -> None:
    text = (folder / name).read_text()
    (folder / name).write_text(text[: len(text) // 2])
    with refused(PlanDamagedError, name, "truncated or not JSON", "Compile again"):
        read_folder(folder)


def test_an_edited_plan(folder: Path) -> None:
    document = loads((folder / "plan.json").read_text())
    document["program"]["tape"]["slots"] += 1
    (folder / "plan.json").write_text(dumps(document))
    with refused(PlanDamagedError, "plan.json", "was changed", "change the options of mkc compile"):
        read_folder(folder)


def without(report: dict[str, Any], key: str) -> None:
    del report[key]


def with_other(report: dict[str, Any], key: str, value: object) -> None:
    report[key] = value


@pytest.mark.parametrize(
    "change",
    [
        lambda report: without(report, "model"),
        lambda report: without(report, "floor_us"),
        lambda report: without(report, "digest"),
        lambda report: with_other(report, "floor_us", "abc"),
        lambda report: with_other(report, "ranks", 7),
        lambda report: with_other(report["predicted"], "round_us", 1),
        lambda report: with_other(report["timing"], "passes", 0),
    ],
)
def test_an_edited_report(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    report = loads((folder / "report.json").read_text())
    change(report)
    (folder / "report.json").write_text(dumps(report))
    with refused(PlanDamagedError, "report.json", "was changed", "Compile again"):
        read_folder(folder)


def test_a_report_of_another_plan(folder: Path, tmp_path: Path) -> None:
    other = write_plan(tmp_path / "other", "dense", ranks=1, batch=2)
    (folder / "report.json").write_bytes((other / "report.json").read_bytes())
    with refused(PlanDamagedError, "report.json", "of another plan.json", "Compile again"):
        read_folder(folder)


@pytest.mark.parametrize("name", ["plan.json", "report.json"])
@pytest.mark.parametrize("depth", [2_000, 100_000])
def test_a_document_of_too_many_brackets(folder: Path, name: str, depth: int) -> None:
    document = loads((folder / name).read_text())
    inside = f'{{"a": {"[" * depth}{"]" * depth}, '
    for text in ("[" * depth, dumps(document).replace("{", inside, 1)):
        (folder / name).write_text(text)
        with refused(PlanDamagedError, name):
            read_folder(folder)


def test_a_document_that_is_no_object_or_no_text(folder: Path) -> None:
    (folder / "plan.json").write_text("[]")
    with refused(PlanDamagedError, "is no JSON object"):
        read_folder(folder)
    (folder / "plan.json").write_bytes(b"\xff\xfe")
    with refused(PlanDamagedError, "plan.json", "cannot be read"):
        read_folder(folder)


def test_a_decision_that_is_not_there() -> None:
    folder = plan("dense", ranks=1)
    with refused(UnknownDecisionError, "'tile.rign'", "tile.ring", "`mkc explain plan` lists all"):
        find_decisions(folder, "tile.rign")


def test_pictures_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused(PicturesError, "file/viz", "Not a directory", "--out"):
        write_pictures(tmp_path / "file" / "viz", [("a.svg", b"")])


def test_a_stage_where_no_file_can_be(tmp_path: Path) -> None:
    with refused(EmitError, str(tmp_path), "Is a directory", "leave --out out to print"):
        emit_text("text", tmp_path)


def test_png_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refused(MissingPackageError, "mkc viz --format png", "matplotlib", "'mkc-tpu[png]'"):
        timeline_png({})


@pytest.mark.parametrize("argv", ["viz here", "explain here", "diff here here"])
def test_the_commands_refuse_an_edited_report(command: Command, argv: str) -> None:
    edit(write_plan(Path("here"), "dense", ranks=1) / "report.json", floor_us="abc")
    command.refused(PlanDamagedError, "report.json: was changed", argv=argv)


@pytest.mark.parametrize("argv", ["viz nowhere", "explain nowhere", "diff nowhere nowhere"])
def test_the_commands_say_it_in_one_message(command: Command, argv: str) -> None:
    command.refused(PlanFolderError, "nowhere: does not exist", argv=argv)
