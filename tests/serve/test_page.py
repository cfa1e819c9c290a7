"""The page at `/` in headless Chromium: what it shows, what it fetches, and its chat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from re import fullmatch
from time import sleep

import numpy as np
import pytest
from playwright.sync_api import BrowserContext
from playwright.sync_api import Page

from mkc.cli.served_pictures import KernelPictures
from mkc.runtime.sampling import Array
from serve.keys import read_keys
from serve.settings import Settings
from tests.plan.plans import compiled
from tests.runtime.fake_backend import VOCAB
from tests.runtime.fake_backend import FakeBackend
from tests.serve.running import Running
from tests.serve.running import fake_model
from tests.serve.running import opening
from tests.serve.running import running
from tests.serve.running import until
from tests.viz.browser import chromium

WHOLE = "() => document.querySelector('#messages article:last-child footer')"


@pytest.fixture(scope="module")
def context() -> Iterator[BrowserContext]:
    with chromium(offline=False) as one:
        yield one


@contextmanager
def opened(context: BrowserContext, server: Running) -> Iterator[tuple[Page, list[str]]]:
    """The page, once it knows the model; all it fetches and complains of is in the list."""
    seen: list[str] = []
    page = context.new_page()
    page.on("pageerror", lambda error: seen.append(f"error: {error}"))
    page.on("console", lambda message: seen.append(f"console: {message.text}"))
    page.on("request", lambda request: seen.append(request.url))
    page.goto(server.url)
    page.wait_for_function("() => document.querySelector('#state').textContent !== 'connecting'")
    yield page, seen
    page.close()


def say(page: Page, text: str) -> str:
    """Sends a message and waits for the whole answer; its last line."""
    page.fill("#question", text)
    page.press("#question", "Enter")
    page.wait_for_function(WHOLE)
    return page.inner_text("#messages article:last-child footer")


def test_it_shows_what_runs_and_fetches_nothing_from_elsewhere(
    context: BrowserContext, tiny: Running
) -> None:
    with opened(context, tiny) as (page, seen):
        page.wait_for_function("() => document.querySelector('#model').textContent === 'tiny'")
        assert page.inner_text("#state") == "ready"
        model = tiny.engine.model
        assert model is not None
        for name in ("scheme", "fingerprint"):
            assert page.inner_text(f"#{name}") == getattr(model, name)
        assert page.inner_text("#backend").startswith("reference (no kernel")
        assert page.inner_text("#rows") == "0 of 4"
        assert "no plan to draw" in page.inner_text("#no-plan")
        assert page.is_hidden("#picture")
        assert not [one for one in seen if not one.startswith((f"{tiny.url}/", "data:"))]


def test_a_chat_streams_its_answer_and_tells_of_drafts(
    context: BrowserContext, tiny: Running
) -> None:
    question = "What is 12 + 7?"
    wanted = tiny.ask(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": question}]}
    ).json()
    with opened(context, tiny) as (page, _):
        told = say(page, question)
        drafts = wanted["usage"]["draft"]
        message = wanted["choices"][0]["message"]
        last = page.locator("#messages article:last-child")
        assert last.locator(".content").text_content() == message["content"]
        assert last.locator(".thought").text_content() == message["reasoning_content"]
        assert f"{drafts['accepted']} of {drafts['drafted']} drafts accepted" in told
        assert drafts["accepted"] > 0
        page.wait_for_function("() => document.querySelectorAll('#acceptance tr').length > 1")
        page.wait_for_function("() => page.live.some((one) => one > 0)")
        assert page.inner_text("#rounds") == str(tiny.engine.metrics.rounds)
        rows = page.locator("#acceptance tr").all()
        shown = [int(one.locator("td").nth(2).inner_text()) for one in rows]
        assert shown == tiny.engine.metrics.acceptance
        page.uncheck("#draft")
        page.uncheck("#think")
        assert "no drafts" in say(page, question)
        assert page.locator("#messages article:last-child .thought").count() == 0


def test_what_a_model_writes_is_text(context: BrowserContext, fake: Running) -> None:
    """A question with markup is shown as it was written, and so is an answer."""
    with opened(context, fake) as (page, seen):
        page.fill("#temperature", "0")
        say(page, "<img src=x onerror=console.log(1)>")
        assert page.locator("#messages img").count() == 0
        assert not [one for one in seen if one.startswith(("console", "error"))]


def test_a_failed_request_says_why(context: BrowserContext, fake: Running) -> None:
    with opened(context, fake) as (page, _):
        told = say(page, "x" * 2000)
        assert told.startswith("failed")
        assert "the context 128 positions" in page.inner_text("#messages .error")


def test_stop_ends_the_request(context: BrowserContext, checkpoint: Path) -> None:
    def same_token(history: object) -> Array:
        sleep(0.01)  # no model is so fast that a browser could not follow
        return np.eye(VOCAB, dtype=np.float32)[40]

    model = fake_model(checkpoint, FakeBackend(context=100_000, logits=same_token))
    with running(opening(model)) as server, opened(context, server) as (page, _):
        page.fill("#question", "go on")
        page.press("#question", "Enter")
        until(lambda: server.engine.running == 1)
        page.click("#stop")
        page.wait_for_function(WHOLE)
        assert page.inner_text("#messages article:last-child footer").startswith("stopped")
        until(lambda: server.engine.running == 0)


def test_with_keys_the_page_asks_for_one(context: BrowserContext, checkpoint: Path) -> None:
    settings = Settings(keys=read_keys(["secret"], file=None, environment=None))
    model = fake_model(checkpoint, FakeBackend(context=128))
    with running(opening(model), settings) as server, opened(context, server) as (page, _):
        assert "API key" in page.inner_text("#state")
        page.fill("#key", "secret")
        page.wait_for_function("() => document.querySelector('#state').textContent === 'ready'")
        page.wait_for_function("() => document.querySelector('#model').textContent === 'fake'")


def test_the_plan_of_a_kernel_can_be_looked_at(context: BrowserContext, checkpoint: Path) -> None:
    result = compiled("dense", ranks=1)
    pictures = KernelPictures(result.lowered, result.target)
    model = replace(fake_model(checkpoint, FakeBackend(context=128)), pictures=pictures)
    with running(opening(model)) as server, opened(context, server) as (page, seen):
        for name, title in (("timeline", "timeline of one step"), ("vmem", "VMEM by")):
            page.click(f"#pictures button:has-text('{name}')")
            frame = page.frame_locator("#picture")
            frame.locator(f"h1:has-text('{title}')").wait_for()
        assert server.ask("/static/timeline.html").content == pictures.draw()["timeline.html"]
        assert not [one for one in seen if one.startswith(("console", "error"))]


def test_other_files_are_not_there(fake: Running) -> None:
    for name in ("timeline.html", "index.html", "..%2fapp.py", "nothing.js"):
        assert fake.ask(f"/static/{name}").status_code == 404
    rules = fake.ask("/").headers["content-security-policy"]
    assert fullmatch(r"default-src 'none';.*", rules)
    assert "http" not in rules
