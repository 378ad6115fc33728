"""The web page with an absent gateway, limited keys, large data, and updates in the view."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.web.browser.ways import Opened, ask, chat, keyed_page

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

# Longest time that the page may take for pasted text.
MAX_PASTE_MS = 500


def respond_with(page: Page, path: str, body: Any, status: int = 200, **headers: str) -> None:
    """Let the browser answer requests for a path instead of the gateway."""
    all_headers = {
        "content-type": "application/json",
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    page.route(f"**{path}", lambda route: route.fulfill(status=status, headers=all_headers, body=json.dumps(body)))


HARMFUL = "<img src=x onerror=alert(1)>\u202e\x1b\u200b"
HARMFUL_AS_SHOWN = "<img src=x onerror=alert(1)>U+202EU+001BU+200B"
# Fields that stay as they are. With other values the page would reject the document.
UNCHANGED_FIELDS = {"object", "version", "state", "closed", "repaired", "surface", "outcome", "since", "until", "date"}
UNCHANGED_FIELDS |= {"role", "traces", "mode"}
INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\u200b\u202a-\u202e]")
VISIBLE_TEXT = "[document.body, ...document.querySelectorAll('[title], [aria-label]')].map(node => " + (
    "node === document.body ? node.innerText : `${node.title}${node.getAttribute('aria-label')}`).join(' ')"
)


def harmful(value: Any) -> Any:
    """Return a value with harmful text instead of every text."""
    match value:
        case dict():
            return {name: item if name in UNCHANGED_FIELDS else harmful(item) for name, item in value.items()}
        case list():
            return [harmful(item) for item in value]
        case str():
            return HARMFUL
    return value


def test_all_data_of_the_gateway_is_shown_as_text(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    ask(page, "say mended").get_by_role("link", name="Inspect its tokens").click()
    page.locator(".flow .t").first.wait_for()
    id = page.url.rpartition("/")[2]
    paths = ("/v1/status", "/v1/traces", "/v1/requests", "/v1/requests/stats", "/user/daily/activity")
    bodies = {path: page.request.get(f"{stage['open']}{path}").json() for path in paths}
    recording = harmful(page.request.get(f"{stage['open']}/v1/traces/{id}").json())
    for path, body in bodies.items():
        respond_with(page, f"{path}?*", harmful(body))
        respond_with(page, path, harmful(body))
    respond_with(page, "/v1/chat/completions", {"error": {"message": HARMFUL, "code": HARMFUL, "param": HARMFUL}}, 400)
    file = {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(recording).encode()}
    page.get_by_label("Open a file from").set_input_files(file)
    page.locator("h2", has_text=HARMFUL_AS_SHOWN).wait_for()
    for view in ("Inspector", "Overview", "Requests", "Models", "Keys", "Playground"):
        page.get_by_role("navigation", name="Views").get_by_role("link", name=view, exact=True).click()
        if view == "Keys":
            page.get_by_role("link", name="Spend").click()
            # The names of models are keys of the answer, which stay as they are.
            page.locator("td").first.wait_for()
        elif view == "Playground":
            page.locator("select option", has_text=HARMFUL_AS_SHOWN).first.wait_for(state="attached")
            page.get_by_label("Message", exact=True).fill(HARMFUL)
            page.get_by_role("button", name="Send", exact=True).click()
            page.locator("article .trouble").first.wait_for()
        elif view != "Inspector":
            page.locator("td", has_text=HARMFUL_AS_SHOWN).first.wait_for()
        assert not INVISIBLE.search(page.evaluate(VISIBLE_TEXT))
        assert page.locator("main img").count() == 0


def status_of(stage: dict[str, str], page: Page) -> Any:
    return page.request.get(f"{stage['open']}/v1/status").json()


def test_an_absent_gateway_is_reported_with_the_age_of_the_data(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["open"])
    page.locator(".is-ready").first.wait_for()
    page.route("**/v1/**", lambda route: route.fulfill(status=502, body="<h1>Bad Gateway</h1>"))
    page.get_by_text("Bad Gateway The data below is from ").wait_for()
    assert page.locator(".is-ready").first.is_visible()
    page.unroute("**/v1/**")
    page.locator("main > .trouble").wait_for(state="hidden")


def test_a_key_that_becomes_invalid_can_be_replaced(stage: dict[str, str], opened: Opened) -> None:
    page = keyed_page(stage, opened, "overview")
    page.locator(".is-ready").first.wait_for()
    respond_with(page, "/v1/status", {"error": {"message": "The API key is not valid here.", "code": "invalid"}}, 401)
    page.get_by_text("Sign in with another key.").wait_for()
    page.unroute("**/v1/status")
    # A request by the user asks for another key.
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Models").click()
    page.locator("main > .trouble").wait_for(state="hidden")


def test_the_time_in_the_sign_in_dialog_is_not_part_of_the_answer(stage: dict[str, str], opened: Opened) -> None:
    page = keyed_page(stage, opened, "playground")
    page.locator("select option[value='gpt-oss-120b']").first.wait_for(state="attached")
    refusal = {"error": {"message": "The API key is not valid.", "code": "invalid_api_key"}}
    respond_with(page, "/v1/chat/completions", refusal, 401)
    page.get_by_label("Message", exact=True).fill("say hello")
    page.get_by_role("button", name="Send", exact=True).click()
    page.locator("#ask-key").wait_for()
    assert page.locator("#said").inner_text() == ""
    # An hour passes before the user signs in.
    page.evaluate("const now = performance.now.bind(performance); performance.now = () => now() + 3_600_000")
    page.unroute("**/v1/chat/completions")
    page.get_by_label("Key", exact=True).fill(stage["key"])
    page.locator("#ask-key").get_by_role("button", name="Sign in").click()
    facts = page.locator("article.answer .facts")
    facts.wait_for()
    assert re.search(r"first token after [\d.]+ m?s\b.*[\d.]+ m?s in total", facts.inner_text(), re.DOTALL)
    page.locator("#said", has_text="The answer is complete.").wait_for()


def test_a_key_without_models_gets_a_message(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/inspector")
    respond_with(page, "/v1/status", {**status_of(stage, page), "models": [], "minutes": None})
    page.get_by_role("link", name="Playground").click()
    page.get_by_text("This key has no access to a model that generates text.").wait_for()
    page.get_by_label("Message", exact=True).fill("Hello")
    page.get_by_role("button", name="Send", exact=True).click()
    page.locator("#asking-trouble", has_text="no access").wait_for()
    assert page.locator("article").count() == 0


def test_a_rate_limit_error_shows_when_to_retry(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    refusal = {"error": {"message": "Too many requests.", "code": "rate_limit_exceeded"}}
    respond_with(page, "/v1/chat/completions", refusal, 429, retry_after="7")
    refused = ask(page, "say hello")
    assert "Too many requests. (rate_limit_exceeded) Try again in 7 s." in refused.inner_text()


def test_many_deployments_can_be_filtered(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/inspector")
    status = status_of(stage, page)
    first = status["models"][0]
    ready, failing = first["deployments"]
    for number in range(200):
        name = f"organisation/a-name-that-does-not-end-{number}"
        members = [{**ready, "name": f"gpu-{number}-{place}"} for place in range(3)]
        status["models"].append({**first, "id": name, "model": name, "deployments": members})
    status["models"][150]["deployments"][0] = {**failing, "name": "the-one", "cause": "<b>\u202eno</b>"}
    respond_with(page, "/v1/status", status)
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Models", exact=True).click()
    table = page.get_by_role("region", name="Deployments", exact=True)
    table.wait_for()
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height < 4000
    page.get_by_label("Only deployments that are not ready").check()
    page.get_by_label("Model or deployment").fill("THE-ONE")
    assert table.locator("tbody").count() == 1
    assert "<b>U+202Eno</b>" in table.inner_text()
    page.get_by_label("Model or deployment").fill("nothing")
    page.get_by_text("No deployment matches.").wait_for()


def test_an_update_of_the_list_keeps_focus_and_scroll_position(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    inspected = ask(page, "say mended").get_by_role("link", name="Inspect its tokens").get_attribute("href")
    assert inspected is not None
    page.set_viewport_size({"width": 390, "height": 844})
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Requests", exact=True).click()
    recordings = page.get_by_role("region", name="Requests", exact=True)
    # The first list may lack this request, and begin with an earlier one.
    target = f"#/requests/{inspected.rpartition('/')[2]}"
    link = recordings.locator(f"tr:nth-child(1) a[href='{target}']")
    link.focus()
    recordings.evaluate("node => { node.scrollLeft = 60 }")
    # Another answer is listed above the focused one.
    body = {"model": "gpt-oss-120b", "messages": [{"role": "user", "content": "say hello"}]}
    assert page.request.post(f"{stage['open']}/v1/chat/completions", data=body).ok
    recordings.locator(f"tr:nth-child(2) a[href='{target}']").wait_for()
    assert page.evaluate("document.activeElement.getAttribute('href')") == target
    assert recordings.evaluate("node => node.scrollLeft") == 60


def test_the_focus_moves_between_send_and_stop(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    active = "document.activeElement.textContent"
    page.locator("select option[value='gpt-oss-120b']").first.wait_for(state="attached")
    page.get_by_label("Message", exact=True).fill("say slow")
    page.get_by_role("button", name="Send", exact=True).press("Enter")
    page.locator("article .part.of-final").wait_for()
    assert page.evaluate(active) == "Stop"
    page.keyboard.press("Enter")
    page.get_by_text("Stopped.").wait_for()
    assert page.evaluate(active) == "Send"


def test_the_focus_stays_near_a_button_that_is_replaced(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    answer = ask(page, "say brief")
    active = "document.activeElement.textContent"
    page.get_by_role("button", name="Edit").press("Enter")
    page.get_by_role("button", name="Cancel").press("Enter")
    assert page.evaluate(active) == "Edit"
    page.get_by_role("button", name="Regenerate").press("Enter")
    page.wait_for_function(f"{active} === 'Send'")
    answer.locator(".facts").wait_for()
    page.get_by_role("button", name="say brief").press("Enter")
    assert page.evaluate(active) == "say brief"
    page.get_by_role("button", name="Compare").press("Enter")
    page.get_by_role("button", name="Lane A").press("Enter")
    assert page.evaluate(active) == "Lane A"


def test_a_restarted_gateway_is_found_again(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["open"])
    page.locator(".is-ready").first.wait_for()
    page.route("**/v1/**", lambda route: route.abort("connectionrefused"))
    page.get_by_text("The gateway does not answer. Reconnecting …").first.wait_for()
    page.unroute("**/v1/**")
    page.locator("#offline").wait_for(state="hidden")


def test_the_keyboard_focus_stays_in_a_list_of_keys(stage: dict[str, str], opened: Opened) -> None:
    page = keyed_page(stage, opened, "overview")
    page.locator(".is-ready").first.wait_for()
    key = {"status": "active", "models": [], "key_name": "sk-...1", "spend": 0, "blocked": False}
    keys = [{**key, "token": f"key_{number}", "key_alias": f"key {number}"} for number in range(50)]
    pages = {"keys": keys, "total_pages": 3, "total_count": 150, "current_page": 1}
    respond_with(page, "/key/list?*", pages)
    respond_with(page, "/key/block", {})
    respond_with(page, "/key/update", {})
    page.evaluate("location.hash = '#/keys/keys'")
    page.locator("tr", has_text="key_40").get_by_role("button", name="Block").press("Enter")
    page.locator("tr", has_text="key_40").get_by_role("button", name="Edit").and_(page.locator(":focus")).wait_for()
    page.keyboard.press("Enter")
    page.locator("dialog.sheet").wait_for()
    page.get_by_role("button", name="Save").click()
    page.locator("dialog.sheet").wait_for(state="detached")
    page.locator("tr", has_text="key_40").get_by_role("button", name="Edit").and_(page.locator(":focus")).wait_for()
    page.get_by_role("button", name="Next").press("Enter")
    page.locator("[role=region]:focus").wait_for()
    # The list is shown from its beginning.
    box = page.get_by_role("region", name="Keys").bounding_box()
    assert box is not None
    assert 0 <= box["y"] < 900


OPENED_DURING_AN_OUTAGE = {
    "requests": "td time",
    "models": "button:text-is('Drain')",
    "inspector": ".flow .t",
    "keys/keys": ".empty, td",
    "keys/spend": ".sum",
    "keys/audit": ".empty, td",
    "reference": "details code",
}


def test_a_view_opened_during_an_outage_is_complete_after_it(stage: dict[str, str], opened: Opened) -> None:
    assert chat(stage)[0] == 200
    page = keyed_page(stage, opened, "overview")
    page.locator(".is-ready").first.wait_for()

    def open_view(view: str) -> None:
        page.evaluate("view => { location.hash = `#/${view}` }", view)

    for view, content in OPENED_DURING_AN_OUTAGE.items():
        # The files of the view are loaded before the outage.
        open_view(view)
        page.locator(content).first.wait_for()
        open_view("overview")
        page.locator("h1", has_text="Overview").wait_for()
        page.route(re.compile(r"//[^/]+/(?!page/)"), lambda route: route.abort("connectionrefused"))
        open_view(view)
        page.get_by_text("The gateway does not answer. Reconnecting …").wait_for()
        page.wait_for_timeout(500)
        page.unroute_all()
        page.locator(content).first.wait_for()
        assert page.locator("main .trouble:visible").count() == 0


def test_a_slow_answer_shows_that_it_is_awaited(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    pending: list[Route] = []
    page.route("**/v1/messages", lambda route: pending.append(route))
    page.locator("select option[value='gpt-oss-120b']").first.wait_for(state="attached")
    page.get_by_label("API", exact=True).select_option("messages")
    page.get_by_label("Message", exact=True).fill("say slow")
    page.get_by_role("button", name="Send", exact=True).click()
    before = "getComputedStyle(document.querySelector('article.answer .parts'), '::before').content"
    page.locator("article.answer").wait_for()
    assert page.evaluate(before) == '"Waiting for the answer …"'
    while not pending:
        page.wait_for_timeout(50)
    pending[0].continue_()
    page.locator("article .part.of-final").wait_for()
    assert page.evaluate(before) == "none"
    page.get_by_role("button", name="Stop", exact=True).click()
    # The number of output tokens of a stopped answer is not known.
    facts = page.locator("article .facts")
    facts.wait_for()
    assert " in\n" in facts.inner_text()
    assert " out" not in facts.inner_text()


def test_an_empty_store_is_explained(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/inspector")
    respond_with(page, "/v1/requests?*", {"object": "list", "data": [], "has_more": False, "next_cursor": None})
    page.get_by_role("link", name="Requests", exact=True).click()
    page.get_by_text("No requests yet.").wait_for()
    page.get_by_role("link", name="Open the playground").click()
    page.get_by_role("heading", name="Playground").wait_for()


PASTED = {
    "an id and spaces": "1" + " " * 400_000 + "x",
    "commas": "1" + ", " * 200_000 + "x",
    "minus signs": "[" + "-" * 400_000,
    "brackets": "[" * 400_000,
    "an incomplete recording": '{"object": "unisono.trace", ' * 15_000,
}


@pytest.mark.parametrize("text", PASTED.values(), ids=PASTED)
def test_pasted_text_does_not_block_the_page(stage: dict[str, str], opened: Opened, text: str) -> None:
    page = opened(f"{stage['open']}/#/inspector")
    page.get_by_text("Inspect something else").click()
    pasting = """text => {
        const field = document.querySelector(".pasted textarea");
        field.value = text;
        const began = performance.now();
        field.dispatchEvent(new Event("input", { bubbles: true }));
        return performance.now() - began;
    }"""
    assert page.evaluate(pasting, text) < MAX_PASTE_MS
    assert page.get_by_text("Read as Harmony text").is_visible()


def test_calls_of_server_tools_are_shown_briefly(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    call = {"type": "mcp_call", "id": "mcp_1", "server_label": "docs", "name": "<b>echo", "arguments": '{"a": 1}'}
    failure = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "<i>no</i>"}]}
    output = [
        {"type": "mcp_list_tools", "id": "m", "server_label": "\u202edocs", "tools": [{"name": "<b>echo"}]},
        {**call, "output": "<i>yes</i>", "error": None},
        {**call, "output": None, "error": failure},
    ]
    respond_with(page, "/v1/responses", {"status": "completed", "output": output, "usage": None, "unisono": None})
    page.get_by_label("Stream").uncheck()
    answer = ask(page, "say hello", API="responses")
    parts = answer.locator(".of-tool")
    assert [title.split("\n")[0] for title in parts.all_inner_texts()] == [
        "Tools of U+202Edocs",
        "Server tool docs.<b>echo",
        "Server tool docs.<b>echo",
    ]
    bodies = parts.locator(".part-body").all_inner_texts()
    assert bodies == ["<b>echo", '{"a": 1}\n→ <i>yes</i>', '{"a": 1}\n→ failed: <i>no</i>']
