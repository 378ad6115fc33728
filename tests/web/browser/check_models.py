"""The view of models in a real browser: its buttons change a running gateway."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.web.browser.check_page import assert_accessible
from tests.web.browser.ways import Opened, Stage, chat, keyed_page, post

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def models_page(stage: Stage, opened: Opened) -> Page:
    page = keyed_page(stage, opened, "models")
    page.get_by_role("button", name="Drain").first.wait_for()
    return page


def row_of(page: Page, deployment: str) -> Locator:
    return page.get_by_role("region", name="Deployments", exact=True).locator("tr", has_text=deployment)


@pytest.fixture
def second(stage: Stage) -> Iterator[str]:
    """Add another deployment of `gpt-oss-120b` for one test, and yield its name."""
    params = {"model": "vllm/tiny", "api_base": stage["backend"]}
    entry = {"model_name": "gpt-oss-120b", "litellm_params": params, "model_info": {"id": "second 100 %"}}
    status, made = post(stage, "/model/new", entry)
    assert (status, made["model_info"]["state"]) == (200, "ready")
    yield "second 100 %"
    post(stage, "/model/delete", {"id": "second 100 %"})


def test_a_deployment_can_be_drained_and_resumed(stage: Stage, opened: Opened) -> None:
    page = models_page(stage, opened)
    row = row_of(page, "vllm-1")
    row.get_by_role("button", name="Drain").click()
    row.locator(".is-drained").wait_for()
    assert "receives no new requests until it is resumed" in row.inner_text()
    assert chat(stage, "gpt-oss-120b", x_unisono_deployment="vllm-1")[0] == 503
    row.get_by_role("button", name="Resume").click()
    row.locator(".is-ready").wait_for()
    assert chat(stage, "gpt-oss-120b", x_unisono_deployment="vllm-1")[0] == 200


def test_a_deployment_can_be_added_and_removed(stage: Stage, opened: Opened) -> None:
    page = models_page(stage, opened)
    page.get_by_role("button", name="Add a deployment").click()
    dialog = page.locator("dialog[open].sheet")
    dialog.get_by_label("Model", exact=True).fill("gpt-oss-added")
    dialog.get_by_label("Kind and name at the server").fill("nonsense/tiny")
    dialog.get_by_label("Address").fill(stage["backend"])
    dialog.get_by_label("Price of a million output tokens, USD").fill("0.6")
    dialog.get_by_role("button", name="Add", exact=True).click()
    # A mistake names its field, and the form stays.
    dialog.locator(".trouble", has_text="litellm_params.model").wait_for()
    assert_accessible(page)
    dialog.get_by_label("Kind and name at the server").fill("vllm/tiny")
    dialog.get_by_role("button", name="Add", exact=True).click()
    dialog.wait_for(state="detached")
    row = page.locator("tbody", has_text="gpt-oss-added").locator("tr").nth(1)
    row.locator(".is-ready").wait_for()
    status, answer = chat(stage, "gpt-oss-added")
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "Hi.")
    prices = page.get_by_role("region", name="Prices", exact=True)
    assert "$0.60" in prices.locator("tr", has_text="gpt-oss-added").inner_text()
    row.get_by_role("button", name="Remove").click()
    page.locator("dialog[open]").get_by_role("button", name="Remove").click()
    page.locator("tbody", has_text="gpt-oss-added").first.wait_for(state="detached")
    assert chat(stage, "gpt-oss-added")[0] == 404


def test_checks_have_results_and_remedies(stage: Stage, opened: Opened) -> None:
    page = models_page(stage, opened)
    row_of(page, "vllm-1").get_by_role("button", name="Checks").click()
    table = page.get_by_role("region", name="Checks", exact=True)
    table.wait_for()
    assert "ok" in table.locator("tr", has_text="tokenizer").inner_text()
    assert_accessible(page)
    page.locator("dialog[open]").get_by_role("button", name="Close").click()
    row_of(page, "vllm-2").get_by_role("button", name="Checks").click()
    table.wait_for()
    failed = table.locator("tr", has_text="reachable").inner_text()
    assert "failed" in failed
    assert "check api_base and api_key of this deployment" in failed


def test_one_prompt_runs_on_two_deployments(stage: Stage, opened: Opened, second: str) -> None:
    page = models_page(stage, opened)
    page.get_by_label("First", exact=True).select_option("gpt-oss-120b on vllm-1")
    page.get_by_label("Second", exact=True).select_option(f"gpt-oss-120b on {second}")
    page.get_by_role("button", name="Compare in the playground").click()
    lanes = page.locator(".lane")
    lanes.nth(1).wait_for()
    for text in ("say hello", "say brief"):
        answers = page.locator("article .facts").count()
        page.get_by_label("Message", exact=True).fill(text)
        page.keyboard.press("Control+Enter")
        page.locator("article .facts").nth(answers + 1).wait_for()
    for lane, name in ((0, "vllm-1"), (1, second)):
        assert lanes.nth(lane).locator(".lane-title").inner_text() == f"{'AB'[lane]}: gpt-oss-120b on {name}"
        assert lanes.nth(lane).locator(".facts", has_text=f"by {name}").count() == 2
    # The exported request selects the same deployment.
    page.get_by_text("The same request as code").click()
    code = page.get_by_label("The request as code")
    code.get_by_text("-H 'x-unisono-deployment: vllm-1'").first.wait_for()
    # The user can select any deployment again.
    page.get_by_label("Deployment", exact=True).select_option("any")
    assert page.locator(".lane-title").nth(1).inner_text() == f"B: gpt-oss-120b on {second}"
    page.get_by_label("Message", exact=True).fill("say brief")
    page.keyboard.press("Control+Enter")
    page.locator("article .facts").nth(5).wait_for()
    assert page.locator(".lane-title").nth(1).inner_text() == "B: gpt-oss-120b"
