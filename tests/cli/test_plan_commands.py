"""`mkc viz`, `mkc explain`, `mkc diff` and `mkc compile --emit` as a user meets them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from re import findall

import pytest

from mkc.cli.main import main
from mkc.codegen_pallas import aot_stages
from mkc.viz.names import FILES
from mkc.viz.names import IMAGES
from tests.draft_goldens import TARGET_CASE
from tests.draft_goldens import draft_case
from tests.goldens import golden_case

DECODER = f"{Path(__file__).with_name('small_model.py')}:decoder"
QUICK = ("--tp", "2", "--no-aot", "--quiet")

type Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*arguments)` is what `mkc ARGUMENTS` prints in an empty folder; it must succeed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")

    def command(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["mkc", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert ended.value.code in (0, None), printed.err
        assert printed.err == ""
        return printed.out

    return command


def contents(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in sorted(folder.iterdir())}


def test_viz_writes_the_same_bytes_every_time(run: Run, tmp_path: Path) -> None:
    run("compile", DECODER, *QUICK, "--out", "plan")
    printed = run("viz", "plan")
    assert sorted(printed.split()) == sorted(f"plan/viz/{one}" for one in FILES - {*IMAGES})
    run("viz", "plan", "--out", "again", "--quiet")
    assert contents(tmp_path / "again") == contents(tmp_path / "plan" / "viz")


def test_every_picture_has_a_twin_with_the_ids_of_the_plan(run: Run, tmp_path: Path) -> None:
    run("compile", DECODER, *QUICK, "--out", "plan")
    run("viz", "plan", "--quiet")
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    phases = {one["id"] for one in plan["program"]["body"] if "id" in one}
    buffers = {one["name"] for one in plan["program"]["buffers"]}
    twins = {
        name: json.loads((tmp_path / "plan" / "viz" / f"{name}.json").read_text())
        for name in ("timeline", "vmem", "graph", "roofline")
    }
    assert phases <= {one["id"] for one in twins["timeline"]["phases"]}
    assert phases <= {one["id"] for one in twins["graph"]["phases"]}
    assert buffers <= {one["id"] for one in twins["vmem"]["boxes"]}
    assert {one["id"] for one in twins["roofline"]["points"]} <= {
        one["id"] for one in twins["graph"]["phases"]
    }


def test_pngs_join_what_is_in_a_folder(run: Run, tmp_path: Path) -> None:
    run("compile", DECODER, *QUICK, "--out", "plan")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "mine.txt").write_text("mine")
    run("viz", "plan", "--format", "png", "--out", "images", "--quiet")
    assert sorted(contents(tmp_path / "images")) == ["mine.txt", *sorted(IMAGES)]


def test_a_folder_with_pictures_is_compiled_into_again(run: Run, tmp_path: Path) -> None:
    run("compile", DECODER, *QUICK, "--out", "plan")
    run("viz", "plan", "--quiet")
    run("compile", DECODER, *QUICK, "--out", "plan", "--batch", "2")
    assert not (tmp_path / "plan" / "viz").exists()  # they were of the other plan


def test_explain_lists_decisions_and_tells_one(run: Run, tmp_path: Path) -> None:
    run("compile", DECODER, *QUICK, "--out", "plan")
    weights = [float(one) for one in findall(r"(?m)^ *([\d.]+) us ", run("explain", "plan"))]
    assert weights == sorted(weights, reverse=True)
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert len(weights) == len(plan["decisions"])
    told = run("explain", "plan", "ring")
    assert told.startswith("tile.ring, decided by pass tile\n")
    for label in ("chosen", "because", "alternative", "weight"):
        assert f"\n  {label} " in told
    assert "predicted" in told


def test_other_options_are_simulated_and_come_out_as_predicted(run: Run) -> None:
    """What `explain` says of an option is what compiling with it gives."""
    run("compile", DECODER, *QUICK, "--out", "plan")
    (one,) = json.loads(run("explain", "plan", "tile.ring", "--json"))["decisions"]
    chosen, *others = [each for each in one["alternatives"] if each["basis"] == "simulated"]
    assert (chosen["options"], chosen["choice"]) == ([], "as chosen")
    made = [each for each in others if each["predicted_us"] is not None]
    (alone,) = json.loads(run("explain", "plan", "shard.ranks", "--json"))["decisions"]
    made += [each for each in alone["alternatives"] if each.get("options") == ["--tp", "1"]]
    assert len(made) > 2
    for each in (chosen, made[0], made[-2], made[-1]):
        options = each["options"] if "--tp" in each["options"] else ["--tp", "2", *each["options"]]
        text = run("compile", DECODER, "--no-aot", "--json", "--out", "other", *options)
        assert json.loads(text)["predicted"]["round_us"] == pytest.approx(
            each["predicted_us"], abs=0.05
        )


def test_a_graph_of_another_plan_explains_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("compile", DECODER, *QUICK, "--out", "plan")
    run("compile", DECODER, *QUICK, "--out", "other", "--batch", "2")
    graph = (tmp_path / "other" / "graph.txt").read_text()
    (tmp_path / "plan" / "graph.txt").write_text(graph)
    monkeypatch.setattr(sys, "argv", ["mkc", "explain", "plan", "tile.ring"])
    with pytest.raises(SystemExit):
        main()
    assert "E342" in capsys.readouterr().err


def test_explain_as_json_has_alternatives_and_weights(run: Run) -> None:
    run("compile", DECODER, *QUICK, "--out", "plan")
    (one,) = json.loads(run("explain", "plan", "tile.ring", "--json"))["decisions"]
    assert one["id"] == "tile.ring"
    assert one["chosen"] and one["because"]
    assert one["predicted_weight_us"] > 0


def test_diff_shows_what_changed(run: Run) -> None:
    run("compile", DECODER, *QUICK, "--out", "one")
    run("compile", DECODER, *QUICK, "--out", "two", "--batch", "8")
    assert run("diff", "one", "one").startswith("The plans are the same.")
    shown = run("diff", "one", "two")
    assert shown.startswith("Request")
    for heading in ("Decisions", "Buffers in VMEM", "Predicted times"):
        assert f"\n{heading} " in shown
    found = json.loads(run("diff", "one", "two", "--json"))
    assert {"name": "batch", "before": 1, "after": 8, "unit": ""} in found["request"]


def test_the_summary_is_one_screen_without_colour(run: Run) -> None:
    shown = run("compile", DECODER, "--tp", "2", "--no-aot", "--out", "plan")
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in shown
    for label in ("model", "tape", "vmem", "predicted", "TPU compiler", "decisions", "written to"):
        assert any(line.startswith(f"{label} ") for line in lines), label


@pytest.mark.parametrize(
    ("stage", "said"),
    [("graph", 'graph "small_model" {'), ("program", 'program "small_model"'), ("kernel", '"""')],
)
def test_a_stage_is_printed_or_written_to_a_file(
    run: Run, tmp_path: Path, stage: str, said: str
) -> None:
    printed = run("compile", DECODER, "--tp", "2", "--emit", stage)
    assert printed.startswith(said)
    assert run("compile", DECODER, "--tp", "2", "--emit", stage, "--out", "to/stage.txt") == ""
    assert (tmp_path / "to" / "stage.txt").read_text() == printed
    assert [one.name for one in tmp_path.iterdir()] == ["to"]


@pytest.mark.parametrize(
    ("stage", "begins", "holds"),
    [
        ("graph", 'graph "qwen38" {', " = accept("),
        ("passes", "<!doctype html>", '<section id="lower">'),
        ("program", 'program "qwen38" scheme=dflash2', " SelectorWalkPhase "),
        ("kernel", '"""', "ROWS_PER_SEQUENCE = 8"),
    ],
)
def test_stages_of_a_round(run: Run, tmp_path: Path, stage: str, begins: str, holds: str) -> None:
    for name, case in (("target", golden_case(TARGET_CASE)), ("draft", draft_case())):
        (tmp_path / f"{name}.json").write_text(json.dumps(case.meta["config"]))
    scheme = ("--spec", "dflash2", "--config", "target.json", "--draft", "draft.json")
    options = ("--context", "128", "--target", "tpu7x:1x1x1", "--emit", stage)
    printed = run("compile", "qwen38", *scheme, *options)
    assert printed.startswith(begins)
    assert holds in printed


def test_passes_are_one_page(run: Run) -> None:
    page = run("compile", DECODER, "--tp", "2", "--emit", "passes")
    assert page.startswith("<!doctype html>")
    assert page.index('<section id="shard">') < page.index('<section id="lower">')


def test_the_compiler_shows_mosaic_and_bundles(tmp_path: Path, run: Run) -> None:
    kernel = run("compile", DECODER, "--tp", "2", "--emit", "kernel")
    texts = aot_stages.compiler_stages(kernel, topology="tpu7x:2x2x1")
    assert texts.error == ""
    assert texts.mosaic.startswith("module @small_model_none_b1")
    assert "tpu.matmul" in texts.mosaic
    assert "= control target key start" in texts.bundles
    assert "vmatmul" in texts.bundles


def test_what_the_compiler_refuses_is_told() -> None:
    texts = aot_stages.compiler_stages('NAME = "broken"\nRANKS = 1\n', topology="tpu7x:2x2x1")
    assert "AttributeError" in texts.error
    assert (texts.mosaic, texts.bundles) == ("", "")
