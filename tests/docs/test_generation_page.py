"""docs/generation.md says what is there, and its example runs."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from re import DOTALL
from re import MULTILINE
from re import findall

import pytest

from mkc.cli.main import load_command
from mkc.errors import BackendError
from mkc.errors import PromptLengthError
from mkc.runtime.generate import Generator
from mkc.runtime.prefix_cache import PrefixCache
from mkc.runtime.request import Request
from mkc.runtime.sampling import SamplingParams
from tests.runtime.fake_backend import FakeBackend

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")


def test_modules_exist() -> None:
    rows = findall(r"^\| `([\w./]+)` \|", PAGE.split("## Backends")[0], flags=MULTILINE)
    assert len(rows) == 6
    assert [one for one in rows if not (ROOT / "mkc" / "runtime" / one).exists()] == []


def test_parameters_exist() -> None:
    table = PAGE.split("## Sampling")[1].split("## Prefix")[0]
    named = set(findall(r"`(\w+)`", table))
    assert named == {one.name for one in fields(SamplingParams)} - {"seed", "alternatives"}


@pytest.mark.parametrize("command", ["run", "chat"])
def test_options_exist(command: str) -> None:
    known = {
        option
        for one in load_command(command).params
        for option in (*one.opts, *one.secondary_opts)
    }
    used = [line for line in PAGE.splitlines() if line.startswith(f"mkc {command} ")]
    assert used
    for line in used:
        assert set(findall(r"(?<= )--?[a-z]+", line)) <= known


def test_error_codes() -> None:
    assert f"({PromptLengthError.code}, with both lengths)" in PAGE
    assert f"({BackendError.code})" in PAGE


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = findall(r"```python\n(.*?)```", PAGE, flags=DOTALL)
    scope = {
        "Generator": Generator,
        "PrefixCache": PrefixCache,
        "Request": Request,
        "SamplingParams": SamplingParams,
        "backend": FakeBackend(),
        "tokenizer": None,
        "prompt": [1, 2, 3],
    }
    exec(code, scope)
    generator = scope["generator"]
    assert isinstance(generator, Generator)
    assert generator.running == ()
