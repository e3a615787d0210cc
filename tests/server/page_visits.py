"""Chromium, driven by Playwright, for tests of the web page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, expect, sync_playwright

PATIENCE_MS: Final = 60_000
_NAMES: Final = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a browser; the test is skipped where there is none."""
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("no Chromium; scripts/install_test_packages.sh installs it, or says why it cannot")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


class Visits:
    """Opens pages, each in a context of its own. No page may log an error or call another host; the browser's
    own lines on answers that are no success do not count."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._contexts: list[BrowserContext] = []
        self._problems: list[str] = []

    def __call__(
        self,
        url: str,
        *,
        width: int = 1280,
        height: int = 800,
        view: str = "chat",
        keys: tuple[str, str] = ("", ""),
    ) -> Page:
        context = self._browser.new_context(
            viewport={"width": width, "height": height}, reduced_motion="reduce"
        )
        self._contexts.append(context)
        if any(keys):
            kept = json.dumps(json.dumps(dict(zip(("api", "admin"), keys, strict=True))))
            context.add_init_script(f"sessionStorage['loraplex.keys'] ??= {kept}")
        page = context.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.on("pageerror", lambda error: self._problems.append(str(error)))
        page.on("console", self._on_line)
        page.on(
            "request",
            lambda request: None if request.url.startswith(url) else self._problems.append(request.url),
        )
        page.goto(f"{url}/#{view}")
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()
        assert not self._problems

    def _on_line(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and "Failed to load resource" not in message.text:
            self._problems.append(message.text)


def ask_now(page: Page) -> None:
    """Have the page ask the server at once, as it does when its tab is shown again."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def fits(page: Page) -> bool:
    """Return whether the page and its tables are as wide as the window at most, with nothing cut off."""
    found: bool = page.evaluate(
        """() => document.documentElement.scrollWidth <= innerWidth &&
            [...document.querySelectorAll(".table-box")].every((box) => box.scrollWidth <= box.clientWidth)"""
    )
    return found
