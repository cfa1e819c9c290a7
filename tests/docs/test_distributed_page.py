"""docs/distributed.md says what is there."""

from __future__ import annotations

from pathlib import Path
from re import DOTALL
from re import MULTILINE
from re import findall

import mkc.errors
from mkc.cli.main import load_command
from mkc.runtime.distributed import RESTART
from mkc.runtime.distributed.runtime import HEARTBEAT_SECONDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "distributed.md").read_text(encoding="utf-8")


def test_codes_exist() -> None:
    codes = {getattr(mkc.errors, name).code for name in mkc.errors.__all__ if "Error" in name}
    named = set(findall(r"E\d{3}", PAGE))
    assert {f"E35{number}" for number in range(5)} <= named
    assert named <= codes


def test_options_exist() -> None:
    known: set[str] = set()
    for command in ("run", "chat"):
        known |= {one for param in load_command(command).params for one in param.opts}
    assert set(findall(r"--[a-z][a-z-]+", PAGE)) - {"--export"} <= known


def test_files_exist() -> None:
    named = set(findall(r"deploy/[\w.-]+\.(?:sbatch|yaml|py)", PAGE))
    assert named == {f"deploy/{one.name}" for one in (ROOT / "deploy").iterdir() if one.is_file()}


def test_statuses_are_those_of_the_code() -> None:
    (table,) = findall(r"^\| exit status .*?\n\n", PAGE, flags=DOTALL | MULTILINE)
    statuses = findall(r"^\| (\d+)", table, flags=MULTILINE)
    assert statuses == ["0", "2", str(RESTART), "134", "137"]
    assert f"dead {HEARTBEAT_SECONDS} s after" in PAGE
