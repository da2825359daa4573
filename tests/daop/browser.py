"""A headless Chromium for the tests that look at pages, or the reason why there is none."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

FOCUSED = """(e => e === document.body ? '' : `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`)
(document.activeElement)"""


def missing() -> str:
    """Why no page can be looked at here; '' if one can."""
    if CHROMIUM is None:
        return "no Chromium is installed: apt-get install chromium"
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: pip install -e '.[dev]'"
    return ""


@contextmanager
def chromium() -> Iterator[Any]:
    """A running browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


class Page:
    """A page that was opened, with all that it asked for and complained of."""

    def __init__(self, browser: Any, url: str, width: int, scheme: str = "light") -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def ask(self, script: str) -> Any:
        return self.page.evaluate(script)

    def tab_stops(self, most: int = 400) -> list[str]:
        """What Tab reaches, from the top of the page until it leaves it: tag, class and text."""
        self.page.evaluate("document.body.focus()")
        stops: list[str] = []
        for _ in range(most):
            self.page.keyboard.press("Tab")
            stop = self.page.evaluate(FOCUSED)
            if not stop:
                break
            stops.append(stop)
        return stops
