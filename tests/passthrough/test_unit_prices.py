"""Prices per query, image, second and character: costs, reservations, budgets and the list of models."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway
from tests.e2e.keyed import MASTER, bearing, keyed
from tests.fakes import Refusal
from tests.fakes.openai_modes import FakeModes
from tests.passthrough.test_other_modes import model
from tests.passthrough.test_passing_counted import used_by
from tests.passthrough.test_transcriptions import form
from unisono.core.access import KeyRecord
from unisono.core.quotas import SHARED_TENANT, KeyLimits, TokenUsage

DOLLAR = 1_000_000
SECONDS = 10
AUDIO = bytes(16_000 * SECONDS)


@dataclass(frozen=True)
class Case:
    """Price of a mode, a request and its cost in USD; `sent` replaces the answer of the server.

    A form has `file`.
    """

    mode: str
    price: dict[str, Any]
    path: str
    body: dict[str, Any]
    cost: float
    sent: dict[str, Any] | None = None
    file: bytes = b""


RERANK = {"query": "a", "documents": ["a", "b"]}
RANKED = {"results": [{"index": 0, "relevance_score": 1.0}], "meta": {"billed_units": {"search_units": 3}}}
IMAGES = {"created": 1, "data": [{"b64_json": "QUJD"}]}
HEARD = {"text": 'Said "duration": 99.'}
FORM = {"model": "other"}
CASES = {
    "a query": Case("rerank", {"input_cost_per_query": 2}, "rerank", RERANK, 2),
    "reported search units": Case("rerank", {"input_cost_per_query": 2}, "rerank", RERANK, 6, RANKED),
    "implausible search units": Case(
        "rerank", {"input_cost_per_query": 2}, "rerank", RERANK, 2, {**RANKED, "meta": {"billed_units": {"a": -1}}}
    ),
    "a score": Case("score", {"input_cost_per_query": 2}, "score", {"text_1": "a", "text_2": "b"}, 2),
    "a moderation": Case("moderation", {"input_cost_per_query": 2}, "moderations", {"input": "a"}, 2),
    "images": Case("image_generation", {"output_cost_per_image": 3}, "images/generations", {"prompt": "a", "n": 2}, 6),
    "fewer images than requested": Case(
        "image_generation", {"input_cost_per_image": 3}, "images/generations", {"prompt": "a", "n": 2}, 3, IMAGES
    ),
    "both prices of an image": Case(
        "image_generation",
        {"input_cost_per_image": 5, "output_cost_per_image": 3},
        "images/generations",
        {"prompt": "a"},
        3,
    ),
    "a stream of images": Case(
        "image_generation", {"output_cost_per_image": 3}, "images/generations", {"prompt": "a", "stream": True}, 3
    ),
    "spoken characters": Case(
        "audio_speech", {"input_cost_per_character": 0.5}, "audio/speech", {"input": "Grüße", "voice": "x"}, 2.5
    ),
    "embedded characters": Case(
        "embedding", {"input_cost_per_character": 0.5}, "embeddings", {"input": ["abc", "d"]}, 2
    ),
    "reported seconds": Case(
        "audio_transcription",
        {"input_cost_per_second": 0.5},
        "audio/transcriptions",
        FORM,
        3.5,
        {**HEARD, "usage": {"type": "duration", "seconds": 7}},
        AUDIO,
    ),
    "a duration": Case(
        "audio_transcription",
        {"output_cost_per_second": 0.5, "input_cost_per_second": 9},
        "audio/transcriptions",
        FORM,
        3.25,
        {"task": "transcribe", "duration": 6.5, **HEARD},
        AUDIO,
    ),
    "seconds without a report": Case(
        "audio_transcription",
        {"input_cost_per_second": 0.5},
        "audio/translations",
        FORM,
        SECONDS * 0.5,
        HEARD,
        AUDIO,
    ),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


async def ask(running: Gateway, case: Case, key: str, **fields: Any) -> Answer:
    if not case.file:
        body = json.dumps({"model": "other", **case.body, **fields}).encode()
        return await running.post(f"/v1/{case.path}", body, **bearing(key))
    parts = [(name, None, value.encode()) for name, value in case.body.items()]
    headers = {**bearing(key), "content-type": "multipart/form-data; boundary=limit"}
    return await running.post(f"/v1/{case.path}", form(*parts, ("file", "a.mp3", case.file)), **headers)


async def settled(running: Gateway, record: KeyRecord) -> TokenUsage:
    """Wait for the usage of a key, which enters the ledger late after an error or under load."""
    async with asyncio.timeout(30):
        while not (used := await used_by(running, record.tenant, record.id)).requests:
            await asyncio.sleep(0.01)
    return used


def script(case: Case) -> Refusal | None:
    return None if case.sent is None else Refusal(200, json.dumps(case.sent).encode())


def at_price(base: str, case: Case) -> dict[str, Any]:
    return {"model_list": [model(base, case.mode, **case.price)]}


@EVERY
async def test_units_are_charged_to_the_key(case: Case, tmp_path: Path) -> None:
    async with (
        FakeModes(script(case), audio=(b"{}",)) as fake,
        keyed(at_price(fake.url, case), tmp_path) as (running, keys),
    ):
        record, key = await keys.issue()
        answer = await ask(running, case, key)
        used = await settled(running, record)
    assert answer.status == 200, answer.raw
    # A form has some bytes besides its file.
    assert used.cost / DOLLAR == pytest.approx(case.cost, rel=0.01)


FAILING = [CASES[name] for name in ("a query", "images", "spoken characters", "reported seconds")]


@pytest.mark.parametrize("case", FAILING, ids=lambda case: case.mode)
async def test_a_failed_request_costs_nothing(case: Case, tmp_path: Path) -> None:
    async with FakeModes(Refusal(400, b"{}")) as fake, keyed(at_price(fake.url, case), tmp_path) as (running, keys):
        record, key = await keys.issue()
        answer = await ask(running, case, key)
        used = await settled(running, record)
    assert answer.status == 400
    assert (used.requests, used.cost) == (1, 0)


BUDGETS: dict[str, tuple[Case, dict[str, Any], float]] = {
    "images": (CASES["images"], {"n": 3}, 8.9),
    "search units": (CASES["a query"], {"documents": ["a"] * 101}, 3.9),
    "characters": (CASES["spoken characters"], {"input": "abcdef"}, 2.9),
    "seconds of audio with few bytes": (CASES["seconds without a report"], {}, 4 * SECONDS * 0.5 - 0.1),
}


@pytest.mark.parametrize(("case", "fields", "dollars"), BUDGETS.values(), ids=BUDGETS)
async def test_a_budget_refuses_units_that_it_cannot_pay(
    case: Case, fields: dict[str, Any], dollars: float, tmp_path: Path
) -> None:
    async with (
        FakeModes(script(case), audio=(b"{}",)) as fake,
        keyed(at_price(fake.url, case), tmp_path) as (running, keys),
    ):
        _, small = await keys.issue(limits=KeyLimits(money_budget=int(dollars * DOLLAR)))
        _, large = await keys.issue(limits=KeyLimits(money_budget=int((dollars + 0.2) * DOLLAR)))
        refused = await ask(running, case, small, **fields)
        assert not fake.requests
        allowed = await ask(running, case, large, **fields)
    assert (refused.status, refused.body["error"]["code"]) == (429, "insufficient_quota")
    assert allowed.status == 200


async def test_a_reservation_is_at_the_highest_price_of_all_deployments(tmp_path: Path) -> None:
    case = CASES["images"]
    async with FakeModes() as fake:
        cheap, dear = (model(fake.url, case.mode, output_cost_per_image=cost) for cost in (1, 4))
        cheap["litellm_params"]["order"], dear["litellm_params"]["order"] = 0, 1
        async with keyed({"model_list": [cheap, dear]}, tmp_path) as (running, keys):
            _, small = await keys.issue(limits=KeyLimits(money_budget=7 * DOLLAR))
            record, large = await keys.issue(limits=KeyLimits(money_budget=8 * DOLLAR + 1_000))
            refused = await ask(running, case, small)
            allowed = await ask(running, case, large)
            used = await settled(running, record)
    assert [refused.status, allowed.status] == [429, 200]
    assert used.cost == 2 * DOLLAR


async def test_a_number_of_images_as_text_is_reserved(tmp_path: Path) -> None:
    case = CASES["images"]
    async with FakeModes() as fake, keyed(at_price(fake.url, case), tmp_path) as (running, keys):
        _, key = await keys.issue(limits=KeyLimits(money_budget=7 * DOLLAR))
        assert (await ask(running, case, key, n="3")).status == 429
        answer = await ask(running, case, key, n="three")
        assert (answer.status, answer.body["error"]["param"]) == (400, "n")
        assert not fake.requests


async def test_each_part_of_a_split_list_is_charged_at_its_deployment(tmp_path: Path) -> None:
    """Also in the budgets of the providers, and with the price in `model_info`."""
    async with FakeModes() as first, FakeModes(delay_s=0.2) as second:
        entries = [model(fake.url, "embedding") for fake in (first, second)]
        entries[1]["litellm_params"]["model"] = "sglang/bge"
        for each, cost in zip(entries, (1, 10), strict=True):
            each["model_info"]["input_cost_per_query"] = cost
            each["unisono"] = {"max_embedding_batch_size": 1}
        budgets = {name: {"budget_limit": 1_000, "time_period": "1d"} for name in ("vllm", "sglang")}
        config = {"model_list": entries, "router_settings": {"provider_budget_config": budgets}}
        async with keyed(config, tmp_path) as (running, keys):
            record, key = await keys.issue()
            body = {"model": "other", "input": [str(number) for number in range(8)]}
            answer = await running.post("/v1/embeddings", json.dumps(body).encode(), **bearing(key))
            used = await settled(running, record)
            shares = [await used_by(running, SHARED_TENANT, f"provider {name}") for name in budgets]
        counts = [len([one for one in fake.requests if one.method == "POST"]) for fake in (first, second)]
    assert answer.status == 200
    assert sum(counts) == 8
    assert [share.cost for share in shares] == [counts[0] * DOLLAR, 10 * counts[1] * DOLLAR]
    assert used.cost == sum(share.cost for share in shares)


async def test_prices_of_tokens_are_added(tmp_path: Path) -> None:
    case = CASES["images"]
    async with FakeModes() as fake:
        config = at_price(fake.url, case)
        config["model_list"][0]["unisono"] = {"price": {"output": 100_000}}
        async with keyed(config, tmp_path) as (running, keys):
            record, key = await keys.issue()
            await ask(running, case, key)
            used = await settled(running, record)
    assert used.cost == 6 * DOLLAR + 40 * DOLLAR // 10


async def test_requests_and_models_show_the_price(tmp_path: Path) -> None:
    case = CASES["images"]
    async with FakeModes() as fake, keyed(at_price(fake.url, case), tmp_path) as (running, keys):
        _, key = await keys.issue()
        await ask(running, case, key)
        listed = await running.get("/model/info", **bearing(key))
        logged = await running.get("/spend/logs", **bearing(MASTER))
    [info] = [one["model_info"] for one in listed.body["data"]]
    assert info["output_cost_per_image"] == 3
    assert info["input_cost_per_query"] is info["input_cost_per_second"] is info["input_cost_per_character"] is None
    assert [one["spend"] for one in logged.body] == [6]
