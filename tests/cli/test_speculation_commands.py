"""`mkc run`, `mkc chat` and `mkc bench` with a drafter: golden target and drafter as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner
from typer.testing import Result

from mkc.cli import generation
from mkc.cli.main import app
from mkc.cli.speculation import open_drafting
from mkc.ir.reference import COMPILER_OPTIONS
from mkc.runtime.backends import OpenedBackend
from mkc.runtime.checkpoint import CONFIG
from mkc.runtime.checkpoint import SINGLE
from mkc.runtime.generate import Generator
from mkc.runtime.request import Request
from mkc.runtime.text import load_tokenizer
from tests.draft_goldens import draft_case
from tests.draft_goldens import draft_weights
from tests.runtime.checkpoints import write_checkpoint
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
    target, draft = map(str, folders)
    options = ["--spec", "dflash2", "--draft", draft, "--context", "128", "--backend", "reference"]
    named = ["--weights", target] if command == "run" else [target]
    result = CliRunner().invoke(app, [command, *named, *options, *rest], input=stdin)
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
