"""The page when things are not as they should be: a gateway that is gone, keys that may do little, much of everything.
And that it holds still under whoever reads it."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.web.browser.ways import Opened, asks, keyed_page

if TYPE_CHECKING:
    from playwright.sync_api import Page

LONG_MS = 500
"""No paste may hold the page up for as long."""


def answers(page: Page, path: str, body: Any, status: int = 200, **headers: str) -> None:
    """Have the gateway's place taken for this path."""
    sent = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    page.route(f"**{path}", lambda route: route.fulfill(status=status, headers=sent, body=json.dumps(body)))


HARM = "<img src=x onerror=alert(1)>\u202e\x1b\u200b"
SPELLED = "<img src=x onerror=alert(1)>U+202EU+001BU+200B"
KEPT = {"object", "version", "state", "closed", "repaired", "surface", "outcome", "since", "until", "date"}
"""What the page would not get as far as showing if it were anything else."""
UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\u200b\u202a-\u202e]")
SHOWN = "[document.body, ...document.querySelectorAll('[title], [aria-label]')].map(node => " + (
    "node === document.body ? node.innerText : `${node.title}${node.getAttribute('aria-label')}`).join(' ')"
)


def spoiled(value: Any) -> Any:
    """With harm wherever there is text."""
    match value:
        case dict():
            return {name: one if name in KEPT else spoiled(one) for name, one in value.items()}
        case list():
            return [spoiled(one) for one in value]
        case str():
            return HARM
    return value


def test_whatever_comes_from_a_gateway_is_text(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    asks(page, "say mended").get_by_role("link", name="Inspect its tokens").click()
    page.locator(".flow .t").first.wait_for()
    id = page.get_by_label("Recording", exact=True).input_value()
    of = {path: page.request.get(f"{stage['open']}{path}").json() for path in ("/v1/status", "/v1/traces", "/v1/usage")}
    recording = spoiled(page.request.get(f"{stage['open']}/v1/traces/{id}").json())
    for path, body in of.items():
        answers(page, f"{path}*", spoiled(body))
    answers(page, "/v1/chat/completions", {"error": {"message": HARM, "code": HARM, "param": HARM}}, 400)
    file = {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(recording).encode()}
    page.get_by_label("Or open a file").set_input_files(file)
    page.locator("h2", has_text=SPELLED).wait_for()
    for view in ("Inspector", "Overview", "Usage", "Playground"):
        page.get_by_role("link", name=view, exact=True).click()
        if view == "Playground":
            page.locator("select option", has_text=SPELLED).first.wait_for(state="attached")
            page.get_by_label("Text of message 1").fill(HARM)
            page.get_by_role("button", name="Send").click()
            page.locator("article .trouble").first.wait_for()
        elif view != "Inspector":
            page.locator("td", has_text=SPELLED).first.wait_for()
        assert not UNSEEN.search(page.evaluate(SHOWN))
        assert page.locator("main img").count() == 0


def status_of(stage: dict[str, str], page: Page) -> Any:
    return page.request.get(f"{stage['open']}/v1/status").json()


def test_a_gateway_that_is_gone_is_missed_and_what_stands_there_is_dated(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["open"])
    page.locator(".is-ready").first.wait_for()
    page.route("**/v1/**", lambda route: route.fulfill(status=502, body="<h1>Bad Gateway</h1>"))
    page.get_by_text("Bad Gateway The data below is from ").wait_for()
    assert page.locator(".is-ready").first.is_visible()
    page.unroute("**/v1/**")
    page.locator("main > .trouble").wait_for(state="hidden")


def test_a_key_that_is_refused_in_the_middle_can_be_replaced(stage: dict[str, str], opened: Opened) -> None:
    page = keyed_page(stage, opened, "overview")
    page.locator(".is-ready").first.wait_for()
    answers(page, "/v1/status", {"error": {"message": "The API key is not valid here.", "code": "invalid"}}, 401)
    page.get_by_text("Enter another key with the “Key” button above.").wait_for()
    page.unroute("**/v1/status")
    page.get_by_role("button", name="Key: set").click()
    page.get_by_label("Key", exact=True).fill(stage["key"])
    page.keyboard.press("Enter")
    page.locator("main > .trouble").wait_for(state="hidden")


def test_a_key_without_models_is_told_so(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/inspector")
    answers(page, "/v1/status", {**status_of(stage, page), "models": [], "minutes": None})
    page.get_by_role("link", name="Playground").click()
    page.get_by_text("This key has no access to any model.").wait_for()
    page.get_by_role("button", name="Send").click()
    assert page.locator("article").count() == 0


def test_a_limit_says_when_to_try_again(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    refusal = {"error": {"message": "Too many requests.", "code": "rate_limit_exceeded"}}
    answers(page, "/v1/chat/completions", refusal, 429, retry_after="7")
    refused = asks(page, "say hello")
    assert "Too many requests. (rate_limit_exceeded) Try again in 7 s." in refused.inner_text()


def test_of_many_deployments_some_can_be_found(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/inspector")
    status = status_of(stage, page)
    first = status["models"][0]
    well, gone = first["deployments"]
    for number in range(200):
        name = f"organisation/a-name-that-does-not-end-{number}"
        members = [{**well, "name": f"gpu-{number}-{place}"} for place in range(3)]
        status["models"].append({**first, "id": name, "model": name, "deployments": members})
    status["models"][150]["deployments"][0] = {**gone, "name": "the-one", "reason": "<b>\u202eno</b>"}
    answers(page, "/v1/status", status)
    page.get_by_role("link", name="Overview", exact=True).click()
    table = page.get_by_role("region", name="Deployments", exact=True)
    table.wait_for()
    high = page.evaluate("document.documentElement.scrollHeight")
    assert high < 4000
    page.get_by_label("Only deployments that are not ready").check()
    page.get_by_label("Model or deployment").fill("THE-ONE")
    assert table.locator("tbody").count() == 1
    assert "<b>U+202Eno</b>" in table.inner_text()
    page.get_by_label("Model or deployment").fill("nothing")
    page.get_by_text("No deployment matches.").wait_for()


def test_the_overview_holds_still_under_its_reader(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    asks(page, "say mended")
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("link", name="Overview", exact=True).click()
    recordings = page.get_by_role("region", name="Recordings of this key's tenant")
    link = recordings.get_by_role("link").first
    link.focus()
    opens = link.get_attribute("href")
    recordings.evaluate("node => { node.scrollLeft = 60 }")
    # One more answer, which is put above the one that is looked at.
    said = {"model": "gpt-oss-120b", "messages": [{"role": "user", "content": "say hello"}]}
    assert page.request.post(f"{stage['open']}/v1/chat/completions", data=said).ok
    recordings.locator(f"tr:nth-child(2) a[href='{opens}']").wait_for()
    assert page.evaluate("document.activeElement.getAttribute('href')") == opens
    assert recordings.evaluate("node => node.scrollLeft") == 60


def test_messages_go_and_come_and_whoever_is_on_the_keyboard_is_not_lost(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    for _ in range(2):
        page.get_by_role("button", name="Add a message").click()
    page.get_by_role("button", name="Remove message 1").press("Enter")
    active = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"
    assert page.evaluate(active) == "Text of message 1"
    page.get_by_role("button", name="Add a message").click()
    assert [page.get_by_label(f"Text of message {place}").count() for place in (1, 2, 3, 4)] == [1, 1, 1, 0]
    for _ in range(3):
        page.get_by_role("button", name="Remove message 1").click()
    assert page.evaluate(active) == "Add a message"
    page.keyboard.press("Enter")
    page.keyboard.type("say slow")
    page.locator("select option[value='gpt-oss-120b']").wait_for(state="attached")
    page.get_by_role("button", name="Send").press("Enter")
    page.locator("article .of-final").wait_for()
    assert page.evaluate(active) == "Stop"
    page.keyboard.press("Enter")
    page.get_by_text("Stopped.").wait_for()
    assert page.evaluate(active) == "Send"


PASTED = {
    "an id and nothing": "1" + " " * 400_000 + "x",
    "commas": "1" + ", " * 200_000 + "x",
    "signs": "[" + "-" * 400_000,
    "brackets": "[" * 400_000,
    "half a recording": '{"object": "unisono.trace", ' * 15_000,
}


@pytest.mark.parametrize("text", PASTED.values(), ids=PASTED)
def test_nothing_that_is_pasted_holds_the_page_up(stage: dict[str, str], opened: Opened, text: str) -> None:
    page = opened(f"{stage['open']}/#/inspector")
    pasting = """text => {
        const field = document.querySelector("textarea");
        field.value = text;
        const began = performance.now();
        field.dispatchEvent(new Event("input", { bubbles: true }));
        return performance.now() - began;
    }"""
    assert page.evaluate(pasting, text) < LONG_MS
    assert page.get_by_text("Read as Harmony text").is_visible()


def test_hosted_tools_are_told_in_few_words(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    call = {"type": "mcp_call", "id": "mcp_1", "server_label": "docs", "name": "<b>echo", "arguments": '{"a": 1}'}
    failure = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "<i>no</i>"}]}
    output = [
        {"type": "mcp_list_tools", "id": "m", "server_label": "\u202edocs", "tools": [{"name": "<b>echo"}]},
        {**call, "output": "<i>yes</i>", "error": None},
        {**call, "output": None, "error": failure},
    ]
    answers(page, "/v1/responses", {"status": "completed", "output": output, "usage": None, "unisono": None})
    page.get_by_label("Stream").uncheck()
    answer = asks(page, "say hello", API="responses")
    parts = answer.locator(".of-tool")
    assert [title.split("\n")[0] for title in parts.all_inner_texts()] == [
        "Tools of U+202Edocs",
        "Server tool docs.<b>echo",
        "Server tool docs.<b>echo",
    ]
    bodies = parts.locator(".part-body").all_inner_texts()
    assert bodies == ["<b>echo", '{"a": 1}\n→ <i>yes</i>', '{"a": 1}\n→ failed: <i>no</i>']


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_an_answer_begins_where_it_is_seen(stage: dict[str, str], opened: Opened, size: str) -> None:
    page = opened(f"{stage['open']}/#/playground", size=size)
    for _ in range(6):
        page.get_by_role("button", name="Add a message").click()
    for _ in range(2):
        top, bottom = asks(page, "say hello").evaluate("(node) => [node.getBoundingClientRect().top, innerHeight]")
        assert 0 < top < bottom / 2
