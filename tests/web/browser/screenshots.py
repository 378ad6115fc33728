"""Screenshots of every view: `make screenshots`. They are stored in docs/images, for README and docs.

The gateway of `tests.web.browser.picture_stage` has a day of requests, teams and keys.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tests.staging import staged
from tests.web.browser.conftest import CHROMIUM, FLAGS

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER = Path(__file__).parents[3] / "docs/images"
SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
TIMEOUT_MS = 60_000


def overview(page: Page) -> None:
    page.get_by_role("button", name="24 h").click()
    page.locator(".plot canvas").nth(5).wait_for()
    page.locator(".is-ready").first.wait_for()
    page.wait_for_timeout(1_500)


def requests(page: Page) -> None:
    page.locator("td time").nth(5).wait_for()


def request(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#/requests?recovery=any")
    page.locator("td .rule").first.wait_for()
    page.locator("td a").first.click()
    page.locator("svg.timeline").wait_for()
    page.wait_for_timeout(500)


def playground(page: Page) -> None:
    page.locator("select option").nth(3).wait_for(state="attached")
    page.get_by_role("button", name="Try the example").click()
    page.locator("article .facts").wait_for()
    # A phone has no room for tokens beside the answer.
    if page.get_by_role("button", name="Tokens").get_attribute("aria-pressed") == "true":
        page.locator(".side .chip", has_text="<|call|>").wait_for()
    page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(500)


def inspector(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#/inspector/example")
    page.locator(".flow .t").nth(8).wait_for()
    page.locator(".flow .t").nth(8).hover()


def models(page: Page) -> None:
    page.locator(".is-failing").wait_for()
    page.get_by_role("region", name="Prices", exact=True).wait_for()
    page.locator("td .is-ready").nth(2).wait_for()


def checks(page: Page) -> None:
    page.locator("tr", has_text="gpu-1").get_by_role("button", name="Checks").click()
    page.get_by_role("region", name="Checks", exact=True).wait_for()


def compare(page: Page) -> None:
    page.get_by_role("button", name="Tokens").click()
    page.locator(".lane-title", has_text="gpu-3").wait_for()
    page.get_by_label("Message", exact=True).fill("Hello!")
    page.keyboard.press("Control+Enter")
    page.locator("article .facts").nth(1).wait_for()
    page.evaluate("scrollTo(0, 0)")


def keys(page: Page) -> None:
    page.locator("meter").first.wait_for()


def spend(page: Page) -> None:
    page.goto(page.url.partition("#")[0] + "#/keys/spend")
    page.locator(".plot canvas").nth(1).wait_for()


def reference(page: Page) -> None:
    page.locator("details code").first.wait_for()


# The address of each view, and the step that waits for its content.
VIEWS: dict[str, tuple[str, Callable[[Page], None]]] = {
    "overview": ("overview", overview),
    "requests": ("requests?model=gpt-oss-120b", requests),
    "request": ("requests", request),
    "playground": ("playground", playground),
    "inspector": ("inspector/example", inspector),
    "models": ("models", models),
    "checks": ("models", checks),
    "compare": ("playground?compare=gpt-oss-120b&on=gpu-1&compare=gpt-oss-20b&on=gpu-3", compare),
    "keys": ("keys/keys", keys),
    "spend": ("keys/spend", spend),
    "reference": ("reference", reference),
}
# Views in other forms than a light desktop.
OTHERS = (("overview", "dark", "desktop"), ("playground", "dark", "phone"), ("requests", "light", "phone"))


def take(browser: Browser, stage: dict[str, str], view: str, theme: str, size: str) -> None:
    address, wait = VIEWS[view]
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme="dark" if theme == "dark" else "light"
    )
    context.set_default_timeout(TIMEOUT_MS)
    context.add_init_script(f"sessionStorage.setItem('unisono.key', '{stage['key']}')")
    page = context.new_page()
    page.goto(f"{stage['gateway']}/#/{address}")
    wait(page)
    suffix = "" if (theme, size) == ("light", "desktop") else f"-{theme}-{size}"
    page.screenshot(path=FOLDER / f"{view}{suffix}.png")
    context.close()


def main() -> None:
    from playwright.sync_api import sync_playwright

    wanted = set(sys.argv[1:]) or set(VIEWS)
    with staged("tests.web.browser.picture_stage") as stage, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for view in VIEWS:
            if view in wanted:
                take(browser, stage, view, "light", "desktop")
        for view, theme, size in OTHERS:
            if view in wanted:
                take(browser, stage, view, theme, size)
        browser.close()


if __name__ == "__main__":
    main()
