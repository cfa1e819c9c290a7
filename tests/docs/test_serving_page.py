"""docs/serving.md says what is there."""

from __future__ import annotations

from pathlib import Path
from re import MULTILINE
from re import findall

from mkc.cli.main import load_command
from mkc.errors import BootCheckError
from serve.app import ROUTES
from serve.failures import STATUS
from serve.gate import FORBIDDEN_HOST
from serve.gate import TOO_LARGE
from serve.metrics import Metrics
from serve.process import CRASHED
from serve.schemas.base import Metadata
from serve.schemas.chat import ChatCompletionRequest
from serve.schemas.completions import CompletionRequest

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_endpoints() -> None:
    listed = findall(r"^\| (GET|POST) \| `([^`]+)` \|", section("Endpoints"), flags=MULTILINE)
    there = [(route.method, path.replace(":path", "")) for route in ROUTES for path in route.paths]
    assert sorted(listed) == sorted(there)


def test_fields() -> None:
    """Every field of completions and chats, and no other."""
    table = section("Fields").split("Thoughts come")[0]
    rows = findall(r"^\| (`.*?) \| (.*) \|$", table, flags=MULTILINE)
    listed = {name for row in rows for cell in row for name in findall(r"`([a-z_]+)`", cell)}
    there = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
    assert there - listed == set()
    assert set(Metadata.model_fields) <= listed
    elsewhere = {"input", "include_usage", "none"}
    assert listed - there == elsewhere


def test_statuses() -> None:
    listed = {int(one) for one in findall(r"^\| (\d{3}) \|", PAGE, flags=MULTILINE)}
    used = {status for status, _ in STATUS.values()} | {400, TOO_LARGE, FORBIDDEN_HOST}
    assert listed == used


def test_figures() -> None:
    listed = set(findall(r"`((?:vllm|mkc):\w+)`", section("Figures")))
    metrics = Metrics()
    assert {one.name for one in metrics.registry.collect()} == listed


def test_options_and_codes() -> None:
    known = {one for param in load_command("serve").params for one in param.opts}
    assert set(findall(r"(?<![\w-])(--[a-z][a-z-]+)", PAGE)) <= known
    assert f"with {BootCheckError.code}" in PAGE
    assert f"exit status {CRASHED}" in PAGE
