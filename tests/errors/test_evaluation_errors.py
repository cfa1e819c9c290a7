"""Evaluation: files that are no tasks, and servers that do not answer."""

from __future__ import annotations

from pathlib import Path

from mkc.errors import ServerAnswerError
from mkc.errors import TaskFileError
from mkc.runtime.served import ServedModel
from mkc.runtime.tasks import read_tasks
from tests.errors.expect import refused


def test_a_file_with_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "1"}\nnothing\n')
    with refused(
        TaskFileError,
        f"{path}: 2 bad lines",
        "line 1: has no 'task'",
        "line 2: is not JSON",
        "one JSON object per line",
        "Correct the file",
    ):
        read_tasks(path)


def test_a_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    with refused(TaskFileError, f"{path}: cannot be read (No such file", "docs/bench.md"):
        read_tasks(path)
    path.write_text("\n")
    with refused(TaskFileError, "there are no tasks"):
        read_tasks(path)


def test_a_server_that_is_not_there() -> None:
    with refused(
        ServerAnswerError, "http://127.0.0.1:9/v1/models: ", "chat completions", "Start the server"
    ):
        ServedModel(url="http://127.0.0.1:9/v1").named()
