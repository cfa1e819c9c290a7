"""`mkc eval` with a model that knows some answers, and against a server that does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner
from typer.testing import Result

from mkc.cli import generation
from mkc.cli.main import app
from mkc.errors import ServerAnswerError
from mkc.errors import TaskFileError
from tests.cli.answers import CONTEXT
from tests.cli.answers import Answers

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}},
}
ANSWERS = {
    "sum": "It is 19.",
    "exact": "cat",
    "wrong": "mat",
    "call": (
        "<tool_call>\n<function=add>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>"
    ),
}


def task(number: int, kind: str, check: str, answer: Any, text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    found = {"id": f"t{number}", "task": kind, "messages": messages}
    return {**found, "check": check, "answer": answer, **more}


TASKS = [
    task(0, "sums", "contains", "19", "sum"),
    task(1, "words", "exact", "cat", "exact"),
    task(2, "words", "exact", "cat", "wrong"),
    task(3, "calls", "tool_call", {"name": "add", "arguments": {"a": 12}}, "call", tools=[TOOL]),
    task(4, "long", "contains", "19", "sum " * CONTEXT),
]


def say(prompt: str) -> str:
    """The answer to the last question of a prompt."""
    asked = prompt.rpartition("<|turn|>user\n")[2].partition("<|end|>")[0].strip()
    return f"so\n</think>\n\n{ANSWERS[asked]}<|end|>"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in TASKS))
    return path


@pytest.fixture
def answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Answers:
    found = Answers(folder, say, batch=2, rounds=4)
    monkeypatch.setattr(generation, "open_backend", found.opened)
    return found


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", *arguments])


def local(folder: Path, file: Path, *arguments: str) -> Result:
    slots = ["--context", str(CONTEXT), "--slots", "2"]
    return invoke(str(folder), str(file), *slots, *arguments)


def test_accuracy_of_a_local_model(folder: Path, file: Path, answers: Answers) -> None:
    result = local(folder, file, "--json", "--show-failures")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["solved"], found["total"], found["accuracy"]) == (3, 5, 0.6)
    assert found["model"] == "no model"
    low, high = found["interval_95"]
    assert low < 0.6 < high
    tasks = {kind: (one["solved"], one["total"]) for kind, one in found["tasks"].items()}
    assert tasks == {"calls": (1, 1), "long": (0, 1), "sums": (1, 1), "words": (1, 2)}
    problems = {one["id"]: one["problem"] for one in found["failures"]}
    assert problems.keys() == {"t2", "t4"}
    assert "mat" in problems["t2"]
    assert "E330" in problems["t4"], "a prompt that is too long fails alone"
    assert len(answers.prompts) == 4


def test_table_and_failures(folder: Path, file: Path, answers: Answers) -> None:
    result = local(folder, file, "--limit", "3", "--show-failures", "--quiet")
    assert "t2 (words)" in result.stdout
    assert 'exact "cat"' in result.stdout
    row = next(one for one in result.stdout.splitlines() if "all" in one)
    assert row.replace("│", " ").split()[:4] == ["all", "2", "3", "66.7"]
    assert "t2" not in local(folder, file, "--limit", "3", "--quiet").stdout


@pytest.mark.parametrize(("wanted", "status"), [("0.6", 0), ("0.61", 1)])
def test_exit_status(folder: Path, file: Path, answers: Answers, wanted: str, status: int) -> None:
    assert local(folder, file, "--at-least", wanted).exit_code == status


def test_bad_lines_are_refused_before_anything_runs(
    folder: Path, tmp_path: Path, answers: Answers
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"id": 1}\n{}\n')
    result = local(folder, bad)
    assert isinstance(result.exception, TaskFileError)
    assert "line 1" in result.exception.message
    assert "line 2" in result.exception.message


def test_too_many_names(file: Path) -> None:
    assert invoke("model", str(file), "more").exit_code == 2
    assert invoke("model", str(file), "--url", "http://localhost/v1").exit_code == 2


class Server:
    """A small server of the API.

    Attributes:
      asked: bodies of the requests, and the keys that came with them.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.broken: str | None = None
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, {"data": [{"id": "small"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.asked.append(body)
                server.keys.append(self.headers["Authorization"])
                if server.broken is not None:
                    self._answer(200, {"strange": server.broken})
                    return
                question = body["messages"][-1]["content"]
                if len(question) > CONTEXT:
                    self._answer(400, {"error": {"message": "too long"}})
                    return
                self._answer(200, {"choices": [{"message": server.message(question)}]})

            def _answer(self, status: int, document: Mapping[str, Any]) -> None:
                text = json.dumps(document).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *arguments: Any) -> None:
                """Says nothing."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    @staticmethod
    def message(question: str) -> dict[str, Any]:
        if question != "call":
            return {"role": "assistant", "content": ANSWERS[question]}
        call = {"name": "add", "arguments": '{"a": 12}'}
        return {"content": None, "tool_calls": [{"type": "function", "function": call}]}


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = Thread(target=found.http.serve_forever)
    thread.start()
    yield found
    found.http.shutdown()
    thread.join()
    found.http.server_close()


def test_accuracy_of_a_served_model(server: Server, file: Path) -> None:
    options = ["--json", "--show-failures", "--max-tokens", "50", "--api-key", "abc"]
    result = invoke(str(file), "--url", server.url, *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["model"] == f"small at {server.url}"
    assert (found["solved"], found["total"]) == (3, 5)
    assert {one["id"] for one in found["failures"]} == {"t2", "t4"}
    assert "too long" in found["failures"][1]["problem"]
    assert {one["model"] for one in server.asked} == {"small"}
    assert all(one["max_tokens"] == 50 and one["temperature"] == 0 for one in server.asked)
    with_tools = [one for one in server.asked if "tools" in one]
    assert [one["tools"] for one in with_tools] == [[TOOL]]
    assert set(server.keys) == {"Bearer abc"}


def test_a_server_that_is_none(server: Server, file: Path) -> None:
    server.broken = "nothing"
    result = invoke(str(file), "--url", server.url, "--slots", "1")
    assert isinstance(result.exception, ServerAnswerError)
    assert "nothing" in result.exception.message
    gone = invoke(str(file), "--url", "http://127.0.0.1:9/v1")
    assert isinstance(gone.exception, ServerAnswerError)
    assert "no usable answer" in gone.exception.message
