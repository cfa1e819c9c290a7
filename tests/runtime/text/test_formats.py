"""Descriptions of formats: what `docs/tokenizers.md` says about them is true."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from re import DOTALL
from re import findall

import pytest

from mkc import runtime
from mkc.runtime.text import ChannelFormat
from mkc.runtime.text import Prompt
from mkc.runtime.text import TagFormat
from mkc.runtime.text import TextFormat
from mkc.runtime.text import load_format
from mkc.runtime.text.formats import OCCASIONS
from mkc.runtime.text.formats import Channels
from mkc.runtime.text.formats import Instruction
from mkc.runtime.text.formats import Markers
from mkc.runtime.text.formats import Names
from tests.runtime.text.checkpoints import byte_level_checkpoint

PAGE = Path(__file__).parents[3] / "docs" / "tokenizers.md"
TEXT = PAGE.read_text(encoding="utf-8")
KINDS = (TextFormat, TagFormat, ChannelFormat, Markers, Names, Channels, Instruction)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_key_is_on_the_page(kind: type) -> None:
    section = TEXT.split("## Text formats")[1]
    missing = [one.name for one in fields(kind) if f"`{one.name}`" not in section]
    assert missing == []
    assert [one for one in OCCASIONS if f"`{one}`" not in section] == []


def test_the_description_on_the_page(tmp_path: Path) -> None:
    (description,) = findall(r"```json\n(.*?)```", TEXT, DOTALL)
    file = tmp_path / "text_format.json"
    file.write_text(description, encoding="utf-8")
    found = load_format(file)
    assert found == load_format(tmp_path)
    assert found.special_slots == 256
    assert found.tags == TagFormat()
    assert found.channels is not None
    assert found.channels.names == Names()
    assert found.channels.efforts == ("low", "high")
    assert found.channels.instructions == {
        "effort": Instruction(type="effort", text="Think: {value}")
    }


def test_the_tool_call_on_the_page_is_made_of_the_default_tags() -> None:
    tags = TagFormat()
    (shown,) = findall(r"```\n(<tool_call>.*)\n```", TEXT)
    assert shown == (
        f"{tags.call_open}{tags.function_open}NAME{tags.name_end}"
        f"{tags.parameter_open}KEY{tags.name_end}VALUE{tags.parameter_close}"
        f"{tags.function_close}{tags.call_close}"
    )


def test_a_folder_without_a_description_has_the_defaults(tmp_path: Path) -> None:
    assert load_format(tmp_path) == TextFormat()


def test_the_modules_are_those_of_the_package() -> None:
    table = TEXT.split("## Tokenizers")[0]
    package = Path(runtime.__file__).parent / "text"
    modules = {path.name for path in package.glob("*.py")}
    helpers = {"__init__.py", "files.py", "messages.py"}
    assert set(findall(r"`(\w+\.py)`", table)) == modules - helpers


def test_the_program_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = findall(r"```python\n(.*?)```", TEXT, DOTALL)
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    byte_level_checkpoint(folder)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(compile(program, str(PAGE), "exec", dont_inherit=True), scope)
    prompt = scope["prompt"]
    assert isinstance(prompt, Prompt)
    assert prompt.text.startswith("<|turn|>user\nHello<|end|>")
