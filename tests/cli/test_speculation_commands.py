"""`mkc run`, `mkc chat` and `mkc bench` with a drafter: golden target and drafter as folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner
from typer.testing import Result

from mkc.cli import generation
from mkc.cli.generation import BackendChoice
from mkc.cli.generation import ModelChoice
from mkc.cli.generation import drafts_by_default
from mkc.cli.main import app
from mkc.cli.speculation import OWN_DRAFTER
from mkc.cli.speculation import DraftChoice
from mkc.cli.speculation import open_drafting
from mkc.cli.speculation import wanted_drafter
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.runtime.backends import OpenedBackend
from mkc.runtime.checkpoint import CONFIG
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.distributed import Launch
from mkc.runtime.generate import Generator
from mkc.runtime.manifest import MANIFEST
from mkc.runtime.request import Request
from mkc.runtime.text import load_tokenizer
from tests.draft_goldens import draft_case
from tests.draft_goldens import draft_weights
from tests.runtime.checkpoints import write_checkpoint
from tests.runtime.fake_backend import FakeBackend
from tests.runtime.text.checkpoints import byte_level_checkpoint

PROMPT = "the cat sat"
LENGTH = 12
DRAFTS = 7

type Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A target with a tokenizer, and its drafter."""
    target = write_checkpoint(tmp_path_factory.mktemp("spec") / "target", "qwen38_mini")
    byte_level_checkpoint(target)
    draft = target.parent / "draft"
    draft.mkdir()
    (draft / CONFIG).write_text(json.dumps(draft_case().meta["config"]))
    save_file(draft_weights(), str(draft / SINGLE))
    return target, draft


@pytest.fixture(scope="module")
def opened() -> Any:
    """`open_drafting` that opens the same folders once: everything is compiled once."""
    found: list[OpenedBackend] = []

    def open_once(*given: Any, **options: Any) -> OpenedBackend:
        if not found:
            found.append(open_drafting(*given, **options))
        return found[0]

    return open_once


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch, opened: Any) -> None:
    monkeypatch.setattr(generation, "open_drafting", opened)
    # Compiling takes most of the time here, and is twice as fast without.
    monkeypatch.setitem(COMPILER_OPTIONS, "xla_backend_optimization_level", 0)


def invoke(folders: Folders, *arguments: str, stdin: str = "") -> Result:
    command, *rest = arguments
    target, draft = folders
    return call(command, target, "--spec", "dflash2", "--draft", str(draft), *rest, stdin=stdin)


def call(command: str, target: Path, *options: str, stdin: str = "") -> Result:
    named = ["--weights", str(target)] if command == "run" else [str(target)]
    usual = ["--context", "128", "--backend", "reference"]
    result = CliRunner().invoke(app, [command, *named, *usual, *options], input=stdin)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def plain_tokens(folders: Folders, opened: Any) -> list[int]:
    """What the target says to the prompt without drafts."""
    backend = opened().backend
    tokenizer = load_tokenizer(folders[0])
    ids = [*tokenizer.prefix_ids, *tokenizer.encode(PROMPT, allow_special=True)]
    run = Generator(backend)
    run.drafts = False
    output = run.generate(Request(tokens=ids, max_tokens=LENGTH))
    assert output.finish.statistics.drafted == 0
    return list(output.tokens)


def test_run(folders: Folders, opened: Any) -> None:
    """Says the scheme, drafts in every round but the first, and emits the target's own tokens."""
    options = ["-p", PROMPT, "--raw", "--json", "--stats", "--max-tokens", str(LENGTH)]
    result = invoke(folders, "run", *options)
    found = json.loads(result.stdout)
    assert found["tokens"] == plain_tokens(folders, opened)
    assert "scheme dflash2 with up to 7 drafts per round" in found["backend"]
    assert found["backend"] in result.stderr
    statistics = found["statistics"]
    assert statistics["drafted"] == DRAFTS * (statistics["rounds"] - 1) > 0
    assert "drafted tokens accepted" in result.stderr


@pytest.fixture
def bringing(folders: Folders, tmp_path: Path) -> Path:
    """The target's folder with the drafter in it."""
    target, draft = folders
    for one in target.iterdir():
        (tmp_path / one.name).symlink_to(one)
    (tmp_path / OWN_DRAFTER).symlink_to(draft)
    return tmp_path


def test_a_model_brings_its_drafter(
    folders: Folders, bringing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used unless `--spec none` says that it is not to be."""
    options = ["-p", PROMPT, "--raw", "--json", "--max-tokens", str(LENGTH)]
    found = json.loads(call("run", bringing, *options).stdout)
    assert "scheme dflash2" in found["backend"]
    assert found["statistics"]["drafted"] > 0

    def plain(*given: Any) -> OpenedBackend:
        return OpenedBackend(backend=FakeBackend(context=128), description="plain", not_finite=())

    monkeypatch.setattr(generation, "open_backend", plain)
    for target, spec in ((bringing, ["--spec", "none"]), (folders[0], [])):
        found = json.loads(call("run", target, *options, *spec).stdout)
        assert found["backend"] == "plain"


def test_whose_drafter_is_wanted(folders: Folders, bringing: Path) -> None:
    target, draft = folders
    own = DraftChoice(name="dflash2", checkpoint=str(bringing / OWN_DRAFTER))
    assert wanted_drafter(None, None, folder=bringing) == own
    assert wanted_drafter(None, None, folder=bringing, by_default=False) is None
    assert wanted_drafter("none", None, folder=bringing) is None
    assert wanted_drafter("dflash2", None, folder=bringing, by_default=False) == own
    other = wanted_drafter("dflash2", str(draft), folder=bringing)
    assert other == DraftChoice(name="dflash2", checkpoint=str(draft))
    for folder in (target, bringing):  # its config says which scheme it is one of
        assert wanted_drafter(None, str(draft), folder=folder, by_default=False) == other
    assert wanted_drafter(None, None, folder=target) is None


def test_packed_weights_say_whether_there_is_a_drafter(tmp_path: Path) -> None:
    """Several processes do not draft unless asked to, which is then refused."""
    choice = ModelChoice(
        model=None,
        weights=None,
        revision=None,
        packed=None,
        backend=BackendChoice.INTERPRET,
        target="tpu7x",
        tp=None,
        context=None,
    )
    assert drafts_by_default(choice, "qwen38")
    assert not drafts_by_default(choice, "file.py:model")
    assert not drafts_by_default(replace(choice, launch=Launch()), "qwen38")
    packed = replace(choice, packed=tmp_path)
    for drafter in ([], ["dflash2", "hidden_size = 256"]):
        (tmp_path / MANIFEST).write_text(json.dumps({"drafter": drafter}))
        assert drafts_by_default(packed, "qwen38") == bool(drafter)


def test_chat_switches_drafts(folders: Folders) -> None:
    """What `/stats` counts shows that it was really so."""
    turns = ["hi", "/stats", "/reset", "/draft off", "hi", "/stats", "/reset"]
    turns += ["/draft on", "hi", "/stats"]
    options = ["--max-tokens", str(LENGTH), "--no-think"]
    shown = invoke(folders, "chat", *options, stdin="\n".join(turns) + "\n").stdout
    on, off, again = shown.split("the conversation is forgotten")
    assert "drafted tokens accepted" in on
    assert "(no draft)" not in on
    assert off.startswith("\ndrafts of dflash2 are off: every round emits one token\n")
    assert off.count("dflash2 are off") == 2, "/stats says it too"
    assert "(no draft)" in off
    assert f"{LENGTH} tokens in {LENGTH - 1} rounds" in off
    assert again.startswith("\ndrafts of dflash2 are on\n")
    assert "drafted tokens accepted" in again


@pytest.mark.long
def test_run_on_the_interpreted_kernel(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two checkpoints, and from one packed folder: what the reference backend says."""
    usual = ["-p", PROMPT, "--raw", "--json", "--max-tokens", str(LENGTH)]
    wanted = json.loads(invoke(folders, "run", *usual).stdout)["tokens"]
    target, draft = map(str, folders)
    monkeypatch.setattr(generation, "open_drafting", open_drafting)
    draft_options = ["--spec", "dflash2", "--draft", draft]
    packed = str(tmp_path / "packed")
    command = ["pack", "qwen38", "--weights", target, *draft_options, "--tp", "1", "--out", packed]
    assert CliRunner().invoke(app, command).exit_code == 0
    options = [*usual, "--context", "128"]
    for more in ([], ["--packed", packed]):
        command = ["run", "--weights", target, *draft_options, "--backend", "interpret", *more]
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 0, (result.output, result.exception)
        found = json.loads(result.stdout)
        assert found["tokens"] == wanted
        assert found["backend"].startswith("interpret backend")
        assert found["statistics"]["drafted"] > 0
        assert "memory of each device" in result.stderr
    refused = CliRunner().invoke(
        app,
        [
            "run",
            "--weights",
            target,
            "--spec",
            "none",
            *options[:2],
            "--backend",
            "interpret",
            "--packed",
            packed,
        ],
    )
    assert refused.exit_code != 0
    assert "'drafter' is 'dflash2'" in str(refused.exception)


def test_bench(folders: Folders) -> None:
    options = ["--prompt-tokens", "8", "--output-tokens", str(LENGTH)]
    found = json.loads(invoke(folders, "bench", *options, "--json").stdout)
    (run,) = found["runs"]
    counted = run["speculation"]
    assert counted["scheme"] == "dflash2"
    assert counted["drafted"] == DRAFTS * (run["rounds"] - 1)
    assert counted["tokens_per_round"] == pytest.approx((LENGTH - 1) / run["rounds"], abs=1e-4)
    assert any("Acceptance is that of random prompts" in one for one in found["notes"])
    shown = " ".join(invoke(folders, "bench", *options).stdout.split())  # a terminal breaks lines
    assert "speculation: dflash2" in shown
    assert f"{counted['accepted']} of {counted['drafted']}" in shown
