"""Keys and teams in a real browser: the buttons change a running gateway, as far as the role permits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.web.browser.check_page import assert_accessible
from tests.web.browser.ways import Opened, Stage, chat, keyed_page, post

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page


def row_of(page: Page, name: str) -> Locator:
    return page.locator("tr", has=page.get_by_role("link", name=name, exact=True))


def secret_of(page: Page) -> str:
    """Return the secret that the dialog shows once, and close the dialog."""
    secret = page.locator(".secret").inner_text()
    page.get_by_role("button", name="Done").click()
    page.locator("dialog.sheet").wait_for(state="detached")
    return secret


def status_with(stage: Stage, secret: str) -> int:
    return chat(stage, authorization=f"Bearer {secret}")[0]


def assert_refused_soon(stage: Stage, secret: str) -> None:
    """Assert that a key is refused; every process sees a change within half a second, a busy one within five."""
    for _ in range(40):
        if status_with(stage, secret) == 401:
            return
        time.sleep(0.25)
    raise AssertionError("the key is still accepted")


def test_a_key_is_created_changed_blocked_rotated_and_deleted(stage: Stage, opened: Opened) -> None:
    page = keyed_page(stage, opened, "keys/keys")
    page.get_by_role("button", name="Create a key").click()
    page.get_by_label("Name", exact=True).fill("nightly job")
    page.get_by_label("Budget, USD", exact=True).fill("20")
    page.get_by_label("Soft budget, USD").fill("5")
    page.get_by_label("Budget renews every").fill("30d")
    page.get_by_role("button", name="Create", exact=True).click()
    secret = secret_of(page)
    assert secret not in page.content()
    assert status_with(stage, secret) == 200
    row = row_of(page, "nightly job")
    assert "of $20" in row.inner_text()
    assert "soft budget $5" in row.inner_text()
    assert "renews 20" in row.inner_text()
    assert row.locator(".budget-bar svg").count() == 1
    row.get_by_role("button", name="Edit").click()
    page.get_by_label("Requests per minute").fill("600")
    page.get_by_role("button", name="Save").click()
    row.get_by_text("600 requests/min").wait_for()
    row.get_by_role("button", name="Block").click()
    row.locator(".state", has_text="blocked").wait_for()
    assert_refused_soon(stage, secret)
    row.get_by_role("button", name="Unblock").click()
    row.locator(".state", has_text="active").wait_for()
    row.get_by_role("button", name="Rotate").click()
    page.locator("dialog.sheet").get_by_role("button", name="Rotate").click()
    rotated = secret_of(page)
    assert status_with(stage, rotated) == 200
    assert_refused_soon(stage, secret)
    row.get_by_role("button", name="Delete").click()
    assert_accessible(page)
    page.locator("dialog.sheet").get_by_role("button", name="Delete").click()
    row.wait_for(state="detached")
    assert_refused_soon(stage, rotated)
    page.get_by_role("link", name="Audit").click()
    page.get_by_role("region", name="Audit records").wait_for()
    actions = page.get_by_role("region", name="Audit records").locator("tbody tr td:nth-child(3)").all_inner_texts()
    assert actions[:6] == ["deleted", "rotated", "unblocked", "blocked", "updated", "created"]


def test_a_crossed_soft_budget_is_marked(stage: Stage, opened: Opened) -> None:
    made = post(stage, "/key/generate", {"key_alias": "thrifty", "soft_budget": 0.000001})[1]
    assert status_with(stage, made["key"]) == 200
    page = keyed_page(stage, opened, "keys/keys?name=thrifty")
    crossed = row_of(page, "thrifty").locator(".warn", has_text="soft budget $0.000001, crossed")
    for _ in range(20):
        # The cost is booked a moment after the answer.
        page.get_by_role("button", name="Filter").click()
        page.wait_for_timeout(250)
        if crossed.count():
            break
    crossed.wait_for()
    assert_accessible(page)
    post(stage, "/key/delete", {"keys": [made["token"]]})


def test_a_team_is_created_blocked_and_deleted(stage: Stage, opened: Opened) -> None:
    page = keyed_page(stage, opened, "keys/teams")
    page.get_by_role("button", name="Create a team").click()
    page.get_by_label("Name", exact=True).fill("Evaluation")
    page.get_by_label("Id", exact=True).fill("evals")
    page.get_by_label("Soft budget, USD").fill("3")
    page.get_by_role("button", name="Create", exact=True).click()
    row = row_of(page, "Evaluation")
    row.get_by_text("soft budget $3").wait_for()
    secret = post(stage, "/key/generate", {"team_id": "evals"})[1]["key"]
    assert status_with(stage, secret) == 200
    row.get_by_role("button", name="Block").click()
    row.locator(".state", has_text="blocked").wait_for()
    # Other processes follow within a second, and so does the cache of this one.
    for _ in range(40):
        if (status := status_with(stage, secret)) != 200:
            break
        page.wait_for_timeout(100)
    assert status in {401, 403}
    row.get_by_role("button", name="Delete").click()
    page.locator("dialog.sheet").get_by_role("button", name="Delete").click()
    row.wait_for(state="detached")


@pytest.mark.parametrize("role", ["proxy_admin_viewer", "internal_user"])
def test_a_role_sees_only_its_buttons(stage: Stage, opened: Opened, role: str) -> None:
    made = post(stage, "/user/new", {"user_id": role, "user_role": role, "key_alias": f"own key of {role}"})[1]
    post(stage, "/key/generate", {"key_alias": "of somebody else"})
    page = keyed_page(stage, opened, "keys/keys", key=made["key"])
    row_of(page, f"own key of {role}").wait_for()
    is_viewer = role == "proxy_admin_viewer"
    assert row_of(page, "of somebody else").count() == int(is_viewer)
    for name in ("Edit", "Rotate", "Block", "Delete"):
        assert page.get_by_role("button", name=name, exact=True).count() == int(not is_viewer)
    assert page.get_by_role("button", name="Create a key").count() == int(not is_viewer)
    assert page.get_by_role("link", name="Audit").count() == int(is_viewer)
    page.get_by_role("link", name="Spend").click()
    # The sums contain every key that the role may read.
    whose = "all keys" if is_viewer else "all keys that you may read"
    page.locator(".sum", has_text="Spend").get_by_text(whose, exact=True).wait_for()
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Overview", exact=True).click()
    page.locator(".sum").first.wait_for()
    # A role that does not see the deployments does not see their load either.
    texts = page.locator(".sums").evaluate("tiles => [...tiles.childNodes].map(tile => tile.nodeName)")
    assert texts == ["DIV"] * (7 if is_viewer else 6)
    page.get_by_role("navigation", name="Views").get_by_role("link", name="Models", exact=True).click()
    page.locator("td .is-ready").first.wait_for()
    assert page.get_by_role("button", name="Drain").count() == 0
    assert page.get_by_role("button", name="Add a deployment").is_hidden()
