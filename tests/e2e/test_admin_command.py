"""`unisono keys` with `--url`: the same commands over the admin API of a running gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.e2e.administered import AdminClient, administered
from tests.e2e.keyed import MASTER
from tests.e2e.test_admin_keys import becomes, works
from unisono.cli import main


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[AdminClient]:
    async with administered(f"sqlite://{tmp_path}/state.db") as running:
        yield running


async def run(admin: AdminClient, *arguments: str, key: str = MASTER) -> Result:
    options = ["keys", arguments[0], "--url", admin.gateway.url, *arguments[1:]]
    return await asyncio.to_thread(CliRunner().invoke, main, options, env={"UNISONO_API_KEY": key})


async def run_json(admin: AdminClient, *arguments: str) -> Any:
    result = await run(admin, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


async def test_a_key_is_created_listed_changed_rotated_and_revoked(admin: AdminClient) -> None:
    created = await run(admin, "create", "--name", "CI", "--rpm", "60", "--money-budget", "5", "--budget-period", "30d")
    assert created.exit_code == 0, created.output
    [secret] = created.stdout.splitlines()
    assert await works(admin, secret) == 200
    (key,) = await run_json(admin, "list")
    assert (key["key_alias"], key["rpm_limit"], key["max_budget"], key["budget_duration"]) == ("CI", 60, 5.0, "30d")
    row = (await run(admin, "list")).stdout.splitlines()[1].split()
    assert row[:4] == [key["token"], "CI", key["token"], "active"]
    changed = await run_json(admin, "update", key["token"], "--rpm", "none", "--models", "none", "--expires", "1h")
    assert (changed["rpm_limit"], changed["models"]) == (None, ["no-default-models"])
    assert changed["expires"] is not None
    rotated = await run_json(admin, "rotate", key["token"], "--grace", "1h")
    assert (rotated["token"], rotated["key"]) != (key["token"], secret)
    revoked = await run(admin, "revoke", key["token"])
    assert revoked.exit_code == 0, revoked.output
    await becomes(admin, secret, 401)
    row = (await run(admin, "list")).stdout.splitlines()[1].split()
    assert row[:4] == [key["token"], "CI", key["token"], "revoked"]
    assert "no-default-models" not in row
    logs = (await admin.get("/audit")).body["audit_logs"]
    assert [log["action"] for log in logs] == ["deleted", "rotated", "updated", "created"]


async def test_a_key_does_not_expire_before_its_date(admin: AdminClient) -> None:
    created = await run_json(admin, "create", "--expires", "2099-01-31")
    assert created["expires"].startswith("2099-01-31T00:00:0")


async def test_the_address_may_end_with_v1(admin: AdminClient) -> None:
    await admin.made("/key/generate")
    url = f"{admin.gateway.url}/v1/"
    result = await asyncio.to_thread(
        CliRunner().invoke, main, ["keys", "list", "--url", url, "--json"], env={"UNISONO_API_KEY": MASTER}
    )
    assert len(json.loads(result.stdout)) == 1


async def test_long_lists_are_read_in_pages(admin: AdminClient) -> None:
    for _ in range(101):
        await admin.made("/key/generate")
    assert len({key["token"] for key in await run_json(admin, "list")}) == 101


async def test_refusals_print_the_message_of_the_gateway(admin: AdminClient) -> None:
    plain = (await admin.made("/key/generate"))["key"]
    for key, arguments, message in (
        (plain, ("create",), "may not use /key/generate"),
        ("sk-wrong", ("list",), "The API key is not valid."),
        (MASTER, ("update", "key_none", "--rpm", "1"), "There is no key 'key_none'."),
        (MASTER, ("create", "--tenant", "none"), "There is no team 'none'."),
        ("", ("list",), "$UNISONO_API_KEY is not set"),
    ):
        result = await run(admin, *arguments, key=key)
        assert result.exit_code == 1
        assert message in result.output


def test_an_unreachable_gateway_and_an_invalid_address_are_errors() -> None:
    for url, status, message in (("http://127.0.0.1:9", 1, "127.0.0.1:9"), ("ftp://x", 2, "http://")):
        result = CliRunner().invoke(main, ["keys", "list", "--url", url], env={"UNISONO_API_KEY": "k"})
        assert (result.exit_code, message in result.output) == (status, True), result.output


async def test_usage_of_a_running_gateway_equals_that_of_its_store(tmp_path: Path) -> None:
    address = f"sqlite://{tmp_path}/state.db"
    async with administered(address, price={"input": 1.0, "output": 10.0}) as admin:
        secrets = [(await admin.made("/key/generate"))["key"] for _ in range(2)]
        for secret in (*secrets, secrets[0]):
            assert await works(admin, secret) == 200
        config = tmp_path / "config.json"
        fields = {"model_list": [], "general_settings": {"master_key": MASTER}, "store": {"url": address}}
        config.write_text(json.dumps(fields))

        async def usage(*options: str, key: str = MASTER) -> Result:
            arguments = ["usage", *options]
            return await asyncio.to_thread(CliRunner().invoke, main, arguments, env={"UNISONO_API_KEY": key})

        for by in ("key", "model", "day"):
            for form in ("--json", "--csv", "--chart"):
                stored = await usage("--config", str(config), "--by", by, form)
                shown = await usage("--url", admin.gateway.url, "--by", by, form)
                assert (shown.exit_code, shown.stdout) == (stored.exit_code, stored.stdout) == (0, stored.stdout)
        own = json.loads((await usage("--url", admin.gateway.url, "--json", key=secrets[0])).stdout)
        assert [line["requests"] for line in own] == [2]
        refused = await usage("--url", admin.gateway.url, "--by", "tenant")
        assert refused.exit_code == 2
        assert "with --url, it must be one of key, model, day" in refused.output
        assert "'--config' or '--url'" in (await usage()).output
