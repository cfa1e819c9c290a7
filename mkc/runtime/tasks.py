"""Tasks with answers that can be checked: one JSON object per line of a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any
from typing import Literal
from typing import get_args

from mkc.errors import BadLine
from mkc.errors import TaskFileError
from mkc.runtime.text import Reply

type Check = Literal["exact", "contains", "json", "tool_call"]

CHECKS: tuple[Check, ...] = get_args(Check.__value__)
KEYS: Mapping[str, tuple[type, str]] = {
    "id": (str, "text"),
    "task": (str, "text"),
    "messages": (list, "a list"),
    "check": (str, "text"),
    "answer": (object, "anything"),
}
OPTIONAL_KEYS: Mapping[str, tuple[type, str]] = {"tools": (list, "a list")}
CALL_KEYS = {"name": str, "arguments": dict}
NORMAL_QUANTILE = 1.959964  # 97.5 %: an interval of 95 %


@dataclass(frozen=True, kw_only=True)
class Task:
    """One question.

    Attributes:
      kind: results are counted by it; the key `task` of the file.
      messages, tools: as in the OpenAI API.
      check: how a reply is compared with `answer`.
      answer: text for `exact` and `contains`, any JSON value for `json`, an object with `name` and
        `arguments` for `tool_call`.
    """

    id: str
    kind: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    check: Check
    answer: Any

    def problem(self, reply: Reply) -> str | None:
        """Why a reply does not solve the task; None when it does."""
        content = reply.content.strip()
        match self.check:
            case "exact":
                return None if content == self.answer.strip() else f"said {content!r}"
            case "contains":
                return None if self.answer in content else f"said {content!r}"
            case "json":
                return _json_problem(content, self.answer)
            case "tool_call":
                return _call_problem(reply, self.answer)


def read_tasks(path: Path, *, limit: int | None = None) -> list[Task]:
    """The tasks of a file, the first `limit` of them; empty lines are skipped.

    Raises:
      TaskFileError: the file cannot be read, or has bad lines; it names all of them.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise TaskFileError(path=path, problem=f"cannot be read ({reason})") from error
    tasks: list[Task] = []
    bad: list[BadLine] = []
    known: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        found = _task(line)
        if isinstance(found, Task) and found.id in known:
            found = f"id {found.id!r} is that of line {known[found.id]}"
        if isinstance(found, str):
            bad.append(BadLine(number=number, problem=found))
            continue
        known[found.id] = number
        tasks.append(found)
    if bad:
        raise TaskFileError(path=path, problem=f"{len(bad)} bad lines", lines=bad)
    if not tasks:
        raise TaskFileError(path=path, problem="there are no tasks")
    return tasks[:limit]


def interval(solved: int, total: int) -> tuple[float, float]:
    """Where the true accuracy lies with 95 % confidence: Wilson's score interval.

    Source: E. B. Wilson, Probable inference, the law of succession, and statistical inference,
    1927.
    """
    assert 0 <= solved <= total >= 1
    z = NORMAL_QUANTILE
    share = solved / total
    centre = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * sqrt(share * (1 - share) / total + z * z / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def _task(line: str) -> Task | str:
    """The task of a line, or what is wrong with it."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"is not JSON ({error})"
    if not isinstance(entry, dict):
        return "is JSON, but not an object"
    for key, (kind, name) in {**KEYS, **OPTIONAL_KEYS}.items():
        if key in KEYS and key not in entry:
            return f"has no '{key}'"
        if key in entry and not isinstance(entry[key], kind):
            return f"'{key}' is {_shown(entry[key])}, not {name}"
    unknown = sorted(entry.keys() - KEYS.keys() - OPTIONAL_KEYS.keys())
    if unknown:
        return f"has an unknown key '{unknown[0]}'"
    if not entry["messages"] or not all(isinstance(one, dict) for one in entry["messages"]):
        return "'messages' is not a list of objects, or is empty"
    if entry["check"] not in CHECKS:
        return f"'check' is {entry['check']!r}, not one of {', '.join(CHECKS)}"
    answer = entry["answer"]
    if entry["check"] in ("exact", "contains") and not (isinstance(answer, str) and answer):
        return f"'answer' is {_shown(answer)}, not text to compare with"
    if entry["check"] == "tool_call" and not _is_call(answer):
        return f"'answer' is {_shown(answer)}, not an object with a 'name' and 'arguments'"
    return Task(
        id=entry["id"],
        kind=entry["task"],
        messages=entry["messages"],
        tools=entry.get("tools", []),
        check=entry["check"],
        answer=answer,
    )


def _is_call(answer: object) -> bool:
    return (
        isinstance(answer, dict)
        and answer.keys() == CALL_KEYS.keys()
        and all(isinstance(answer[key], kind) for key, kind in CALL_KEYS.items())
    )


def _json_problem(content: str, answer: Any) -> str | None:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return f"said {content!r}, which is not JSON"
    return None if same_json(found, answer) else f"said {content!r}"


def _call_problem(reply: Reply, answer: Mapping[str, Any]) -> str | None:
    if len(reply.tool_calls) != 1:
        return f"made {len(reply.tool_calls)} tool calls and said {reply.content.strip()!r}"
    call = reply.tool_calls[0]
    shown = f"called {call.name} with {call.arguments}"
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return f"{shown}, which is not JSON"
    same = call.name == answer["name"] and same_json(arguments, answer["arguments"])
    return None if call.complete and same else shown


def same_json(left: Any, right: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, but not true; the order of keys does not count."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    return bool(left == right)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
