"""The stage, a browser, and pages of it in every theme and width. Whatever a page does that it should not, an error of
its own, something its policy forbids, a request to anybody else, fails the check that it happened in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.staging import staged

if TYPE_CHECKING:
    # The project's own pytest reads this file too, and has no browser.
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

PATIENCE_MS = 20_000
CHROMIUM = "/usr/bin/chromium"
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SIZES = {"desktop": (1360, 900), "phone": (390, 844)}
REFUSED = "Failed to load resource: the server responded with a status of"
"""What a browser says of every answer that is no success; some are none on purpose."""


@pytest.fixture(scope="session")
def stage() -> Iterator[dict[str, str]]:
    """Addresses by the names of the gateways, and the key of the one that wants it."""
    with staged("tests.web.browser.stage") as addresses:
        yield addresses


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[..., Page]]:
    """A page at an address; it has a profile of its own."""
    contexts = []
    wrong: list[str] = []

    def opened(address: str, *, theme: Any = "light", size: str = "desktop") -> Page:
        wide, high = SIZES[size]
        context = browser.new_context(viewport={"width": wide, "height": high}, color_scheme=theme)
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        origin = address.partition("/#")[0].rstrip("/")

        def said(message: ConsoleMessage) -> None:
            if message.type in {"error", "warning"} and not message.text.startswith(REFUSED):
                wrong.append(message.text)

        def asked(request: Request) -> None:
            if not request.url.startswith((f"{origin}/", "data:")):
                wrong.append(f"asked {request.url}")

        page.on("console", said)
        page.on("request", asked)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong
