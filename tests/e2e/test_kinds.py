"""Recovery cases through the HTTP API on further backend kinds."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.gateway import Gateway, gateway, message_of
from tests.e2e.test_recoveries import (
    BY_NUMBER,
    ENCODING,
    TERMINATORS,
    TEXT_AFTER_A_CALL,
    assert_recovered,
    case_number,
    config_without_regeneration,
    request_case,
)
from tests.fakes.llamacpp import FakeLlamaCpp, LlamaCppScript
from tests.fakes.ollama import FakeOllama, OllamaScript
from tests.fakes.sglang import FakeSglang, SglangScript
from tests.harmony.recoveries import CASES, Case

NAMES = dict(enumerate(CASES))
# Cases without a recovery, and the first case with each combination of recoveries.
REDUCED = {
    **{case.rules: number for number, case in reversed(BY_NUMBER.items()) if case.rules},
    **{number: number for number, case in BY_NUMBER.items() if not case.rules},
}.values()
EACH = [pytest.param(number, id=NAMES[number]) for number in sorted(REDUCED)]


def case_of(prompt: Any) -> Case:
    return BY_NUMBER[case_number(prompt if isinstance(prompt, str) else ENCODING.decode(prompt))]


def sglang(body: dict[str, Any]) -> SglangScript:
    case = case_of(body["prompt"])
    return SglangScript(tokens=ENCODING.encode_as_server(case.output), finish=case.finish, per_chunk=3)


def llamacpp(body: dict[str, Any]) -> LlamaCppScript:
    case = case_of(body["prompt"])
    return LlamaCppScript(tokens=ENCODING.encode_as_server(case.output), finish=case.finish, per_chunk=3)


def ollama(body: dict[str, Any]) -> OllamaScript:
    case = case_of(body["prompt"])
    return OllamaScript(text=case.output, finish=case.finish, per_chunk=5)


FAKES: dict[str, Any] = {
    "sglang": lambda: FakeSglang(script=sglang),
    "llamacpp": lambda: FakeLlamaCpp(script=llamacpp, context=131072),
    "ollama raw": lambda: FakeOllama(script=ollama),
    "ollama template": lambda: FakeOllama(script=ollama, bare=True, version="0.33.2"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sglang", "llamacpp"])
async def ids(request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    async with (
        FAKES[request.param]() as fake,
        gateway(config_without_regeneration(f"{request.param}@{fake.url}")) as running,
    ):
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ollama raw", "ollama template"])
async def text(request: pytest.FixtureRequest) -> AsyncIterator[Gateway]:
    async with FAKES[request.param]() as fake, gateway(config_without_regeneration(f"ollama@{fake.url}")) as running:
        yield running


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("number", EACH)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_token_id_backend_recovers_output(number: int, ids: Gateway) -> None:
    case = BY_NUMBER[number]
    answer = await request_case(ids, "chat", number, stream=True)
    assert_recovered(answer, "chat", case, case.rules, stream=True)
    assert message_of(answer).usage["completion_tokens"] == len(ENCODING.encode_as_server(case.output))


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("number", EACH)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_text_backend_recovers_output(number: int, text: Gateway) -> None:
    case = BY_NUMBER[number]
    has_hidden_stop = case.finish == "stop" and not case.output.endswith((*TERMINATORS, TEXT_AFTER_A_CALL))
    rules = ("restored-stop", *case.rules) if has_hidden_stop else case.rules
    assert_recovered(await request_case(text, "chat", number, stream=True), "chat", case, rules, stream=True)
