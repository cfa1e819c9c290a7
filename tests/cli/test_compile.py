"""`mkc compile` as a user sees it: output folder, printed text, messages and exit status."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import models
from mkc.cli import output
from mkc.cli.main import main
from mkc.driver import CompileResult

SMALL = Path(__file__).with_name("small_model.py")
DECODER = f"{SMALL}:decoder"
FILES = ["graph.txt", "kernel.py", "plan.json", "program.txt", "report.json"]


@dataclass(frozen=True, kw_only=True)
class Done:
    """How one command ended."""

    returncode: int
    stdout: str
    stderr: str


type Run = Callable[..., Done]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*arguments)` is `mkc ARGUMENTS` in an empty folder; a traceback fails the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    def command(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["mkc", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return Done(returncode=code or 0, stdout=printed.out, stderr=printed.err)

    return command


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_model_of_the_user_is_compiled_by_the_tpu_compiler(run: Run, tmp_path: Path) -> None:
    done = run("compile", DECODER, "--tp", "2")
    assert done.stderr == ""
    assert done.returncode == 0
    folder = tmp_path / "build" / "small_model-tpu7x-2x2x1-b1-c4096"
    assert names(folder) == FILES
    assert names(tmp_path / "build") == [folder.name]
    assert "accepted: 1 launch" in done.stdout
    report = json.loads((folder / "report.json").read_text())
    assert report["aot"]["ok"] is True
    assert report["aot"]["custom_calls"] == 1


def test_json_prints_the_report_and_nothing_else(run: Run, tmp_path: Path) -> None:
    done = run("compile", DECODER, "--tp", "2", "--no-aot", "--json", "--out", "here")
    assert done.stdout == (tmp_path / "here" / "report.json").read_text()
    report = json.loads(done.stdout)
    assert (report["model"], report["ranks"], report["aot"]) == ("small_model", 2, None)


def test_the_same_request_gives_the_same_files(run: Run, tmp_path: Path) -> None:
    for name in ("first", "second"):
        run("compile", DECODER, "--tp", "2", "--no-aot", "--quiet", "--out", name)
    for name in ("graph.txt", "kernel.py", "plan.json", "program.txt"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_masks_of_tokens_become_an_input(run: Run) -> None:
    plain = run("compile", DECODER, "--tp", "2", "--emit", "graph").stdout
    masked = run("compile", DECODER, "--tp", "2", "--token-masks", "--emit", "graph").stdout
    assert "mask_tokens" not in plain
    assert "input %token_masks: i32[" in masked
    assert " = mask_tokens(" in masked


def test_emit_prints_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    done = run("compile", DECODER, "--tp", "2", "--emit", "graph")
    assert done.returncode == 0
    assert "embed" in done.stdout
    assert names(tmp_path) == []


def test_quiet_prints_nothing_and_replaces_its_own_folder(run: Run, tmp_path: Path) -> None:
    arguments = ("compile", DECODER, "--tp", "2", "--no-aot", "--quiet", "--out", "here")
    for batch in ("1", "2"):
        done = run(*arguments, "--batch", batch)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert names(tmp_path) == ["here"]
    assert json.loads((tmp_path / "here" / "report.json").read_text())["batch"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["qwen39"], "E110", "known models: kimi_k3, qwen38"),
        (["missing.py:decoder"], "E111", "there is no file missing.py"),
        ([str(SMALL)], "E111", "does not name a function"),
        ([f"{SMALL}:decode"], "E111", "It has: broken, decoder"),
        ([f"{SMALL}:not_a_function"], "E111", "is a int, not a function"),
        ([f"{SMALL}:broken"], "E111", r"small_model\.py:\d+ raised ValueError: of my own"),
        (["qwen38", "--target", "tpu9"], "E120", "known targets: tpu7x"),
        (["qwen38", "--target", "v6e:3x3"], "E120", "2x2, 2x4"),
        (["qwen38", "--batch", "9"], "E131", "1 to 8"),
        (["qwen38", "--context", "0"], "E130", "at least one position"),
        (["qwen38", "--config", "absent.json"], "E104", "absent.json: cannot be read"),
        (["qwen38", "--passes", "nonsense"], "E191", "nonsense"),
        (["qwen38", "--tp", "7"], "E140", "tp 7 does not divide"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("E") else "",
)
def test_a_bad_request_is_one_message_and_status_2(
    run: Run, tmp_path: Path, arguments: list[str], code: str, said: str
) -> None:
    done = run("compile", "--no-aot", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error[{code}]: ")
    assert re.search(said, done.stderr), done.stderr
    assert names(tmp_path) == []


def test_a_config_that_is_not_json_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    done = run("compile", "qwen38", "--no-aot", "--config", ".")
    assert done.returncode == 2
    assert done.stderr.startswith("error[E104]: config.json: is not JSON")


def test_a_folder_with_other_files_is_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "thesis.tex").write_text("mine")
    done = run("compile", DECODER, "--no-aot", "--out", "here")
    assert done.returncode == 2
    assert done.stderr.startswith("error[E160]: ")
    assert "thesis.tex" in done.stderr
    assert names(tmp_path / "here") == ["thesis.tex"]


def test_a_failure_while_writing_leaves_the_old_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    old = json.dumps(dict.fromkeys(output.REPORT_KEYS))
    (folder / "report.json").write_text(old)
    written: list[str] = []

    def full_disk(path: Path, text: str, encoding: str) -> int:
        written.append(path.name)
        if len(written) == 3:
            raise OSError(28, "No space left on device")
        return len(text)

    monkeypatch.setattr(Path, "write_text", full_disk)
    result = CompileResult(
        graph=None,  # type: ignore[arg-type]
        lowered=None,  # type: ignore[arg-type]
        target=None,  # type: ignore[arg-type]
        proof=None,  # type: ignore[arg-type]
        report={},
        plan={},
        kernel_source="",
        graph_text="",
        program_text="",
    )
    with pytest.raises(output.OutputError, match="No space left on device"):
        output.write_folder(folder, result)
    assert names(tmp_path) == ["here"]
    assert (folder / "report.json").read_text() == old


def test_a_failure_while_exchanging_restores_the_old_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("compile", DECODER, "--tp", "2", "--no-aot", "--quiet", "--out", "here")
    run(*arguments)
    replace = os.replace
    moved: list[str] = []

    def fails_second(source: Path, place: Path) -> None:
        moved.append(place.name)
        if len(moved) == 2:
            raise OSError(5, "Input/output error")
        replace(source, place)

    monkeypatch.setattr(os, "replace", fails_second)
    done = run(*arguments)
    assert done.stderr.startswith("error[E160]: ")
    assert moved == ["old", "here", "here"]
    assert names(tmp_path) == ["here"]
    assert names(tmp_path / "here") == FILES


def make_notes(folder: Path) -> None:
    (folder / "report.json").write_text("my own notes")


def make_other_report(folder: Path) -> None:
    (folder / "report.json").write_text('{"model": "of another program"}')


def make_list(folder: Path) -> None:
    (folder / "report.json").write_text("[]")


def make_folder(folder: Path) -> None:
    (folder / "report.json").write_text(json.dumps(dict.fromkeys(output.REPORT_KEYS)))
    (folder / "kernel.py").mkdir()
    (folder / "kernel.py" / "data").write_text("mine")


def make_byte_code(folder: Path) -> None:
    (folder / "report.json").write_text(json.dumps(dict.fromkeys(output.REPORT_KEYS)))
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "thesis.pyc").write_text("mine")


@pytest.mark.parametrize(
    "make", [make_notes, make_other_report, make_list, make_folder, make_byte_code]
)
def test_a_folder_that_only_looks_like_ours_is_left_alone(
    run: Run, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    make(folder)
    before = sorted(folder.rglob("*"))
    done = run("compile", DECODER, "--no-aot", "--out", "here")
    assert done.stderr.startswith("error[E160]: output folder here: ")
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_written(
    run: Run, tmp_path: Path, exists: bool
) -> None:
    if exists:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    arguments = ("compile", DECODER, "--tp", "2", "--no-aot", "--quiet", "--out", "link")
    assert run(*arguments).stderr == ""
    assert run(*arguments).stderr == ""
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "real") == FILES
    assert names(tmp_path) == ["link", "real"]


@pytest.mark.parametrize("out", ["n" * 300, "/proc/nowhere", "loop"])
def test_a_place_where_no_folder_can_be_is_refused(run: Run, tmp_path: Path, out: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    done = run("compile", DECODER, "--no-aot", "--tp", "2", "--out", out)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error[E160]: output folder {out}: ")
    assert names(tmp_path) == ["loop"]


SIBLINGS = """
import mkc
import helper_of_mine

def decoder(step):
    from late_helper_of_mine import ROWS
    table = mkc.param("embed.weight", [ROWS, helper_of_mine.WIDTH])
    return mkc.next_token(mkc.embed(step.tokens, table), table)
"""


@pytest.fixture
def siblings(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "below"
    folder.mkdir()
    (folder / "mine.py").write_text(SIBLINGS)
    (folder / "helper_of_mine.py").write_text("WIDTH = 256")
    (folder / "late_helper_of_mine.py").write_text("ROWS = 2048")
    yield folder
    for name in ("helper_of_mine", "late_helper_of_mine"):
        sys.modules.pop(name, None)


def test_a_file_may_import_its_neighbours(run: Run, siblings: Path) -> None:
    before = list(sys.path)
    done = run("compile", "below/mine.py:decoder", "--emit", "graph")
    assert done.stderr == ""
    assert "@embed.weight: bf16[2048, 256]" in done.stdout
    assert sys.path == before


def test_outputs_do_not_depend_on_the_current_directory(
    run: Run, tmp_path: Path, siblings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--tp", "2", "--no-aot", "--quiet", "--out")
    run("compile", "below/mine.py:decoder", *arguments, str(tmp_path / "first"))
    monkeypatch.chdir(siblings)
    run("compile", "mine.py:decoder", *arguments, str(tmp_path / "second"))
    for name in ("graph.txt", "kernel.py", "plan.json", "program.txt"):
        text = (tmp_path / "first" / name).read_text()
        assert text == (tmp_path / "second" / name).read_text()
        assert str(tmp_path) not in text
    assert "From mine.py:8." in (tmp_path / "first" / "kernel.py").read_text()


@pytest.mark.parametrize(
    ("model", "place"),
    [
        ("qwen38", "models/qwen38.py:"),
        (f"{Path(models.__path__[0], 'examples', 'dense.py')}:decoder", "models/examples/dense.py"),
    ],
)
def test_places_in_shipped_models_are_below_the_package(run: Run, model: str, place: str) -> None:
    text = run("compile", model, "--emit", "kernel").stdout
    assert f"From {place}" in text
    assert models.__path__[0] not in text


def test_a_wrong_option_is_status_2(run: Run) -> None:
    assert run("compile", "qwen38", "--bogus").returncode == 2


def test_what_can_be_named_is_listed(run: Run) -> None:
    listed = [line.split()[0] for line in run("models").stdout.splitlines()]
    assert listed == ["kimi_k3", "qwen38"]
    assert re.search(r"tpu7x:2x2x1 +8 devices", run("targets").stdout)
