"""A headless Chromium, and the pages of a plan opened in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

import pytest
from playwright.sync_api import BrowserContext
from playwright.sync_api import Page
from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZE = {"width": 1400, "height": 760}
TIMEOUT_MS = 120_000.0  # a busy machine is slow, not wrong
REQUIRED = "MKC_REQUIRE_BROWSER"  # continuous integration sets it: there a missing browser fails


def executable() -> str:
    """The browser on PATH; skips the test when there is none, unless one is required."""
    found = next(filter(None, map(which, NAMES)), None)
    if found is None:
        reason = f"none of {', '.join(NAMES)} is on PATH"
        assert not os.environ.get(REQUIRED), reason
        pytest.skip(reason)
    return found


@contextmanager
def chromium(*, offline: bool = True) -> Iterator[BrowserContext]:
    """A browser with a profile of its own; `offline` it cannot reach this machine either."""
    path = executable()
    with sync_playwright() as playwright, TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile,
            executable_path=path,
            headless=True,
            args=list(FLAGS),
            viewport=SIZE,
            timeout=TIMEOUT_MS,
        )
        context.set_default_timeout(TIMEOUT_MS)
        context.set_offline(offline)
        yield context
        context.close()


def open_page(context: BrowserContext, file: Path) -> tuple[Page, list[str]]:
    """The page, and a list to which its errors and every file it fetches are added."""
    seen: list[str] = []
    page = context.new_page()
    page.on("pageerror", lambda error: seen.append(f"error: {error}"))
    page.on("console", lambda message: seen.append(f"console: {message.text}"))
    page.on("request", lambda request: seen.append(request.url))
    page.goto(file.as_uri())
    return page, seen
