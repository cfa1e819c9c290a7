"""`mkc serve --backend interpret`: one kernel behind the official client and behind the page."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from json import loads
from re import search
from typing import Any

import httpx
import openai
import pytest

from tests.serve.running import until
from tests.viz.browser import chromium

OPTIONS = "--backend interpret --port 0 --context 128 --rows 2"
QUESTION: Any = [{"role": "user", "content": "What is 12 + 7?"}]
ANSWER = "19"
PATIENCE = 900  # seconds for one answer of an interpreted kernel
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [1, 22]}, "y": {"type": "boolean"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server in a process of its own, as users start it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mkc.cli.main", "serve", *OPTIONS.split()],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        said = ""
        while "XLA cache" not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        found = search(r"serving +(http://127\.0\.0\.1:\d+)/v1\n", said)
        assert found is not None
        assert "interpret backend" in said
        until(lambda: httpx.get(f"{found[1]}/health").status_code == 200)
        yield found[1]
        process.terminate()
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.stderr.close()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    ) as one:
        yield one


def test_it_says_that_a_kernel_runs(url: str) -> None:
    told = httpx.get(f"{url}/version").json()
    assert (told["backend"], told["kernel"]) == ("interpret", "one kernel, interpreted")
    assert told["scheme"] != "none"
    assert {"timeline.html", "vmem.html"} <= set(told["pictures"])


def test_a_chat_with_drafts_and_without(client: openai.OpenAI) -> None:
    answers = []
    for draft in (True, False):
        found: Any = client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=60, extra_body={"draft": draft}
        )
        answers.append(found.choices[0].message)
        assert (found.usage.draft["accepted"] > 0) is draft
    assert answers[0].content == ANSWER
    assert answers[0] == answers[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_form_with_drafts(client: openai.OpenAI, temperature: float) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    found: Any = client.chat.completions.create(
        model="tiny",
        messages=QUESTION,
        max_tokens=40,
        temperature=temperature,
        seed=2,
        response_format=form,
        reasoning_effort="none",
    )
    (choice,) = found.choices
    assert choice.finish_reason == "stop"
    value = loads(choice.message.content)
    assert value.keys() == {"x", "y"}
    assert value["x"] in (1, 22)
    assert found.usage.draft["drafted"] > 0


def test_the_page_shows_the_kernel_and_chats(url: str) -> None:
    with chromium(offline=False) as context:
        page = context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        page.wait_for_function("() => document.querySelector('#state').textContent === 'ready'")
        assert page.inner_text("#backend").startswith("interpret")
        page.click("#pictures button:has-text('timeline')")
        frame = page.frame_locator("#picture")
        frame.locator("h1:has-text('timeline of one')").wait_for(timeout=120_000)
        page.fill("#question", "What is 12 + 7?")
        page.press("#question", "Enter")
        whole = "() => document.querySelector('#messages article:last-child footer')"
        page.wait_for_function(whole, timeout=1e3 * PATIENCE)
        assert page.inner_text("#messages article:last-child .content") == ANSWER
        assert "drafts accepted" in page.inner_text("#messages article:last-child footer")
        assert not errors
