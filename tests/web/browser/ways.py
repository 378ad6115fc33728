"""Steps that several checks of the web page share."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Page

Opened = Callable[..., "Page"]


def ask(page: Page, text: str, **fields: str) -> Any:
    """Send a message in the playground, and return the complete answer."""
    for label, value in fields.items():
        page.get_by_label(label, exact=True).select_option(value)
    page.locator("select option[value='gpt-oss-120b']").first.wait_for(state="attached")
    before = page.locator("article.answer").count()
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()
    answer = page.locator("article.answer").nth(before)
    answer.locator(".facts").wait_for()
    return answer


def open_setting(page: Page, name: str) -> None:
    """Open a group of the settings of the playground."""
    page.locator(".settings summary", has_text=re.compile(f"^{name}$")).click()


def keyed_page(stage: dict[str, str], opened: Opened, view: str, **options: str) -> Page:
    page = opened(f"{stage['keyed']}/#/{view}", **options)
    page.get_by_label("Key", exact=True).fill(stage["key"])
    page.locator("dialog").get_by_role("button", name="Sign in").click()
    page.locator("dialog").wait_for(state="hidden")
    return page
