"""The web page in a real browser: themes, sizes, the keyboard, and a hostile model."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.example_tool import EXAMPLE_MESSAGE, EXAMPLE_TOOL
from tests.web.browser.ways import Opened, ask, keyed_page

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

SIZES = ("desktop", "phone")
THEMES = ("light", "dark")
SEVERE = {"serious", "critical"}


def severe_violations(page: Page) -> list[str]:
    from axe_playwright_python.sync_playwright import Axe

    violations = Axe().run(page).response["violations"]
    return [
        f"{violation['id']}: {violation['help']} {[node['html'][:200] for node in violation['nodes'][:3]]}"
        for violation in violations
        if violation["impact"] in SEVERE
    ]


def assert_accessible(page: Page) -> None:
    assert severe_violations(page) == []
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], "the page is wider than the window"


# -- every view


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("theme", THEMES)
def test_every_view_is_accessible_and_fits_the_window(
    stage: dict[str, str], opened: Opened, theme: str, size: str
) -> None:
    page = opened(f"{stage['open']}/#/playground", theme=theme, size=size)
    page.get_by_text("Tools and response format").click()
    page.get_by_role("button", name="Example tool").click()
    page.get_by_text("The same request as code").click()
    page.get_by_label("Response format").select_option("json_schema")
    assert_accessible(page)
    page.get_by_label("Response format").select_option("text")
    ask(page, "say weather")
    ask(page, "say mended")
    assert_accessible(page)
    page.get_by_role("link", name="Inspect its tokens").first.click()
    page.locator(".flow .t").first.wait_for()
    page.locator("summary", has_text="Prompt").click()
    page.locator(".of-system .t").first.wait_for()
    assert_accessible(page)
    page.get_by_role("link", name="Overview", exact=True).click()
    page.get_by_text("unknown-channel").first.wait_for()
    assert_accessible(page)
    page.get_by_role("link", name="Usage").click()
    page.locator(".chart").wait_for()
    assert_accessible(page)


def test_the_overview_shows_ready_and_failing_deployments(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["open"])
    page.locator(".is-ready").first.wait_for()
    page.locator(".is-failing").wait_for()
    table = page.get_by_role("region", name="Deployments", exact=True).inner_text()
    assert "gpt-oss-120b 131,072 tokens of context · 1 of 2 ready" in table
    assert "vllm-1" in table
    assert "backend_unavailable" in table
    assert "<b>gpu</b>U+202E1- vllm" in table
    assert "gpt-4o → gpt-oss-120b" in page.locator("main").inner_text()


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


# -- the playground


def test_the_example_tool_fills_in_its_message_without_replacing_one(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    page.get_by_text("Tools and response format").click()
    page.get_by_role("button", name="Example tool").click()
    message = page.get_by_label("Text of message 1")
    assert message.input_value() == EXAMPLE_MESSAGE
    assert json.loads(page.get_by_label("Tools, as JSON").input_value()) == [EXAMPLE_TOOL]
    message.fill("Hello")
    page.get_by_role("button", name="Example tool").click()
    assert message.input_value() == "Hello"


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("surface", ["chat", "responses"])
def test_reasoning_calls_and_text_are_separate_parts(
    stage: dict[str, str], opened: Opened, surface: str, stream: bool
) -> None:
    page = opened(f"{stage['open']}/#/playground")
    page.get_by_text("Tools and response format").click()
    page.get_by_role("button", name="Example tool").click()
    page.get_by_label("Stream").set_checked(stream)
    answer = ask(page, "say weather", API=surface)
    assert answer.locator(".of-analysis .part-body").inner_text() == "I need the weather, so I call the tool."
    assert answer.locator(".of-call .part-body").inner_text() == '{"place": "Oslo", "days": 3}'
    assert "get_weather" in answer.locator(".of-call .part-title").inner_text()
    assert "Let me look." in answer.inner_text()
    assert "by vllm-1" in answer.locator(".facts").inner_text()
    # The next request contains the result of the call.
    answer.get_by_role("button", name="Continue from here").click()
    page.keyboard.type("say hello")
    page.get_by_role("button", name="Send").click()
    again = page.locator("article").nth(1)
    page.locator("article", has_text="Ask me anything").locator(".facts").wait_for()
    assert page.locator("#said").inner_text().startswith("The answer is complete. Hello!")
    # Continuing from an earlier answer discards the later messages.
    assert page.locator(".message").count() == 3
    again.get_by_role("button", name="Continue from here").click()
    assert page.locator(".message").count() == 3
    assert page.get_by_label("Text of message 3").input_value() == ""


@pytest.mark.parametrize("surface", ["chat", "responses"])
def test_recoveries_are_explained(stage: dict[str, str], opened: Opened, surface: str) -> None:
    page = opened(f"{stage['open']}/#/playground")
    answer = ask(page, "say mended", API=surface)
    assert "missing-end A message began inside another; the first was closed." in answer.inner_text()


def test_an_answer_can_be_stopped(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    page.locator("select option[value='gpt-oss-120b']").wait_for(state="attached")
    page.get_by_label("Text of message 1").fill("say slow")
    page.keyboard.press("Control+Enter")
    page.locator("article .of-final").wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("Stopped.").first.wait_for()
    page.locator("form.asking .primary:enabled").wait_for()


def test_an_invalid_field_shows_its_error(stage: dict[str, str], opened: Opened) -> None:
    pending: list[Route] = []
    page = opened(f"{stage['open']}/#/overview")
    page.locator(".is-ready").first.wait_for()
    page.route("**/v1/status", lambda route: pending.append(route))
    page.get_by_role("link", name="Playground").click()
    page.get_by_text("Tools and response format").click()
    page.get_by_label("Tools, as JSON").fill("[{")
    page.get_by_role("button", name="Send").click()
    assert "not JSON" in page.get_by_role("alert").first.inner_text()
    # Models that arrive later do not remove the error.
    assert pending
    for route in pending:
        route.continue_()
    page.locator("select option[value='gpt-oss-120b']").wait_for(state="attached")
    assert page.get_by_label("Tools, as JSON").get_attribute("aria-invalid") == "true"
    assert "not JSON" in page.get_by_role("alert").first.inner_text()
    page.get_by_label("Tools, as JSON").fill('[{"type": "function", "function": {"name": ""}}]')
    page.get_by_role("button", name="Send").click()
    refused = page.locator("article .trouble")
    refused.wait_for()
    assert "tools.0.function.name" in refused.inner_text()


SPECIAL_CHARACTERS = 'it\'s "so" $HOME `id` \\n \\\\\nJSON\nEOF !! % é 👩‍🚀 \t <|end|> \x01'


@pytest.mark.parametrize("gateway", ["keyed", "open"])
def test_the_code_of_a_request_sends_the_same_body(stage: dict[str, str], opened: Opened, gateway: str) -> None:
    keyed = gateway == "keyed"
    page = keyed_page(stage, opened, "playground") if keyed else opened(f"{stage[gateway]}/#/playground")
    page.locator("select option[value='gpt-oss-120b']").wait_for(state="attached")
    # The text is longer than the limit of a program argument.
    page.get_by_label("System message").fill("x" * 150_000)
    page.get_by_label("Text of message 1").fill(SPECIAL_CHARACTERS)
    page.get_by_text("The same request as code").click()
    code = page.get_by_label("The request as code")
    shell = code.text_content()
    assert shell is not None
    fake_curl = 'curl() { printf "%s\\n" "$@"; cat; }; . /dev/stdin'
    result = subprocess.run(["bash", "-c", fake_curl], input=shell, text=True, capture_output=True)
    assert (result.returncode, result.stderr) == (0, "")
    arguments, _, body = result.stdout.partition("@-\n")
    assert json.loads(body)["messages"][1] == {"role": "user", "content": SPECIAL_CHARACTERS}
    assert ("Authorization: Bearer " in arguments) == keyed
    page.get_by_role("button", name="Python SDK").click()
    python = code.text_content()
    assert python is not None
    [call] = [node for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Call) and node.keywords][1:]
    arguments_of_call = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert arguments_of_call == json.loads(body)
    assert ("UNISONO_API_KEY" in python) == keyed
    assert stage["key"] not in page.content()


def test_the_demo_model_answers(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['demo']}/#/playground")
    page.locator("select option[value='gpt-oss-demo']").wait_for(state="attached")
    page.get_by_label("Text of message 1").fill("Hi")
    page.get_by_label("Max tokens").fill("40")
    page.get_by_role("button", name="Send").click()
    page.locator("article .facts").wait_for()
    assert page.locator("article .part-body").first.inner_text()


# -- a hostile model


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("surface", ["chat", "responses"])
def test_markup_of_the_model_is_shown_as_text(
    stage: dict[str, str], opened: Opened, surface: str, stream: bool
) -> None:
    page = opened(f"{stage['open']}/#/playground")
    page.get_by_label("Stream").set_checked(stream)
    answer = ask(page, "say markup", API=surface)
    body = answer.locator(".of-final .part-body")
    assert body.inner_text().startswith('<script>document.title = "taken"</script><img src=x onerror=')
    assert body.locator("*").count() == 0
    answer.get_by_role("link", name="Inspect its tokens").click()
    page.locator(".said.of-final .t").first.wait_for()
    assert page.locator("main img, main script, main style, main h1 ~ h1").count() == 0
    assert page.title() == "Inspector · Unisono"


def test_invisible_characters_are_spelled_out(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    answer = ask(page, "say controls")
    body = answer.locator(".of-final .part-body").inner_text()
    for name in ("U+001B", "U+0007", "U+202E", "U+202C", "U+200B", "U+2066", "U+2028", "U+FEFF"):
        assert name in body
    # Joiners inside emoji and words stay, even if several tokens contain them.
    assert body.endswith("last 👩\u200d🚀 می\u200cخواهم xU+200Dy")
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u200b\u202a-\u202e\u2066-\u2069\u2028\ufeff]", body)
    answer.get_by_role("link", name="Inspect its tokens").click()
    page.locator(".said.of-final .t").first.wait_for()
    assert "U+202E" in page.locator(".said.of-final").inner_text()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_long_answer_is_truncated_with_a_note(stage: dict[str, str], opened: Opened, stream: bool) -> None:
    page = opened(f"{stage['open']}/#/playground")
    page.get_by_label("Stream").set_checked(stream)
    answer = ask(page, "say large")
    assert "Only the first 100,000 of 1,000,000 characters are shown." in answer.inner_text()
    assert len(answer.locator(".of-final .part-body").inner_text()) == 100_000
    ask(page, "say hello")


def test_a_long_output_is_drawn_in_parts(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    ask(page, "say long").get_by_role("link", name="Inspect its tokens").click()
    more = page.get_by_role("button", name="Show more")
    more.wait_for()
    drawn = page.locator(".flow .t").count()
    more.click()
    assert drawn < 4_001
    assert page.locator(".flow .t").count() == drawn + 4_000


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
    id = page.get_by_label("Recording", exact=True).input_value()
    recording = page.request.get(f"{stage['open']}/v1/traces/{id}").body()
    other = opened(f"{stage['open']}/#/inspector")
    file = {"name": "bug.json", "mimeType": "application/json", "buffer": recording}
    other.get_by_label("Or open a file").set_input_files(file)
    other.locator("h2", has_text=id).wait_for()
    assert other.locator(".repair").count() == 2
    other.get_by_label("Or paste a recording").fill('{"object": "unisono.trace", "version": 1}')
    other.get_by_role("button", name="Inspect").click()
    other.get_by_text("This recording is damaged.").wait_for()


# -- by keyboard


def test_links_and_tokens_can_be_reached_by_keyboard(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["open"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("link", name="Unisono, overview").focus()
    for _ in range(3):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Inspector").wait_for()
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("button", name="Try an example").press("Enter")
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
    page.get_by_role("button", name="Use this key").click()
    page.get_by_text("The API key is not valid").wait_for()
    page.get_by_label("Key", exact=True).fill(stage["key"])
    page.keyboard.press("Enter")
    page.locator(".is-ready").first.wait_for()
    stored = page.evaluate("[location.href, document.cookie, JSON.stringify({...localStorage})]")
    assert stage["key"] not in " ".join(stored)
    page.reload()
    page.locator(".is-ready").first.wait_for()
    page.get_by_role("button", name="Key: set").click()
    page.get_by_role("button", name="Forget the key").click()
    assert page.evaluate("JSON.stringify({...sessionStorage})") == "{}"
    page.reload()
    page.get_by_role("heading", name="API key").wait_for()


def test_a_key_can_be_kept_only_until_reload(stage: dict[str, str], opened: Opened) -> None:
    page = opened(stage["keyed"])
    page.get_by_label("Key", exact=True).fill(stage["key"])
    page.get_by_label("Remember it until this tab is closed").uncheck()
    page.keyboard.press("Tab")
    page.get_by_role("button", name="Use this key").click()
    page.locator(".is-ready").first.wait_for()
    assert page.evaluate("JSON.stringify({...sessionStorage})") == "{}"
