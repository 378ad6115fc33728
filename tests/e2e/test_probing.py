"""A wrong backend is found before a user does: what the gateway says of it, does with it, and when it is well again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.e2e.gateway import Gateway, config_of, gateway, message_of
from tests.fakes import FakeMlxServer, FakeVllm, Patient, VllmScript
from unisono.core.probe import MEANINGS, Check
from unisono.harmony.encoding import load_encoding
from unisono.routing import deployment, pool
from unisono_adapters import _probe

ANSWER = VllmScript(tokens=load_encoding().encode_marked("<|channel|>final<|message|>Here I am.<|return|>"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_probe, "FIRST_TOKEN_S", 0.3)
    monkeypatch.setattr(pool, "WATCH_EVERY_S", 0.02)
    monkeypatch.setattr(deployment, "FAILURE_REMEMBERED_S", 0.05)
    monkeypatch.setattr(deployment, "MAX_UNFIT_PROBE_PAUSE_S", 0.1)


@asynccontextmanager
async def in_front_of(*fakes: FakeVllm | FakeMlxServer, **sections: object) -> AsyncIterator[Gateway]:
    kinds = {FakeVllm: "vllm", FakeMlxServer: "mlx_server"}
    async with gateway(config_of(*(f"{kinds[type(fake)]}@{fake.url}" for fake in fakes), **sections)) as running:
        yield running


async def told(running: Gateway, status: int, *words: str, within_s: float = 10.0) -> str:
    """What readiness says once it has `status` and all the `words`."""
    answer = None
    try:
        async with asyncio.timeout(within_s):
            while True:
                answer = await running.get("/health/readiness")
                if answer.status == status and all(word in answer.raw.decode() for word in words):
                    return answer.raw.decode()
                await asyncio.sleep(0.01)
    except TimeoutError:
        pytest.fail(f"readiness says {answer and answer.raw!r}")


def other_vocabulary(text: str) -> list[int]:
    return [token for piece in text for token in load_encoding().encode_text(piece)]


WRONG: dict[str, tuple[Callable[[], FakeVllm | FakeMlxServer], Patient, Check]] = {
    "a wrong tokenizer": (FakeVllm, Patient(encode=other_vocabulary), Check.TOKENIZER),
    "markers stripped": (FakeMlxServer, Patient(strips_markers=True), Check.MARKERS),
    "prompts cut": (FakeVllm, Patient(reads_at_most=5), Check.PROMPT_WHOLE),
    "its model list answers while it hangs": (FakeVllm, Patient(hangs=True), Check.GENERATION),
    "calls do not stop": (FakeVllm, Patient(stops_at=[200002]), Check.STOPS),
    "no ids": (FakeVllm, Patient(returns_ids=False), Check.IDS_OUT),
    "another model": (lambda: FakeVllm(model="other"), Patient(), Check.MODEL),
}


@pytest.mark.parametrize(("make", "patient", "check"), WRONG.values(), ids=WRONG)
async def test_readiness_says_what_is_wrong_and_what_to_do_and_no_request_reaches_it(
    make: Callable[[], FakeVllm | FakeMlxServer], patient: Patient, check: Check
) -> None:
    async with make() as fake:
        fake.patient = patient
        async with in_front_of(fake) as running:
            ready = await told(running, 503, check.value, MEANINGS[check].problem, MEANINGS[check].remedy)
            # However many ask, it does not come to look like one that only needs a rest.
            for _ in range(6):
                answer = await running.chat()
                assert (answer.status, answer.body["error"]["code"]) == (503, "backend_unfit")
                assert check.value in answer.body["error"]["message"]
            await told(running, 503, check.value, MEANINGS[check].problem)
            for seen in (ready, answer.raw.decode()):
                assert str(fake.port) not in seen
                assert "127.0.0.1" not in seen
        assert fake.requests == []


async def test_a_wrong_backend_beside_a_good_one_disturbs_nobody() -> None:
    async with FakeVllm() as good, FakeVllm() as wrong:
        good.script = lambda asked: ANSWER
        wrong.patient = Patient(encode=other_vocabulary)
        async with in_front_of(good, wrong) as running:
            answers = [await running.chat() for _ in range(6)]
            assert {message_of(answer).content for answer in answers} == {"Here I am."}
            await told(running, 200, "tokenizer")
        assert wrong.requests == []


async def test_a_backend_that_is_wrong_and_then_right_is_used() -> None:
    async with FakeVllm() as fake:
        fake.script = lambda asked: ANSWER
        fake.patient = Patient(hangs=True)
        async with in_front_of(fake) as running:
            await told(running, 503, "generation")
            fake.patient = Patient()
            await told(running, 200)
            assert message_of(await running.chat()).content == "Here I am."


async def test_a_backend_that_hides_stops_is_used_and_its_answers_are_whole() -> None:
    async with FakeVllm() as fake:
        fake.patient = Patient(hides_stops=True)
        # All but the stop token, which this one never returns.
        fake.script = lambda asked: VllmScript(tokens=list(ANSWER.tokens)[:-1], finish="stop")
        async with in_front_of(fake) as running:
            await told(running, 200)
            message = message_of(await running.chat())
            assert (message.content, message.finish_reason) == ("Here I am.", "stop")


async def test_a_backend_that_was_restarted_is_examined_and_used_again() -> None:
    settings = {"allowed_fails": 0, "cooldown_time": 0.1, "num_retries": 0}
    async with AsyncExitStack() as open_until_the_end:
        async with FakeVllm() as before:
            port = before.port
            before.script = lambda asked: ANSWER
            running = await open_until_the_end.enter_async_context(in_front_of(before, router_settings=settings))
            await told(running, 200)
            assert (await running.chat()).status == 200
        assert (await running.chat()).status == 503
        await told(running, 503, "backend_unavailable")
        again = FakeVllm()
        again.at_port = port
        again.script = lambda asked: ANSWER
        async with again:
            await told(running, 200)
            assert again.patient.generations > 0
            assert message_of(await running.chat()).content == "Here I am."
            assert len(again.requests) == 1


async def test_a_gateway_in_front_of_a_hanging_backend_starts_at_once() -> None:
    async with FakeVllm() as fake:
        fake.patient = Patient(hangs=True)
        began = asyncio.get_running_loop().time()
        async with in_front_of(fake) as running:
            assert (await running.get("/health/liveliness")).status == 200
            assert asyncio.get_running_loop().time() - began < 2
        assert asyncio.get_running_loop().time() - began < 4
