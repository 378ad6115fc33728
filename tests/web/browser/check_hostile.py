"""Markup, scripts, links and invisible characters of a hostile model, in every view."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tests.web.browser.check_troubles import INVISIBLE, VISIBLE_TEXT
from tests.web.browser.ways import Opened, open_setting

if TYPE_CHECKING:
    from playwright.sync_api import Page

# Elements and attributes that only markup of the model could have created.
FOREIGN = (
    "img, script, style, iframe, object, embed, base, meta, math, foreignObject, form[action], [style], [srcdoc], "
    "[onerror], [onload], [onclick], a[href^='javascript:' i], a[href^='data:' i], a[name], #main #main"
)
HEAD = """() => [...document.querySelectorAll('header, header a, header button:not(#key), #offline')].map(node => {
    const { x, y, width, height } = node.getBoundingClientRect();
    return [node.textContent, x, y, width, height, getComputedStyle(node).color];
})"""


def assert_untouched(page: Page, head: list[Any]) -> None:
    """Check that the text of the model stays in its box."""
    assert page.locator("main").locator(FOREIGN).count() == 0
    assert page.evaluate("typeof globalThis.taken") == "undefined"
    assert page.title().endswith(" · Unisono")
    shown = page.evaluate(VISIBLE_TEXT)
    assert [shown[found.start() - 40 : found.end() + 40] for found in INVISIBLE.finditer(shown)] == []
    page.evaluate("scrollTo(0, 0)")
    # Colours and places of the current view's link differ from view to view.
    now = page.evaluate(HEAD)
    assert [part[0] for part in now] == [part[0] for part in head]
    assert now[0][1:5] == head[0][1:5]
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], "the page is wider than the window"


def test_a_hostile_model_changes_nothing_in_any_view(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground?compare=gpt-oss-120b&compare=gpt-oss-20b")
    page.locator("select option[value='gpt-oss-20b']").first.wait_for(state="attached")
    page.locator(".lane-title", has_text="gpt-oss-20b").wait_for()
    for lane in ("Lane B", "Lane A"):
        page.get_by_role("button", name=lane).click()
        open_setting(page, "Tools")
        page.get_by_role("button", name="Weather").click()
    head = page.evaluate(HEAD)
    page.get_by_label("Message", exact=True).fill("say everything")
    page.keyboard.press("Control+Enter")
    page.locator("article .facts").nth(1).wait_for()
    page.locator(".side .chip", has_text="<|call|>").nth(1).wait_for()
    assert_untouched(page, head)
    answers = page.locator("article.answer")
    for lane in (0, 1):
        for kind in ("analysis", "call"):
            text = answers.nth(lane).locator(f".of-{kind} .part-body").first.inner_text()
            assert "<script>taken=1</script>" in text
            assert "U+202E" in text
        boxes = [page.locator(".lane").nth(lane).bounding_box(), answers.nth(lane).bounding_box()]
        assert boxes[0] is not None
        assert boxes[1] is not None
        assert boxes[1]["x"] + boxes[1]["width"] <= boxes[0]["x"] + boxes[0]["width"] + 1
    # The code of the next request contains the answer too.
    page.get_by_text("The same request as code").click()
    page.get_by_label("The request as code").get_by_text("taken=1").first.wait_for()
    assert page.locator("main").locator(FOREIGN).count() == 0
    page.get_by_text("The same request as code").click()
    answers.first.get_by_role("link", name="Inspect its tokens").click()
    page.locator(".said.of-call .t").first.wait_for()
    page.locator("td .item-text", has_text="taken=1").first.wait_for()
    assert_untouched(page, head)
    page.get_by_role("link", name="Request", exact=True).click()
    page.locator("svg.timeline").wait_for()
    assert_untouched(page, head)
    for view, content in {"Requests": "td time", "Overview": ".plot canvas", "Models": ".is-ready"}.items():
        page.get_by_role("navigation", name="Views").get_by_role("link", name=view, exact=True).click()
        page.locator(content).first.wait_for()
        assert page.locator("main").locator(FOREIGN.replace("[style], ", "")).count() == 0
        assert page.evaluate("typeof globalThis.taken") == "undefined"
    # A restored chat is drawn by other code.
    page.reload()
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Playground").click()
    page.get_by_role("button", name=re.compile("say everything")).click()
    page.locator("article .facts").nth(1).wait_for()
    assert_untouched(page, head)
