"""The web page in a real browser: themes, sizes, the keyboard, and a hostile model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.web.browser.ways import Opened, ask, keyed_page

if TYPE_CHECKING:
    from playwright.sync_api import Page

SIZES = ("desktop", "phone")
THEMES = ("light", "dark")


def violations_of(page: Page) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page).response["violations"]
    return [
        f"{violation['id']}: {violation['help']} {[node['html'][:200] for node in violation['nodes'][:3]]}"
        for violation in violations
    ]


def assert_accessible(page: Page) -> None:
    assert violations_of(page) == []
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], "the page is wider than the window"


def test_the_overview_fits_a_small_phone(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["open"])
    page.set_viewport_size({"width": 320, "height": 640})
    page.locator(".plot").first.wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 320


def test_the_api_reference_opens_at_docs(stage: dict[str, str], opened: Opened) -> None:
    """`opened` also fails for a request to another host and for a violation of the security policy."""
    page = opened(f"{stage['open']}/docs")
    page.get_by_role("heading", name="API reference").wait_for()
    page.locator("summary", has_text="/v1/embeddings").first.click()
    page.get_by_text("encoding_format").first.wait_for()
    page.locator("summary", has_text="/v1/chat/completions").first.click()
    page.get_by_text("max_completion_tokens").first.wait_for()
    assert_accessible(page)


def test_the_tiles_of_the_overview_are_in_one_row(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["open"])
    # The width of a laptop without the scroll bar.
    page.set_viewport_size({"width": 1265, "height": 800})
    page.locator(".sum", has_text="Spend").wait_for()
    tops = page.evaluate("[...document.querySelectorAll('.sum')].map(tile => tile.offsetTop)")
    assert len(tops) == 7
    assert len(set(tops)) == 1


def test_each_block_of_an_answer_has_the_direction_of_its_text(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    body = ask(page, "say hebrew").locator(".of-final .part-body")
    directions = "nodes => nodes.map(node => getComputedStyle(node).direction)"
    assert body.locator("p").evaluate_all(directions) == ["rtl", "ltr"]
    assert body.locator("li").evaluate_all(directions) == ["rtl", "rtl"]
    assert body.locator("th, td").evaluate_all(directions) == ["rtl", "ltr", "rtl", "ltr"]


# -- every view


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", THEMES)
def test_every_view_is_accessible_and_fits_the_window(
    stage: dict[str, str], opened: Opened, theme: str, size: str
) -> None:
    page = opened(f"{stage['open']}/#/playground", theme=theme, size=size)
    if size == "phone":
        page.get_by_text("Settings", exact=True).click()
    for name in ("Tools", "MCP servers", "Response format", "More parameters"):
        page.locator(".settings summary", has_text=re.compile(f"^{name}$")).click()
    page.get_by_role("button", name="Weather").click()
    page.get_by_text("The same request as code").click()
    page.get_by_label("Response format", exact=True).select_option("json_schema")
    assert_accessible(page)
    page.get_by_label("Response format", exact=True).select_option("text")
    ask(page, "say weather")
    ask(page, "say mended")
    ask(page, "say markdown")
    assert_accessible(page)
    page.get_by_role("link", name="Inspect its tokens").nth(1).click()
    page.locator(".flow .t").first.wait_for()
    page.locator("summary", has_text="Prompt").click()
    page.locator(".of-system .t").first.wait_for()
    assert_accessible(page)
    for view, content in VIEWS.items():
        page.get_by_role("navigation", name="Views").get_by_role("link", name=view, exact=True).click()
        page.locator(content).first.wait_for()
        assert_accessible(page)
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Requests").click()
    page.locator("td a").first.click()
    page.locator("svg.timeline").wait_for()
    assert_accessible(page)


# A part of each view that exists once its data is there.
VIEWS = {
    "Overview": ".plot canvas",
    "Requests": "td time",
    "Models": ".is-ready",
    "Keys": ".empty",
    "API": "details code",
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", THEMES)
def test_keys_and_teams_are_accessible(stage: dict[str, str], opened: Opened, theme: str, size: str) -> None:
    page = keyed_page(stage, opened, "keys/keys", theme=theme, size=size)
    page.get_by_role("button", name="Create a key").click()
    page.get_by_label("Name", exact=True).fill(f"{theme} {size}")
    page.get_by_label("Budget, USD", exact=True).fill("20")
    assert_accessible(page)
    page.get_by_role("button", name="Create", exact=True).click()
    page.locator(".secret").wait_for()
    assert_accessible(page)
    page.get_by_role("button", name="Done").click()
    page.locator("td", has_text=f"{theme} {size}").first.wait_for()
    assert_accessible(page)
    for tab, content in {"Teams": ".empty, td", "Spend": ".plot canvas", "Audit": "td"}.items():
        page.get_by_role("navigation", name="Parts").get_by_role("link", name=tab).click()
        page.locator(content).first.wait_for()
        assert_accessible(page)


def test_the_overview_shows_ready_and_failing_deployments(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["open"])
    page.locator(".is-ready").first.wait_for()
    page.locator(".is-failing").wait_for()
    table = page.get_by_role("region", name="Deployments", exact=True).inner_text()
    assert "gpt-oss-120b 131,072 tokens of context · 1 of 2 ready · also gpt-4o" in table
    assert "vllm-1" in table
    assert "connection refused by 127.0.0.1:" in table
    assert "<b>gpu</b>U+202E1- vllm" in table


def test_the_chosen_theme_persists(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["open"], theme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.get_by_role("button", name="Theme: auto").click()
    assert page.evaluate(background) != dark
    page.reload()
    assert page.evaluate(background) != dark
    page.get_by_role("button", name="Theme: light").click()
    assert page.evaluate(background) == dark


@pytest.mark.parametrize("address", ["#/nowhere", "#/constructor", "#/overview/%", "#/__proto__", "#"])
def test_an_unknown_address_opens_the_overview(stage: dict[str, str], opened: Opened, address: str) -> None:
    page = opened(f"{stage['open']}/{address}")
    page.get_by_role("heading", name="Overview").wait_for()


def test_an_unknown_filter_is_removed_from_the_address(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/requests?outcome=zzz&failed=true")
    page.get_by_role("heading", name="Requests").wait_for()
    page.wait_for_url("**/#/requests?failed=true")


# -- the inspector


PASTED: dict[str, tuple[str, str, str]] = {
    "text": ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hi", "Harmony text", "missing-end"),
    "ids": ("[200005, 35644, 200008, 12194, 200002, 200002]", "6 token ids", "trailing-stop"),
    "invalid ids": ("-1 999999 5", "3 token ids", "bad-token"),
    "markup": ("<img src=x onerror=alert(1)>", "Harmony text", "no-markup"),
}


@pytest.mark.parametrize(("text", "kind", "rule"), PASTED.values(), ids=PASTED)
def test_pasted_input_is_recognised_and_explained(
    stage: dict[str, str], opened: Opened, text: str, kind: str, rule: str
) -> None:
    page = opened(f"{stage['open']}/#/inspector")
    page.get_by_text("Inspect something else").click()
    page.get_by_label("Or paste a recording").fill(text)
    assert page.get_by_text(f"Read as {kind}").is_visible()
    page.get_by_role("button", name="Inspect").click()
    page.locator(".repair", has_text=rule).first.wait_for()
    page.locator(".repairs button", has_text=rule).first.click()
    assert page.evaluate("document.activeElement.className") == "repair"


def test_a_recording_can_be_opened_from_a_file(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    ask(page, "say mended").get_by_role("link", name="Inspect its tokens").click()
    page.locator(".flow .t").first.wait_for()
    id = page.url.rpartition("/")[2]
    recording = page.request.get(f"{stage['open']}/v1/traces/{id}").body()
    other = opened(f"{stage['open']}/#/inspector")
    file = {"name": "bug.json", "mimeType": "application/json", "buffer": recording}
    other.get_by_label("Open a file from").set_input_files(file)
    other.locator("h2", has_text=id).wait_for()
    # The view may have opened the same recording before, and it shows no tokens while the file is read.
    other.locator(".repair").nth(1).wait_for()
    assert other.locator(".repair").count() == 2
    other.get_by_text("Inspect something else").click()
    other.get_by_label("Or paste a recording").fill('{"object": "unisono.trace", "version": 1}')
    other.get_by_role("button", name="Inspect").click()
    other.get_by_text("This recording is damaged.").wait_for()


def test_the_command_of_a_fork_can_be_copied(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    ask(page, "say mended").get_by_role("link", name="Inspect its tokens").click()
    page.get_by_text("Fork this answer").click()
    page.get_by_label("Fork at generated token").fill("2")
    page.get_by_role("button", name="Copy fork command").click()
    page.get_by_text("fork command copied").wait_for()
    id = page.url.rpartition("/")[2]
    assert page.evaluate("navigator.clipboard.readText()") == f"unisono trace {id} --fork-at 2"


def test_an_answer_can_be_forked(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    ask(page, "say brief").get_by_role("link", name="Inspect its tokens").click()
    page.get_by_text("Fork this answer").click()
    page.get_by_role("button", name="Fork", exact=True).click()
    page.locator("p.well", has_text="The fork is the same as the recording.").wait_for()
    recorded, forked = (
        page.get_by_role("region", name=f"{name} answer").locator(".flow") for name in ("Recorded", "Forked")
    )
    assert recorded.inner_text() == forked.inner_text() != ""
    page.get_by_label("Fork at generated token").fill("100000")
    page.get_by_role("button", name="Fork", exact=True).click()
    page.get_by_text("there is no token 100000").wait_for()


def test_recordings_can_be_found_and_turned(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    ask(page, "say mended")
    ask(page, "say hello").get_by_role("link", name="Inspect its tokens").click()
    page.get_by_role("link", name="Older").click()
    # The text of an item is read from its tokens.
    page.locator("td .item-text", has_text="It is 42.").wait_for()
    page.keyboard.press("k")
    page.locator("td .item-text", has_text="Hello!").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("unknown-channel")
    found = page.get_by_role("region", name="Recordings").locator("li")
    assert "unknown-channel" in found.nth(1).inner_text()
    page.keyboard.press("Enter")
    page.locator("td .item-text", has_text="It is 42.").wait_for()
    page.get_by_role("link", name="Example").click()
    page.locator(".repair", has_text="missing-end").wait_for()


# -- by keyboard


def test_links_and_tokens_can_be_reached_by_keyboard(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["open"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("?")
    page.get_by_role("heading", name="Keyboard shortcuts").wait_for()
    assert_accessible(page)
    page.keyboard.press("Escape")
    page.get_by_role("link", name="Unisono, overview").focus()
    for _ in range(4):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Inspector").wait_for()
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("link", name="Example").press("Enter")
    page.locator(".flow .t").first.wait_for()
    flow = page.get_by_role("group", name=re.compile("Output"))
    flow.focus()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        flow.press(key)
    assert "token 1 · id 35644" in page.locator(".readout").last.inner_text()


# -- the key


def test_the_key_is_requested_and_kept_only_for_the_session(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["keyed"])
    page.get_by_label("Key", exact=True).fill("sk-wrong")
    page.locator("dialog").get_by_role("button", name="Sign in").click()
    page.get_by_text("The API key is not valid").wait_for()
    page.get_by_label("Key", exact=True).fill(stage["key"])
    page.keyboard.press("Enter")
    page.locator(".is-ready").first.wait_for()
    stored = page.evaluate("[location.href, document.cookie, JSON.stringify({...localStorage})]")
    assert stage["key"] not in " ".join(stored)
    page.reload()
    page.locator(".is-ready").first.wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_role("heading", name="API key").wait_for()
    assert page.evaluate("JSON.stringify({...sessionStorage})") == "{}"
    page.reload()
    page.get_by_role("heading", name="API key").wait_for()


@pytest.mark.parametrize("wrong", ["ключ", "sk-1…", "sk-é", "sk 1"])
def test_a_key_that_cannot_be_sent_is_refused_like_any_wrong_key(
    stage: dict[str, str], opened: Opened, wrong: str
) -> None:
    page = opened(stage["keyed"])
    page.get_by_label("Key", exact=True).fill(wrong)
    page.locator("dialog").get_by_role("button", name="Sign in").click()
    page.get_by_text("The API key is not valid").wait_for()
    page.reload()
    page.get_by_text("The API key is not valid").wait_for()
    page.get_by_label("Key", exact=True).fill(stage["key"])
    page.keyboard.press("Enter")
    page.locator(".is-ready").first.wait_for()


def test_a_key_can_be_kept_only_until_reload(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["keyed"])
    page.get_by_label("Key", exact=True).fill(stage["key"])
    page.get_by_label("Remember it until this tab is closed").uncheck()
    page.keyboard.press("Tab")
    page.locator("dialog").get_by_role("button", name="Sign in").click()
    page.locator(".is-ready").first.wait_for()
    assert page.evaluate("JSON.stringify({...sessionStorage})") == "{}"
