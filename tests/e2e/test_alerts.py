"""Alerts about budgets and health, posted to a real webhook, and the files with records of requests."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from aiohttp import web

from tests.e2e.administered import ANSWER as ADMINISTERED_ANSWER
from tests.e2e.administered import administered
from tests.e2e.gateway import config_of, gateway
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.e2e.test_limits import config_with_price
from tests.e2e.test_metrics import read
from tests.fakes import FakeVllm
from unisono.access.budget_reports import BudgetWatch
from unisono.alerts.rules import BudgetAlerts, HealthAlerts
from unisono.core.alerts import Alert
from unisono.core.quotas import Account, BudgetState, KeyLimits, QuotaKind, QuotaStatus
from unisono.core.request_record import RequestRecord
from unisono.errors import ConfigError
from unisono.harmony.encoding import load_encoding
from unisono.observe.request_records import RequestFile

ADMINISTERED_COST = 100 * len(load_encoding().encode_marked(ADMINISTERED_ANSWER))
ANSWER = load_encoding().encode_marked("<|channel|>final<|message|>Hello.<|return|>")
SECRET = "secret of the webhook"


@dataclass
class Receiver:
    """Webhook that answers with `statuses` in turn, and then with 200."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    signed: list[bool] = field(default_factory=list)

    async def take(self, request: web.Request) -> web.Response:
        status = self.statuses.pop(0) if self.statuses else 200
        body = await request.read()
        message = f"{request.headers['x-unisono-timestamp']}.".encode() + body
        digest = hmac.new(SECRET.encode(), message, sha256).hexdigest()
        if status == 200:
            self.signed.append(request.headers["x-unisono-signature"] == f"sha256={digest}")
            self.bodies.append(json.loads(body))
        return web.Response(status=status)

    async def received(self, count: int) -> list[dict[str, Any]]:
        async with asyncio.timeout(30):
            while len(self.bodies) < count:
                await asyncio.sleep(0.02)
        return self.bodies


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    found, app = Receiver(), web.Application()
    app.router.add_post("/alerts", found.take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = "http://{}:{}/alerts".format(*runner.addresses[0][:2])
    try:
        yield found
    finally:
        await runner.cleanup()


def alerting(url: str, **settings: Any) -> dict[str, Any]:
    return {"alerts": {"webhook": {"url": url, "secret": SECRET}, "health": False, **settings}}


async def test_each_threshold_of_a_budget_causes_one_signed_alert(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, receiver() as hook:
        config = config_with_price(fake.url, input=0.0, output=100.0)
        config["unisono"] = alerting(hook.url, budget_thresholds=[0.5, 0.9], repeat_s=0.001)
        hook.statuses = [503]
        cost = len(ANSWER) * 100
        async with keyed(config, tmp_path) as (running, keys):
            # The second answer reaches the first threshold, the fourth one the second threshold.
            record, key = await keys.issue(limits=KeyLimits(money_budget=4 * cost))
            for _ in range(4):
                assert (await running.chat_as(key)).status == 200
            for _ in range(2):
                assert (await running.chat_as(key)).status == 429
            first, second = await hook.received(2)
            metrics = await read(running.url, **bearing(MASTER))
        # Another gateway with the same store knows that these alerts were sent.
        async with keyed(config, tmp_path) as (running, _):
            assert (await running.chat_as(key)).status == 429
    assert hook.bodies == [first, second]
    assert all(hook.signed)
    assert (first["event"], first["event_group"], first["token"]) == ("threshold_crossed", "key", record.id)
    assert (first["threshold"], first["spend"], first["max_budget"]) == (0.5, 2 * cost / 1e6, 4 * cost / 1e6)
    assert second["threshold"] == 0.9
    assert metrics("alerts_total", outcome="sent") == 2


def test_a_budget_with_a_new_amount_alerts_again() -> None:
    sent: list[Alert] = []
    budgets, account = BudgetAlerts([0.5, 1.0], sent.append), Account("a", "key_a")
    for limit, soft, spent in ((20, 10, 12), (20, 10, 15), (60, 50, 16), (60, 50, 35), (60, 50, 55), (60, 50, 60)):
        budgets.budget_changed(BudgetState(account, limit, spent, "month:0", soft, period_ends=90.0))
    assert [(each.event, each.facts["spend"], each.once_until) for each in sent] == [
        ("threshold_crossed", 12e-6, 90.0),
        ("soft_budget_crossed", 12e-6, 90.0),
        ("threshold_crossed", 35e-6, 90.0),
        ("soft_budget_crossed", 55e-6, 90.0),
        ("budget_crossed", 60e-6, 90.0),
    ]


REFUSED_BY = ("key", "team", "user", "customer", "gateway", "provider")


@pytest.mark.parametrize("owner", REFUSED_BY)
async def test_a_budget_whose_rest_pays_for_no_request_alerts_once(tmp_path: Path, owner: str) -> None:
    # Less than the cost of a prompt, so that nothing is ever spent.
    budget = {"max_budget": 1e-6, "budget_duration": "30d"}
    sections: dict[str, dict[str, Any]] = {
        "gateway": {"litellm_settings": budget},
        "provider": {"router_settings": {"provider_budget_config": {"vllm": budget}}},
    }
    async with receiver() as hook:
        settings = {"unisono": alerting(hook.url, repeat_s=0.001), **sections.get(owner, {})}
        address, price = f"sqlite://{tmp_path}/state.db", {"input": 1_000.0, "output": 0.0}
        async with administered(address, price=price, **settings) as master:
            for kind in ("team", "user", "customer"):
                limits = budget if kind == owner else {}
                await master.made(f"/{kind}/new", **{"team_id" if kind == "team" else "user_id": kind}, **limits)
            named = {f"{owner}_id": owner} if owner in {"team", "user"} else {}
            key = await master.made("/key/generate", **(budget if owner == "key" else named))
            for _ in range(3):
                refused = await master.gateway.chat_as(key["key"], user="customer")
                assert (refused.status, refused.body["error"]["code"]) == (429, "insufficient_quota")
            [alert] = await hook.received(1)
        # Another process with the same store knows that this alert was sent.
        async with administered(address, price=price, **settings) as master:
            assert (await master.gateway.chat_as(key["key"], user="customer")).status == 429
    assert hook.bodies == [alert]
    assert (alert["event"], alert["event_group"], alert["spend"]) == ("budget_crossed", owner, 0)
    assert "has refused a request" in alert["event_message"]


def test_a_refusal_causes_no_second_alert_about_a_spent_budget() -> None:
    sent: list[Alert] = []
    watch, account = BudgetWatch([BudgetAlerts([0.8, 1.0], sent.append)]), Account("a", "key_a")
    for spent, refused in (
        (85, None),
        (85, QuotaKind.BUDGET_RESERVED),
        (90, QuotaKind.REQUESTS),
        (98, QuotaKind.MONEY_BUDGET),
        (99, QuotaKind.MONEY_BUDGET),
        (100, None),
        (100, QuotaKind.MONEY_BUDGET),
    ):
        budget = BudgetState(account, 100, spent, "month:0", period_ends=90.0)
        watch.reserved(QuotaStatus(refused, account=account, budgets=(budget,)))
    assert [(each.event, each.facts["spend"], each.facts["threshold"]) for each in sent] == [
        ("threshold_crossed", 85e-6, 0.8),
        ("budget_crossed", 98e-6, 1.0),
        ("budget_crossed", 100e-6, 1.0),
    ]
    assert len({each.id for each in sent}) == 3
    # A budget that was spent completely needs no alert about its refusals.
    sent.clear()
    other = replace(budget, account=Account("a", "key_b"))
    watch.reserved(QuotaStatus(QuotaKind.MONEY_BUDGET, account=other.account, budgets=(other, budget)))
    assert [each.event for each in sent] == ["budget_crossed"]


async def test_a_soft_budget_alerts_once_and_refuses_nothing(tmp_path: Path) -> None:
    cost = ADMINISTERED_COST
    async with receiver() as hook:
        unisono = {**alerting(hook.url), "metrics_per_key": True}
        sections = {"unisono": unisono, "litellm_settings": {"timezone": "Asia/Tokyo"}}
        price = {"input": 0.0, "output": 100.0}
        async with administered(f"sqlite://{tmp_path}/state.db", price=price, **sections) as master:
            soft = {"soft_budget": 1.5 * cost / 1e6}
            team = await master.made("/team/new", team_id="search", **soft, budget_duration="30d")
            assert team["soft_budget"] == soft["soft_budget"]
            # Midnight in Tokyo, which has no summer time, on the first of a month.
            reset = datetime.fromisoformat(team["budget_reset_at"]).astimezone(ZoneInfo("Asia/Tokyo"))
            assert (reset.day, reset.hour, reset.minute) == (1, 0, 0)
            key = await master.made("/key/generate", team_id="search", soft_budget=100)
            await master.made("/customer/new", user_id="ann", **soft)
            for _ in range(4):
                assert (await master.gateway.chat_as(key["key"], user="ann")).status == 200
            await hook.received(2)
            metrics = await read(master.gateway.url, **bearing(MASTER))
    assert {(each["event"], each["event_group"]) for each in hook.bodies} == {
        ("soft_budget_crossed", "team"),
        ("soft_budget_crossed", "customer"),
    }
    alert = next(each for each in hook.bodies if each["event_group"] == "team")
    assert (alert["team_id"], alert["spend"], alert["soft_budget"]) == ("search", 2 * cost / 1e6, soft["soft_budget"])
    assert "max_budget" not in alert
    start = datetime.fromtimestamp(int(alert["period"].removeprefix("every:")), ZoneInfo("Asia/Tokyo"))
    assert (start.day, start.hour, start.minute) == (1, 0, 0)
    left = metrics("soft_budget_remaining_dollars", owner="team", id="search")
    assert left == pytest.approx(-2.5 * cost / 1e6)


async def test_a_user_that_is_created_again_causes_new_alerts(tmp_path: Path) -> None:
    async with receiver() as hook:
        price = {"input": 0.0, "output": 100.0}
        unisono = alerting(hook.url, budget_thresholds=[0.5])
        limits = {"max_budget": 1.5 * ADMINISTERED_COST / 1e6, "soft_budget": 0.5 * ADMINISTERED_COST / 1e6}
        async with administered(f"sqlite://{tmp_path}/state.db", price=price, unisono=unisono) as master:
            for count in (2, 4):
                made = await master.made("/user/new", user_id="ann", **limits)
                assert (await master.gateway.chat_as(made["key"])).status == 200
                await hook.received(count)
                await master.made("/user/delete", user_ids=["ann"])
    assert {(each["event"], each["user_id"]) for each in hook.bodies[2:]} == {
        ("threshold_crossed", "ann"),
        ("soft_budget_crossed", "ann"),
    }
    assert len({each["id"] for each in hook.bodies}) == 4
    assert hook.bodies[0]["event_message"] == hook.bodies[2]["event_message"]


async def test_a_failing_backend_causes_an_alert() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        async with receiver() as hook:
            settings = {"unisono": alerting(hook.url, health=True, down_after_s=0.1)}
            async with gateway(config_of(f"vllm@{url}", **settings)):
                [down] = await hook.received(1)
    assert (down["event"], down["event_group"]) == ("backend_down", "backend")
    assert "vllm-1" in down["event_message"]


@dataclass(frozen=True)
class State:
    state: str
    model: str = "gpt-oss"
    name: str = "vllm-1"


def test_health_alerts_once_after_a_while_and_again_when_all_is_well() -> None:
    now, alerts = 0.0, []
    health = HealthAlerts(10.0, lambda alert: alerts.append(alert.event), lambda: now)
    for at, state, store in [
        (0.0, "ready", True),
        (1.0, "unreachable", True),
        (5.0, "ready", True),
        (6.0, "unreachable", True),
        (15.9, "unreachable", False),
        (16.0, "unreachable", False),
        (25.0, "unreachable", False),
        (26.0, "ready", True),
    ]:
        now = at
        health.check([State(state)], store_works=store)
    # The store has failed for less than ten seconds.
    assert alerts == ["backend_down", "backend_up"]


async def test_an_alert_never_goes_to_a_metadata_service(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lookup = socket.getaddrinfo

    def metadata_for_name(host: Any, *arguments: Any, **options: Any) -> Any:
        return lookup("169.254.169.254" if host == "hooks.example" else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", metadata_for_name)
    async with FakeVllm(tokens=ANSWER) as fake:
        config = config_with_price(fake.url, input=0.0, output=100.0)
        config["unisono"] = alerting("http://hooks.example/alerts")
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(limits=KeyLimits(money_budget=0))
            assert (await running.chat_as(key)).status == 429
            async with asyncio.timeout(20):
                while not (await read(running.url, **bearing(MASTER)))("alerts_total", outcome="failed"):
                    await asyncio.sleep(0.05)
    [message] = [record for record in caplog.records if record.name == "unisono.alerts"]
    assert message.__dict__["reason"] == "the address belongs to a metadata service"


async def test_records_of_requests_are_lines_of_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    async with FakeVllm(tokens=ANSWER) as fake:
        config = config_of(f"vllm@{fake.url}", unisono={"request_files": {"path": str(path)}})
        async with gateway(config) as running:
            answer = await running.chat(user="ann")
            await running.chat(model="missing")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    served, refused = [line for line in lines if line["route"] == "/v1/chat/completions"]
    assert (served["id"], served["status"], served["user"]) == (answer.headers["x-request-id"], 200, "ann")
    assert (refused["status"], refused["error"]) == (404, "model_not_found")
    assert "Hello" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_files_are_rotated_and_the_oldest_is_deleted(tmp_path: Path) -> None:
    path, outcomes = tmp_path / "requests.jsonl", []
    # Two writers, as of two processes.
    writers = [RequestFile(path, max_bytes=2_000, keep=3, count=lambda *each: outcomes.append(each)) for _ in range(2)]
    for number in range(200):
        writers[number % 2].append([RequestRecord(f"req_{number:03}", 1.0, 0.5, "POST", "/v1/responses", 200)])
    files = [path, *(tmp_path / f"requests.jsonl.{number}" for number in (1, 2))]
    assert sorted(tmp_path.iterdir()) == sorted([*files, tmp_path / "requests.jsonl.lock"])
    assert all(file.stat().st_size <= 2_000 and stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    ids = [json.loads(line)["id"] for file in reversed(files) for line in file.read_text().splitlines()]
    assert ids == [f"req_{number:03}" for number in range(200 - len(ids), 200)]
    path.unlink()
    path.mkdir()
    writers[0](RequestRecord("req_x", 1.0, 0.5))
    await writers[0].aclose()
    assert outcomes == [("failed", 1)]


@pytest.mark.parametrize("path", ["missing/requests.jsonl", "."], ids=["missing folder", "folder"])
async def test_a_path_that_cannot_be_written_is_an_error_at_startup(tmp_path: Path, path: str) -> None:
    settings = {"request_files": {"path": str(tmp_path / path)}}
    with pytest.raises(ConfigError, match=r"unisono\.request_files\.path"):
        async with gateway(config_of("vllm@http://127.0.0.1:9", unisono=settings)):
            pass
