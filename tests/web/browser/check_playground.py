"""The playground in a real browser: four APIs, turns, tools, tokens, code, and a hostile model."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.example_tool import EXAMPLE_MESSAGE, EXAMPLE_TOOL
from tests.web.browser.ways import Opened, ask, keyed_page, open_setting

if TYPE_CHECKING:
    from playwright.sync_api import Route

APIS = ("chat", "responses", "messages")


def test_the_first_minute_needs_no_typing(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['demo']}/#/playground")
    page.locator("select option[value='gpt-oss-demo']").first.wait_for(state="attached")
    page.get_by_role("button", name="Try the example").click()
    answer = page.locator("article.answer")
    answer.locator(".facts").wait_for()
    assert page.locator("article.is-user .turn-text").inner_text() == EXAMPLE_MESSAGE
    assert "get_weather" in answer.locator(".of-call .part-title").inner_text()
    assert "Paris" in answer.locator(".of-call .part-body").inner_text()
    tokens = answer.locator(".side .flow")
    tokens.locator(".chip", has_text="<|call|>").wait_for()
    assert "to=functions.get_weather" in tokens.inner_text()
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Requests").click()
    row = page.locator("tr", has_text="gpt-oss-demo").first
    row.wait_for()
    assert "200 stop" in row.inner_text()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("surface", APIS)
def test_reasoning_calls_and_text_are_separate_parts(
    stage: dict[str, str], opened: Opened, surface: str, stream: bool
) -> None:
    page = opened(f"{stage['open']}/#/playground")
    open_setting(page, "Tools")
    page.get_by_role("button", name="Weather").click()
    assert json.loads(page.get_by_label("Tools, as JSON").input_value()) == [EXAMPLE_TOOL]
    page.get_by_label("Stream").set_checked(stream)
    answer = ask(page, "say weather", API=surface)
    assert answer.locator(".of-analysis .part-body").inner_text() == "I need the weather, so I call the tool."
    call = json.loads(answer.locator(".of-call .part-body").inner_text())
    assert call == {"place": "Oslo", "days": 3}
    assert "get_weather" in answer.locator(".of-call .part-title").inner_text()
    assert "Let me look." in answer.inner_text()
    assert "by vllm-1" in answer.locator(".facts").inner_text()
    # The next request contains the result of the call.
    page.get_by_label("Result of get_weather").fill("say hello")
    page.get_by_label("Message", exact=True).press("Control+Enter")
    again = page.locator("article.answer").nth(1)
    again.locator(".facts").wait_for()
    assert page.locator("#said").inner_text().startswith("The answer is complete. Hello!")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("surface", ["chat", "completions"])
def test_each_choice_has_its_own_parts(stage: dict[str, str], opened: Opened, surface: str, stream: bool) -> None:
    page = opened(f"{stage['open']}/#/playground")
    open_setting(page, "More parameters")
    page.get_by_label("Further fields, as JSON").fill('{"n": 2}')
    page.get_by_label("Stream").set_checked(stream)
    answer = ask(page, "say brief", API=surface)
    if surface == "chat":
        parts = {"Reasoning": "Hm.", "Answer": "Hi.", "Reasoning (choice 2)": "Hm.", "Answer (choice 2)": "Hi."}
    else:
        parts = dict.fromkeys(("Raw output", "Raw output (choice 2)"), answer.locator(".part-body").first.inner_text())
        assert parts["Raw output"].count("Hi.") == 1
    titles = answer.locator(".part-title").all_inner_texts()
    shown = dict(zip(titles, answer.locator(".part-body").all_inner_texts(), strict=False))
    assert {title: text.strip() for title, text in shown.items() if text.strip()} == parts
    # The chat continues with the first choice, also after a reload.
    page.reload()
    page.get_by_role("button", name="say brief").click()
    with page.expect_request(lambda request: request.method == "POST") as sent:
        page.get_by_label("Message", exact=True).fill("say hello")
        page.get_by_role("button", name="Send", exact=True).click()
    body = sent.value.post_data_json
    said = body["messages"][1]["content"] if surface == "chat" else body["prompt"]
    assert said.count("Hi.") == 1


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("surface", [*APIS, "completions"])
def test_a_further_field_overrides_the_setting_stream(
    stage: dict[str, str], opened: Opened, surface: str, stream: bool
) -> None:
    page = opened(f"{stage['open']}/#/playground")
    open_setting(page, "More parameters")
    page.get_by_label("Stream").set_checked(not stream)
    page.get_by_label("Further fields, as JSON").fill(json.dumps({"stream": stream}))
    with page.expect_response(lambda response: response.request.method == "POST") as answered:
        answer = ask(page, "say brief", API=surface)
    kind = "text/event-stream" if stream else "application/json"
    assert answered.value.headers["content-type"].startswith(kind)
    assert "Hi." in answer.locator(".part-body").last.inner_text()
    assert answer.locator(".trouble, .note:visible").count() == 0


def test_a_raw_completion_shows_its_markers(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    answer = ask(page, "say hello", API="completions")
    assert "<|channel|>final<|message|>Hello!" in answer.locator(".of-raw .part-body").inner_text()


@pytest.mark.parametrize("surface", APIS)
def test_recoveries_are_explained(stage: dict[str, str], opened: Opened, surface: str) -> None:
    page = opened(f"{stage['open']}/#/playground")
    answer = ask(page, "say mended", API=surface)
    assert (
        "missing-end A message began before the previous message ended; the previous message was closed."
        in answer.inner_text()
    )
    # The tokens beside the answer have the recovery at its position.
    answer.locator(".side .repair", has_text="missing-end").wait_for()


def test_tokens_appear_while_the_answer_is_generated(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    page.locator("select option[value='gpt-oss-120b']").first.wait_for(state="attached")
    page.get_by_label("Message", exact=True).fill("say slow")
    page.keyboard.press("Control+Enter")
    page.locator("article .side .t", has_text="word").nth(3).wait_for()
    assert page.locator("article .facts").count() == 0
    before = page.locator("article .side .t").count()
    page.locator("article .side .t").nth(before + 5).wait_for()
    page.keyboard.press("Escape")
    page.get_by_text("Stopped.").first.wait_for()


@pytest.mark.parametrize("size", ["desktop", "phone"])
def test_an_answer_can_be_stopped(stage: dict[str, str], opened: Opened, size: str) -> None:
    page = opened(f"{stage['open']}/#/playground", size=size)
    page.locator("select option[value='gpt-oss-120b']").first.wait_for(state="attached")
    page.get_by_label("Message", exact=True).fill("say slow")
    page.keyboard.press("Control+Enter")
    page.locator("article .part.of-final").wait_for()
    stop = page.get_by_role("button", name="Stop", exact=True)
    for offset in (0, 100_000):
        page.evaluate(f"scrollTo(0, {offset})")
        box, height = stop.bounding_box(), page.evaluate("innerHeight")
        assert box is not None
        assert 0 <= box["y"] <= height - box["height"], "Stop is outside of the window"
    stop.click()
    page.get_by_text("Stopped.").first.wait_for()
    page.locator(".composer .primary:enabled").wait_for()


def test_turns_can_be_edited_generated_again_and_forked(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    ask(page, "say weather")
    ask(page, "say hello")
    page.get_by_role("button", name="Fork").nth(1).click()
    # The fork has the turns up to the answer.
    assert page.locator("article.is-user").count() == 1
    page.get_by_role("button", name="say weather").nth(1).click()
    assert page.locator("article.is-user").count() == 2
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited message").fill("say mended")
    page.get_by_role("button", name="Send again").click()
    page.locator(".part.of-final", has_text="It is 42.").wait_for()
    assert page.locator("article.is-user").count() == 1
    page.locator("article .facts").wait_for()
    page.get_by_role("button", name="Regenerate").click()
    page.locator("article .facts").wait_for()
    assert page.locator("article.answer").count() == 1
    # Chats survive a reload.
    page.reload()
    page.get_by_role("button", name="say mended").click()
    assert "It is 42." in page.locator("article.answer").inner_text()


def test_two_models_answer_side_by_side(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground?compare=gpt-oss-120b&compare=gpt-oss-20b")
    page.locator("select option[value='gpt-oss-20b']").first.wait_for(state="attached")
    page.get_by_label("Message", exact=True).fill("say hello")
    page.keyboard.press("Control+Enter")
    page.locator("article .facts").nth(1).wait_for()
    lanes = page.locator(".lane")
    assert "by vllm-1" in lanes.nth(0).inner_text()
    assert "by <b>gpu</b>U+202E1-" in lanes.nth(1).inner_text()
    boxes = [lanes.nth(place).bounding_box() for place in (0, 1)]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]


def test_an_invalid_field_shows_its_error(stage: dict[str, str], opened: Opened) -> None:
    pending: list[Route] = []
    page = opened(f"{stage['open']}/#/overview")
    page.locator(".is-ready").first.wait_for()
    page.route("**/v1/status", lambda route: pending.append(route))
    page.get_by_role("link", name="Playground").click()
    open_setting(page, "Tools")
    page.get_by_label("Tools, as JSON").fill("[{")
    page.get_by_label("Message", exact=True).fill("say hello")
    page.get_by_role("button", name="Send", exact=True).click()
    assert "not JSON" in page.locator("#asking-trouble").inner_text()
    # A new status does not remove the error.
    page.wait_for_timeout(3500)
    for route in pending:
        route.continue_()
    assert page.get_by_label("Tools, as JSON").get_attribute("aria-invalid") == "true"
    assert "not JSON" in page.locator("#asking-trouble").inner_text()
    page.get_by_label("Tools, as JSON").fill('[{"type": "function", "function": {"name": ""}}]')
    page.get_by_role("button", name="Send", exact=True).click()
    refused = page.locator("article .trouble")
    refused.wait_for()
    assert "tools.0.function.name" in refused.inner_text()


SPECIAL_CHARACTERS = 'it\'s "so" $HOME `id` \\n \\\\\nJSON\nEOF !! % é 👩‍🚀 \t <|end|> \x01'


@pytest.mark.parametrize("gateway", ["keyed", "open"])
def test_the_code_of_a_request_sends_the_same_body(stage: dict[str, str], opened: Opened, gateway: str) -> None:
    keyed = gateway == "keyed"
    page = keyed_page(stage, opened, "playground") if keyed else opened(f"{stage[gateway]}/#/playground")
    page.locator("select option[value='gpt-oss-120b']").first.wait_for(state="attached")
    # The text is longer than the limit of a program argument.
    page.get_by_label("System message").fill("x" * 150_000)
    page.get_by_label("Message", exact=True).fill(SPECIAL_CHARACTERS)
    page.get_by_text("The same request as code").click()
    code = page.get_by_label("The request as code")
    # The code is written after the click.
    code.get_by_text("curl").first.wait_for()
    shell = code.text_content()
    assert shell is not None
    fake_curl = 'curl() { printf "%s\\n" "$@"; cat; }; . /dev/stdin'
    result = subprocess.run(["bash", "-c", fake_curl], input=shell, text=True, capture_output=True)
    assert (result.returncode, result.stderr) == (0, "")
    arguments, _, body = result.stdout.partition("@-\n")
    assert json.loads(body)["messages"][1] == {"role": "user", "content": SPECIAL_CHARACTERS}
    assert ("Authorization: Bearer " in arguments) == keyed
    page.get_by_role("button", name="Python").click()
    python = code.text_content()
    assert python is not None
    [call] = [node for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Call) and node.keywords][1:]
    arguments_of_call = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    assert arguments_of_call == json.loads(body)
    assert ("UNISONO_API_KEY" in python) == keyed
    assert stage["key"] not in page.content()


# Each program with its command.
PROGRAMS = {
    "curl": ["bash", "-s"],
    "Python": [sys.executable, "-"],
    "JavaScript": ["node", "--input-type=module", "-"],
}


@pytest.mark.parametrize("surface", [*APIS, "completions"])
def test_the_code_runs_as_it_stands(stage: dict[str, str], opened: Opened, surface: str) -> None:
    page = keyed_page(stage, opened, "playground")
    page.locator("select option[value='gpt-oss-120b']").first.wait_for(state="attached")
    page.get_by_label("API", exact=True).select_option(surface)
    page.get_by_label("Deployment", exact=True).select_option("vllm-1")
    if surface != "completions":
        open_setting(page, "Tools")
        page.get_by_role("button", name="Weather").click()
        open_setting(page, "MCP servers")
        page.get_by_label("Servers, one per line").fill("docs")
    open_setting(page, "More parameters")
    # A field that no client library knows.
    page.get_by_label("Further fields, as JSON").fill('{"tags": ["code"]}')
    page.get_by_label("Message", exact=True).fill("say hello")
    page.get_by_text("The same request as code").click()
    code = page.get_by_label("The request as code")
    for name, command in PROGRAMS.items():
        page.get_by_role("button", name=name, exact=True).click()
        text = code.text_content()
        environment = {"PATH": "/usr/bin:/bin:/usr/local/bin", "UNISONO_API_KEY": stage["key"]}
        result = subprocess.run(command, input=text, text=True, capture_output=True, env=environment, timeout=60)
        assert result.returncode == 0, result.stderr
        assert "Hello" in result.stdout, name
        assert "vllm-1" in result.stdout, name


# -- a hostile model


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("surface", APIS)
def test_markup_of_the_model_is_shown_as_text(
    stage: dict[str, str], opened: Opened, surface: str, stream: bool
) -> None:
    page = opened(f"{stage['open']}/#/playground")
    page.get_by_label("Stream").set_checked(stream)
    answer = ask(page, "say markup", API=surface)
    body = answer.locator(".of-final .part-body")
    assert body.inner_text().startswith('<script>document.title = "taken"</script><img src=x onerror=')
    assert set(body.evaluate("node => [...node.querySelectorAll('*')].map(one => one.localName)")) <= {"p", "div"}
    answer.get_by_role("link", name="Inspect its tokens").click()
    page.locator(".said.of-final .t").first.wait_for()
    assert page.locator("main img, main script, main style, main h1 ~ h1").count() == 0
    assert page.title() == "Inspector · Unisono"


# Elements, attributes and addresses that Markdown of a model may create.
HARMLESS_TAGS = {
    *("p", "div", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "a", "br", "hr"),
    *("table", "thead", "tbody", "tr", "th", "td", "span", "button"),
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_hostile_markdown_changes_nothing_outside_its_box(stage: dict[str, str], opened: Opened, stream: bool) -> None:
    page = opened(f"{stage['open']}/#/playground")
    ask(page, "say hello")
    # Everything outside of the new answer, before and after it.
    outside = """() => ['header', '.heading', '.beside', 'article.answer'].map(name => {
        const node = document.querySelector(name);
        const copy = node.cloneNode(true);
        const { x, width, height } = node.getBoundingClientRect();
        return [copy.textContent, getComputedStyle(node).color, x, width, height];
    })"""
    before = page.evaluate(outside)
    page.get_by_label("Stream").set_checked(stream)
    answer = ask(page, "say hostile")
    body = answer.locator(".of-final .part-body")
    assert set(body.evaluate("node => [...node.querySelectorAll('*')].map(one => one.localName)")) <= HARMLESS_TAGS
    links = body.evaluate("node => [...node.querySelectorAll('a')].map(one => one.getAttribute('href'))")
    assert [link for link in links if link is not None] == ["https://example.com/"]
    names = body.evaluate(
        "node => [...node.querySelectorAll('*')].flatMap(one => one.getAttributeNames()).filter(name => "
        "/^on|^style$|^src|^id$|^name$|^action|^form/.test(name))"
    )
    assert names == []
    text = body.inner_text()
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u200b\u202a-\u202e\u2066-\u2069\u2028\ufeff]", text)
    assert "U+202E" in text
    assert "U+001B" in text
    after = page.evaluate(outside)
    assert [part[1:] for part in after] == [part[1:] for part in before]
    assert page.title() == "Playground · Unisono"
    assert page.evaluate("typeof globalThis.taken") == "undefined"


def test_markdown_becomes_elements(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    body = ask(page, "say markdown").locator(".of-final .part-body")
    assert body.locator("strong", has_text="Weather").count() == 1
    assert body.locator("li").all_inner_texts() == ["Oslo: 21 °C", "Rome: 30 °C"]
    assert body.locator("td").all_inner_texts() == ["Oslo", "21", "Rome", "30"]
    assert body.locator(".code-head span").inner_text() == "python"
    assert body.locator(".code-block pre").inner_text() == 'print("<b>21</b>")\n'
    # A stream in pieces gives the same elements as the whole text.
    streamed = body.inner_html()
    page.get_by_label("Stream").uncheck()
    assert ask(page, "say markdown").locator(".of-final .part-body").inner_html() == streamed


def test_invisible_characters_are_spelled_out(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    answer = ask(page, "say controls")
    body = answer.locator(".of-final .part-body").inner_text().rstrip()
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
    assert len(answer.locator(".of-final .part-body").inner_text().strip()) == 100_000
    ask(page, "say hello")


def test_a_long_output_is_drawn_in_parts(stage: dict[str, str], opened: Opened) -> None:
    page = opened(f"{stage['open']}/#/playground")
    ask(page, "say long").get_by_role("link", name="Inspect its tokens").click()
    # The tokens beside the answer have this button too.
    page.get_by_role("heading", name="Inspector").wait_for()
    more = page.get_by_role("button", name="Show more")
    more.wait_for()
    drawn = page.locator(".flow .t").count()
    more.click()
    assert drawn < 1_001
    assert page.locator(".flow .t").count() == drawn + 1_000
