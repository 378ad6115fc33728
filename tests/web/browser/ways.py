"""Steps that several checks of the web page share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

if TYPE_CHECKING:
    from playwright.sync_api import Page

Opened = Callable[..., "Page"]
Stage = dict[str, str]


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


def keyed_page(stage: Stage, opened: Opened, view: str, *, key: str = "", **options: str) -> Page:
    page = opened(f"{stage['keyed']}/#/{view}", **options)
    page.get_by_label("Key", exact=True).fill(key or stage["key"])
    page.locator("dialog").get_by_role("button", name="Sign in").click()
    page.locator("dialog").wait_for(state="hidden")
    return page


def post(stage: Stage, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Send a request to the gateway with keys, by default with the master key; return status and body."""
    sent = {"authorization": f"Bearer {stage['key']}", "content-type": "application/json"}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urlopen(Request(f"{stage['keyed']}{path}", json.dumps(body).encode(), sent)) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def chat(stage: Stage, model: str = "gpt-oss-20b", **headers: str) -> tuple[int, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "say brief"}]}
    return post(stage, "/v1/chat/completions", body, **headers)
