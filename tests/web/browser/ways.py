"""Steps that several checks of the web page share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

Opened = Callable[..., "Page"]


def ask(page: Page, text: str, **fields: str) -> Any:
    """Send a request in the playground, and return the complete answer."""
    for label, value in fields.items():
        page.get_by_label(label, exact=True).select_option(value)
    page.locator("select option[value='gpt-oss-120b']").first.wait_for(state="attached")
    before = page.locator("article").count()
    page.get_by_label("Text of message 1").fill(text)
    page.get_by_role("button", name="Send").click()
    page.locator("article").nth(before).wait_for()
    answer = page.locator("article").first
    answer.locator(".facts").wait_for()
    return answer


def keyed_page(stage: dict[str, str], opened: Opened, view: str) -> Page:
    page = opened(f"{stage['keyed']}/#/{view}")
    page.get_by_label("Key", exact=True).fill(stage["key"])
    page.get_by_role("button", name="Use this key").click()
    page.locator("dialog").wait_for(state="hidden")
    return page
