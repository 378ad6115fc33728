"""Probes find unusable backends: readiness, routing and recovery of such a backend."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.e2e.gateway import Gateway, config_of, gateway, message_of
from tests.fakes import FakeMlxServer, FakeVllm, Patient, VllmScript
from unisono.core.probe import MEANINGS, Check
from unisono.harmony.encoding import load_encoding
from unisono.routing import pool, probe_schedule
from unisono_adapters import _probe

ANSWER = VllmScript(tokens=load_encoding().encode_marked("<|channel|>final<|message|>Here I am.<|return|>"))


@pytest.fixture(autouse=True)
def short_probe_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probe, "FIRST_TOKEN_S", 0.3)
    monkeypatch.setattr(pool, "WATCH_EVERY_S", 0.02)
    monkeypatch.setattr(probe_schedule, "FAILURE_REMEMBERED_S", 0.05)
    monkeypatch.setattr(probe_schedule, "MAX_UNFIT_PROBE_PAUSE_S", 0.1)


@asynccontextmanager
async def gateway_for(*fakes: FakeVllm | FakeMlxServer, **sections: object) -> AsyncIterator[Gateway]:
    kinds = {FakeVllm: "vllm", FakeMlxServer: "mlx_server"}
    async with gateway(config_of(*(f"{kinds[type(fake)]}@{fake.url}" for fake in fakes), **sections)) as running:
        yield running


async def until_readiness(running: Gateway, status: int, *words: str, within_s: float = 10.0) -> str:
    """Wait until readiness has `status` and contains all `words`; return its body."""
    response = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                response = await running.get("/health/readiness")
                if response.status == status and all(word in response.raw.decode() for word in words):
                    return response.raw.decode()
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"readiness returned {response and response.raw!r}")


def other_vocabulary(text: str) -> list[int]:
    return [token for piece in text for token in load_encoding().encode_text(piece)]


UNFIT: dict[str, tuple[Callable[[], FakeVllm | FakeMlxServer], Patient, Check]] = {
    "wrong tokenizer": (FakeVllm, Patient(encode=other_vocabulary), Check.TOKENIZER),
    "markers stripped": (FakeMlxServer, Patient(strips_markers=True), Check.MARKERS),
    "prompts truncated": (FakeVllm, Patient(reads_at_most=5), Check.PROMPT_WHOLE),
    "generation hangs": (FakeVllm, Patient(hangs=True), Check.GENERATION),
    "no stop after calls": (FakeVllm, Patient(stops_at=[200002]), Check.STOPS),
    "no token ids": (FakeVllm, Patient(returns_ids=False), Check.IDS_OUT),
    "other model": (lambda: FakeVllm(model="other"), Patient(), Check.MODEL),
}


@pytest.mark.parametrize(("make", "patient", "check"), UNFIT.values(), ids=UNFIT)
async def test_readiness_names_problem_and_remedy_of_an_unfit_backend(
    make: Callable[[], FakeVllm | FakeMlxServer], patient: Patient, check: Check
) -> None:
    async with make() as fake:
        fake.patient = patient
        async with gateway_for(fake) as running:
            ready = await until_readiness(running, 503, check.value, MEANINGS[check].problem, MEANINGS[check].remedy)
            # Further requests do not make it look like a backend in a cooldown.
            for _ in range(6):
                response = await running.chat()
                assert (response.status, response.body["error"]["code"]) == (503, "backend_unfit")
                assert check.value in response.body["error"]["message"]
            await until_readiness(running, 503, check.value, MEANINGS[check].problem)
            for body in (ready, response.raw.decode()):
                assert str(fake.port) not in body
                assert "127.0.0.1" not in body
        assert fake.requests == []


async def test_an_unfit_backend_next_to_a_good_one_fails_no_request() -> None:
    async with FakeVllm() as good, FakeVllm() as wrong:
        good.script = lambda request: ANSWER
        wrong.patient = Patient(encode=other_vocabulary)
        async with gateway_for(good, wrong) as running:
            responses = [await running.chat() for _ in range(6)]
            assert {message_of(response).content for response in responses} == {"Here I am."}
            await until_readiness(running, 200, "tokenizer")
        assert wrong.requests == []


async def test_an_unfit_backend_that_is_fixed_is_used() -> None:
    async with FakeVllm() as fake:
        fake.script = lambda request: ANSWER
        fake.patient = Patient(hangs=True)
        async with gateway_for(fake) as running:
            await until_readiness(running, 503, "generation")
            fake.patient = Patient()
            await until_readiness(running, 200)
            assert message_of(await running.chat()).content == "Here I am."


async def test_a_backend_that_hides_stop_tokens_gives_complete_answers() -> None:
    async with FakeVllm() as fake:
        fake.patient = Patient(hides_stops=True)
        # All tokens but the stop token, which this backend never returns.
        fake.script = lambda request: VllmScript(tokens=list(ANSWER.tokens)[:-1], finish="stop")
        async with gateway_for(fake) as running:
            await until_readiness(running, 200)
            message = message_of(await running.chat())
            assert (message.content, message.finish_reason) == ("Here I am.", "stop")


async def test_a_restarted_backend_is_probed_and_used_again() -> None:
    settings = {"allowed_fails": 0, "cooldown_time": 0.1, "num_retries": 0}
    async with AsyncExitStack() as stack:
        async with FakeVllm() as before:
            port = before.port
            before.script = lambda request: ANSWER
            running = await stack.enter_async_context(gateway_for(before, router_settings=settings))
            await until_readiness(running, 200)
            assert (await running.chat()).status == 200
        assert (await running.chat()).status == 503
        await until_readiness(running, 503, "backend_unavailable")
        restarted = FakeVllm()
        restarted.at_port = port
        restarted.script = lambda request: ANSWER
        async with restarted:
            await until_readiness(running, 200)
            assert restarted.patient.generations > 0
            assert message_of(await running.chat()).content == "Here I am."
            assert len(restarted.requests) == 1


async def test_a_gateway_with_a_hanging_backend_starts_at_once() -> None:
    async with FakeVllm() as fake:
        fake.patient = Patient(hangs=True)
        started = asyncio.get_running_loop().time()
        async with gateway_for(fake) as running:
            assert (await running.get("/health/liveliness")).status == 200
            assert asyncio.get_running_loop().time() - started < 2
        assert asyncio.get_running_loop().time() - started < 4
