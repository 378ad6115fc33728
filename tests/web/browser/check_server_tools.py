"""Tools of an MCP server in the playground: calls that run, and calls that wait for an approval."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.web.browser.check_page import assert_accessible
from tests.web.browser.ways import Opened, ask, open_setting

if TYPE_CHECKING:
    from playwright.sync_api import Page


def tool_page(stage: dict[str, str], opened: Opened, approval: str, size: str = "desktop") -> Page:
    page = opened(f"{stage['open']}/#/playground", size=size)
    if size == "phone":
        page.get_by_text("Settings", exact=True).click()
    open_setting(page, "MCP servers")
    page.get_by_label("Servers, one per line").fill("docs")
    page.get_by_label("Approval", exact=True).select_option(approval)
    return page


def parts_of(page: Page, answer: int) -> list[str]:
    """Return the titles of the parts of an answer."""
    return page.locator("article.answer").nth(answer).locator(".part-title").all_inner_texts()


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_an_approved_call_runs_and_the_answer_goes_on(stage: dict[str, str], opened: Opened, stream: bool) -> None:
    page = tool_page(stage, opened, "always", "phone" if stream else "desktop")
    page.get_by_label("Stream").set_checked(stream)
    ask(page, "say lookup", API="responses")
    assert parts_of(page, 0)[:3] == ["Tools of docs", "Reasoning", "Approval needed for docs.echo"]
    assert page.locator(".of-approval .part-body").inner_text() == '{"text":"say brief"}'
    approval = page.get_by_role("article", name="Approval")
    assert "Run docs.echo?" in approval.inner_text()
    assert_accessible(page)
    approval.get_by_role("button", name="Approve").click()
    answer = page.locator("article.answer").nth(1)
    answer.locator(".facts").wait_for()
    assert "Approved: docs.echo" in approval.inner_text()
    assert parts_of(page, 1)[0] == "Server tool docs.echo"
    assert answer.locator(".of-tool .part-body").inner_text() == '{"text":"say brief"}\n→ say brief'
    assert answer.locator(".of-final .part-body").inner_text().strip() == "Hi."
    # A restored chat does not ask again.
    page.reload()
    page.get_by_role("button", name="say lookup").click()
    assert page.get_by_role("article", name="Approval").inner_text() == "Approved: docs.echo"
    ask(page, "say hello")


def test_a_denied_call_does_not_run(stage: dict[str, str], opened: Opened) -> None:
    page = tool_page(stage, opened, "always")
    ask(page, "say lookup", API="responses")
    page.get_by_role("button", name="Deny").press("Enter")
    answer = page.locator("article.answer").nth(1)
    answer.locator(".facts").wait_for()
    assert "Denied: docs.echo" in page.get_by_role("article", name="Approval").inner_text()
    assert answer.locator(".of-tool").count() == 0
    assert answer.locator(".of-final .part-body").inner_text().strip() == "Hi."


@pytest.mark.parametrize("surface", ["responses", "chat"])
def test_a_call_runs_without_approval(stage: dict[str, str], opened: Opened, surface: str) -> None:
    page = tool_page(stage, opened, "never")
    answer = ask(page, "say lookup", API=surface)
    assert answer.locator(".of-final .part-body").inner_text().strip() == "Hi."
    assert page.get_by_role("article", name="Approval").count() == 0
    if surface == "responses":
        assert "Server tool docs.echo" in parts_of(page, 0)


def test_an_unknown_server_names_its_field(stage: dict[str, str], opened: Opened) -> None:
    page = tool_page(stage, opened, "always")
    page.get_by_label("Servers, one per line").fill("nobody")
    answer = ask(page, "say lookup", API="responses")
    assert "tools.0.server_label" in answer.locator(".trouble").inner_text()
