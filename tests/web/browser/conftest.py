"""Fixtures: the gateways, a browser, and pages in every theme and size.

A test fails if its page has a script error, violates its security policy, or sends a request to another origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.staging import staged

if TYPE_CHECKING:
    # The project's own pytest reads this file too, and has no browser.
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

TIMEOUT_MS = 20_000
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
# Messages of the browser for every error status and for a refused connection. Some tests cause them.
EXPECTED_MESSAGES = (
    "Failed to load resource: the server responded with a status of",
    "Failed to load resource: net::ERR_CONNECTION_REFUSED",
)


@pytest.fixture(scope="session")
def stage() -> Iterator[dict[str, str]]:
    """Yield the addresses of the gateways and of their backend by name, and the key of the gateway with one."""
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
    """Yield a function that opens an address in a page with its own profile."""
    contexts = []
    faults: list[str] = []

    def opened(address: str, *, theme: Any = "light", size: str = "desktop") -> Page:
        width, height = SIZES[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)
        contexts.append(context)
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        origin = "/".join(address.split("/")[:3])

        def on_message(message: ConsoleMessage) -> None:
            if message.type in {"error", "warning"} and not message.text.startswith(EXPECTED_MESSAGES):
                faults.append(message.text)

        def on_request(request: Request) -> None:
            if not request.url.startswith((f"{origin}/", "data:")):
                faults.append(f"request to {request.url}")

        page.on("console", on_message)
        page.on("request", on_request)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(address)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults
