"""What `docs/define-a-model.md` shows is what the example says, and it works."""

from __future__ import annotations

from pathlib import Path
from re import DOTALL
from re import findall

import pytest

import mkc
from mkc.cli.main import main
from mkc.errors import ShapeError
from mkc.ir.graph import Repeat
from models.examples import dense

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "define-a-model.md").read_text(encoding="utf-8")
SNIPPETS = findall(r"```python\n(.*?)```", TEXT, DOTALL)
INDENTED = [snippet for snippet in SNIPPETS if snippet.startswith(" ")]
PROGRAMS = [snippet for snippet in SNIPPETS if not snippet.startswith(" ")]


def test_every_snippet_is_a_part_of_the_example() -> None:
    source = Path(dense.__file__).read_text(encoding="utf-8")
    assert len(INDENTED) >= 5
    for snippet in INDENTED:
        assert snippet in source, snippet


def test_the_program_prints_the_graph(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = PROGRAMS
    exec(compile(program, "define-a-model.md", "exec", dont_inherit=True), {})
    printed = capsys.readouterr().out
    assert printed.startswith('graph "dense" {')
    assert "repeat layers x 8 " in printed


def test_the_command_writes_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (command,) = findall(r"```\n\.venv/bin/(mkc compile .*)\n```", TEXT)
    argv = command.replace("models/", f"{ROOT}/models/").split()
    monkeypatch.chdir(tmp_path)
    # Without the TPU compiler: what it says of the kernel is not this page's matter.
    monkeypatch.setattr("sys.argv", [*argv, "--no-aot"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    assert "build/dense" in capsys.readouterr().out
    (sentence,) = findall(r"writes (.*?) to `build/dense`", TEXT, DOTALL)
    written = sorted(path.name for path in (tmp_path / "build" / "dense").iterdir())
    assert written == sorted(findall(r"`([\w.]+)`", sentence))


def test_the_layers_are_one_region() -> None:
    graph = mkc.trace(dense.decoder, name="dense", batch=1, context=1024)
    (region,) = (item for item in graph.body.items if isinstance(item, Repeat))
    assert region.count == dense.LAYERS


def test_the_message_is_what_mkc_says() -> None:
    def wrong(step: mkc.Step) -> mkc.Outputs:
        h = mkc.embed(step.tokens, mkc.param("embed.weight", [16, 512]))
        h = mkc.linear(h, mkc.param("up.weight", [1536, 500]))
        return mkc.next_token(h, mkc.param("head.weight", [16, 1536]))

    with pytest.raises(ShapeError) as raised:
        mkc.trace(wrong, name="wrong", batch=1, context=16)
    (shown,) = findall(r"error\[E201\]: my_model\.py:31: (.*)", TEXT)
    assert raised.value.message.endswith(shown)


def test_links_lead_somewhere() -> None:
    for page in ("define-a-model.md", "graph-ir.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for link in findall(r"\]\(([^)]+)\)", text):
            assert (ROOT / "docs" / link).exists(), f"{page}: {link}"
