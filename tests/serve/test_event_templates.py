"""Events that are put together from parts are those that are written whole."""

from __future__ import annotations

from collections.abc import Callable
from json import loads

import pytest

from serve.outcome import data_event
from serve.schemas.chat import ChatMessage
from serve.schemas.completions import CompletionChoice
from serve.template import EventTemplates

TEXTS = (
    "a",
    "",
    '"quoted" \\ back',
    "\n\t\x00\x1f\x7f",
    "é 漢 🙂\u2028\ufffd",
    "</script>",
    "\ue000",
)


def choice(text: str) -> bytes:
    answer = CompletionChoice(index=1, text=text, logprobs=None, finish_reason=None)
    return data_event(answer.json_bytes())


def thought(text: str) -> bytes:
    return data_event(ChatMessage(reasoning_content=text, reasoning=text).json_bytes())


@pytest.mark.parametrize("write", [choice, thought], ids=["once", "twice"])
@pytest.mark.parametrize("text", TEXTS)
def test_events_are_what_is_written(write: Callable[[str], bytes], text: str) -> None:
    templates = EventTemplates()
    for one in (text, "another", text):
        event = templates.event("kind", one, write)
        assert event == write(one)
        assert one in loads(event.removeprefix(b"data: ")).values()


def test_each_kind_is_written_once() -> None:
    templates = EventTemplates()
    written: list[str] = []

    def write(text: str) -> bytes:
        written.append(text)
        return choice(text)

    texts = [templates.event(kind, "x", write) for kind in (0, 1, 0, 1, (0, str))]
    assert len(written) == 3
    assert set(texts) == {choice("x")}


def test_kinds_are_told_apart() -> None:
    templates = EventTemplates()
    assert templates.event(0, "x", choice) == choice("x")
    assert templates.event(1, "x", thought) == thought("x")
    assert templates.event(0, "y", choice) == choice("y")
