"""Hooks on every surface: what they refuse, change and say, and what becomes of turns when they fail."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.continuing import Model, prompts_about
from tests.e2e.gateway import Answer, config_of, gateway, message_of
from tests.e2e.hooked import CALLS, SAYS, SECRET, WAYS, install
from tests.e2e.keyed import bearing, keyed
from tests.e2e.messages import message_of as in_messages
from tests.e2e.replicas import Client
from tests.e2e.responses import ANSWER, Line, line, refusal, text_of
from tests.e2e.test_background_ends import crash_background_tasks
from tests.e2e.test_metrics import read
from tests.e2e.test_responses_websocket import connected
from tests.e2e.wires import ENCODING, WIRES, asked
from tests.fakes import FakeVllm, VllmScript
from unisono.core.access import KeyLimits
from unisono.core.generation import RETURN

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)


@asynccontextmanager
async def hooked(*hooks: Any) -> AsyncIterator[Line]:
    async with line(WIRES["vllm"], unisono={"hooks": list(hooks)}) as here:
        yield here


@dataclass(frozen=True)
class Said:
    """What a client ends up with, on any surface. `status` is HTTP's where the answer is an error's."""

    text: str = ""
    about: Json = field(default_factory=dict)
    error: Json | None = None
    status: int = 200
    raw: str = ""


def of_chat(answer: Answer) -> Said:
    if answer.status != 200:
        return Said(error=answer.body["error"], status=answer.status, raw=answer.raw.decode())
    if answer.events and "error" in answer.events[-1]:
        return Said(error=answer.events[-1]["error"], raw=answer.raw.decode())
    message = message_of(answer)
    return Said(message.content or "", message.note, raw=answer.raw.decode())


def of_response(response: Json) -> Said:
    return Said(text_of(response), response["unisono"], response["error"], raw=json.dumps(response))


async def chat(here: Line, text: str, *, stream: bool) -> Said:
    return of_chat(await here.gateway.chat(messages=[{"role": "user", "content": text}], stream=stream))


async def message(here: Line, text: str, *, stream: bool) -> Said:
    answer = await here.gateway.messages(messages=[{"role": "user", "content": text}], stream=stream)
    error = answer.body if answer.status != 200 else answer.events[-1] if answer.events else {}
    if "error" in error:
        return Said(error=error["error"], status=answer.status, raw=answer.raw.decode())
    said = in_messages(answer)
    return Said(said.content or "", said.note, raw=answer.raw.decode())


async def response(here: Line, text: str, *, stream: bool) -> Said:
    answer = await here.post(input=text, stream=stream)
    if answer.status != 200:
        return Said(error=answer.body["error"], status=answer.status, raw=answer.raw.decode())
    for event in answer.events:
        if event["type"] == "error":
            return Said(error=event, raw=answer.raw.decode())
    return of_response(answer.events[-1]["response"] if stream else answer.body)


async def background(here: Line, text: str) -> Said:
    answer = await here.post(input=text, background=True)
    if answer.status != 200:
        return Said(error=answer.body["error"], status=answer.status, raw=answer.raw.decode())
    async with aiohttp.ClientSession() as session:
        return of_response(await Client(here.gateway.url, session).over(answer.body["id"], every_s=0.01))


async def socket(here: Line, text: str) -> Said:
    async with connected(here.gateway) as client:
        await client.send(input=text)
        events = [await client.event()]
        while events[-1]["type"] not in {"error", "response.completed", "response.failed"}:
            events.append(await client.event())
        if events[-1]["type"] == "error":
            last = events[-1]
            return Said(error=last["error"], status=last.get("status", 200), raw=json.dumps(last))
        return of_response(events[-1]["response"])


Surface = Callable[[Line, str], Awaitable[Said]]
SURFACES: dict[str, Surface] = {
    "Chat, whole": lambda here, text: chat(here, text, stream=False),
    "Chat, streamed": lambda here, text: chat(here, text, stream=True),
    "Messages, whole": lambda here, text: message(here, text, stream=False),
    "Messages, streamed": lambda here, text: message(here, text, stream=True),
    "Responses, whole": lambda here, text: response(here, text, stream=False),
    "Responses, streamed": lambda here, text: response(here, text, stream=True),
    "Responses, in the background": background,
    "Responses, over a WebSocket": socket,
}
WHOLE = {"Chat, whole", "Messages, whole", "Responses, whole"}
every_surface = pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)


@every_surface
async def test_a_turn_that_is_refused_asks_no_backend(surface: Surface) -> None:
    async with hooked({"failing": {"at": "before", "way": "refuses"}}) as here:
        said = await surface(here, "Hi")
        assert said.error is not None
        # What is told of a failure in a stream has one of OpenAI's few codes.
        # Anthropic's have none, and name the field in the message.
        assert said.error.get("code", "no_thanks") in ("no_thanks", "invalid_prompt")
        assert said.error["message"] in ("Not here.", "input: Not here.")
        assert said.error.get("param", "input") == "input"
        assert said.status in (200, 403)
        assert asked(here.fake) == []
        assert (await read(here.gateway.url))("hook_failures_total") == 0


async def test_a_refusal_has_its_status_and_the_shape_of_the_api() -> None:
    async with hooked({"failing": {"at": "before", "way": "refuses"}}) as here:
        for stream in (False, True):
            assert refusal(await here.post(stream=stream), 403, "input", "no_thanks") == "Not here."
            assert refusal(await here.gateway.chat(stream=stream), 403, "input", "no_thanks") == "Not here."


LASTING: dict[str, Json] = {
    "in the background": {"background": True},
    "in the background, streamed": {"background": True, "stream": True},
    "with a key of its own": {},
}


@pytest.mark.parametrize("way", ["refuses", "raises"])
@pytest.mark.parametrize("fields", LASTING.values(), ids=LASTING)
async def test_a_response_that_would_last_is_refused_before_it_is_promised(
    tmp_path: Path, fields: Json, way: str
) -> None:
    async with FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake:
        config = config_of(f"vllm@{fake.url}", unisono={"hooks": [{"failing": {"at": "before", "way": way}}]})
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(limits=KeyLimits(max_parallel=1, token_budget=5000))
            talk = json.loads((await running.post("/v1/conversations", b"{}", **bearing(key))).raw)["id"]
            body = json.dumps({"model": "gpt-oss", "input": "Hi", "conversation": talk, **fields}).encode()
            # Again and again: its place, its budget, its conversation and its key are free at once.
            for _ in range(3):
                refused = await running.post("/v1/responses", body, **bearing(key), idempotency_key="one")
                status, code = (403, "no_thanks") if way == "refuses" else (503, "hook_failed")
                refusal(refused, status, "input" if way == "refuses" else None, code)
            assert asked(fake) == []
            assert (await running.get(f"/v1/conversations/{talk}/items", **bearing(key))).body["data"] == []
            used = (await running.get("/v1/usage", **bearing(key))).body["total"]
            assert (used["requests"], used["errors"], used["total_tokens"]) == (3, 3, 0)
        with closing(sqlite3.connect(tmp_path / "state.db")) as kept:
            assert kept.execute("SELECT count(*) FROM responses").fetchone() == (0,)


@every_surface
async def test_the_model_reads_what_hooks_made_of_a_turn_one_after_the_other(surface: Surface) -> None:
    first, second = ({"replacing": {"word": word, "other": other}} for word, other in (("Ann", "Bea"), ("Bea", "Cleo")))
    async with hooked(first, second) as here:
        assert (await surface(here, "I am Ann.")).text == "ok"
        assert here.said == "<|start|>user<|message|>I am Cleo.<|end|>"
        [request] = asked(here.fake)
        assert (request.json["temperature"], request.json["logit_bias"]) == (0.25, {"17": 1.5})


@every_surface
async def test_what_hooks_say_stands_beside_the_answer(surface: Surface) -> None:
    async with hooked("hearing", {"hearing": {"says": "twice"}}) as here:
        said = await surface(here, "Hi")
        heard = {"before": "heard", "after": "ok", "used": len(ENCODING.encode_marked(ANSWER))}
        assert said.about["hooks"] == {"hearing": heard, "hearing-2": heard | {"before": "twice"}}
        assert [name for name, _, _ in CALLS] == ["before", "before", "after", "after"]
        _, request, answer = CALLS[-1]
        assert answer is not None
        assert [closed.text for closed in answer.items] == ["Hm.", "ok"]
        assert (request.tenant, request.model, request.key) == ("local", "gpt-oss", "")
        assert bool(request.request_id)


async def test_of_several_choices_each_is_a_turn() -> None:
    async with hooked("hearing") as here:
        answer = await here.gateway.chat(n=2)
        assert [said["before"] for said in answer.body["unisono"]["hooks"]["hearing"]] == ["heard", "heard"]
        assert sorted(name for name, _, _ in CALLS) == ["after", "after", "before", "before"]


@pytest.mark.parametrize("name", SURFACES)
async def test_an_answer_is_kept_from_whoever_has_seen_nothing_of_it(name: str) -> None:
    async with hooked({"failing": {"at": "after", "way": "refuses"}}) as here:
        said = await SURFACES[name](here, "Hi")
        if name in WHOLE:
            assert said.error is not None
            assert (said.status, said.error.get("code", "no_thanks")) == (403, "no_thanks")
            assert "ok" not in said.raw
        else:
            assert said.error is None
            assert said.text == "ok"
            assert said.about["hooks"] == {"failing": {"refused": {"message": "Not here.", "code": "no_thanks"}}}


@pytest.mark.parametrize("at", ["before", "after"])
async def test_a_refusal_that_nothing_could_send_is_one_all_the_same(at: str) -> None:
    async with hooked({"failing": {"at": at, "way": "refuses with half a letter"}}) as here:
        for ask in (here.post, here.gateway.chat):
            assert refusal(await ask(), 403, "input.\ufffd", "no_thanks") == "Not \ufffd."
        said = await chat(here, "Hi", stream=True)
        told = said.error if at == "before" else said.about["hooks"]["failing"]["refused"]
        assert told is not None
        assert told["message"] == "Not \ufffd."


FAILURES = sorted({*WAYS, *SAYS} - {"refuses", "refuses with half a letter"})


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("way", FAILURES)
@pytest.mark.parametrize("at", ["before", "after"])
async def test_a_turn_ends_with_a_hook_that_fails_or_goes_on_without(at: str, way: str) -> None:
    failing = {"at": at, "way": way, "timeout_s": 0.05 if way == "is slow" else 5}
    async with hooked({"failing": failing}) as here:
        for name in ("Chat, whole", "Responses, streamed"):
            said = await SURFACES[name](here, "Hi")
            assert said.error is not None
            assert said.error["code"] == "hook_failed"
            assert "'failing'" in said.error["message"]
            assert SECRET not in said.raw
            assert said.status == (503 if at == "before" or name in WHOLE else 200)
        assert len(asked(here.fake)) == (0 if at == "before" else 2)
        assert await failures(here, at) == 2
    async with hooked({"failing": {**failing, "fail": "open"}}, "hearing") as here:
        for name in ("Chat, whole", "Responses, streamed"):
            said = await SURFACES[name](here, "Hi")
            assert said.text == "ok"
            assert list(said.about["hooks"]) == ["hearing"]
        assert await failures(here, at) == 2


async def failures(here: Line, at: str) -> float:
    """How many of them are counted, of one hook and at one place; nowhere else is any."""
    counted = await read(here.gateway.url)
    assert counted("hook_failures_total") == counted("hook_failures_total", hook="failing", call=at)
    return counted("hook_failures_total")


@pytest.mark.parametrize("what", ["items", "sampling", "effort", "nothing known"])
async def test_a_change_that_is_none_is_a_failure(what: str) -> None:
    async with hooked({"garbling": {"what": what}}) as here:
        refusal(await here.post(), 503, None, "hook_failed")
        refusal(await here.gateway.chat(), 503, None, "hook_failed")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_conversation_is_kept_as_the_client_sent_it_and_shown_to_hooks_again(stream: bool) -> None:
    async with hooked({"replacing": {"word": "Ann", "other": "[name]"}}) as here:
        here.say("<|channel|>final<|message|>Hello, Ann.<|return|>", ANSWER)
        first = await here.responds(stream=stream, input="I am Ann.", instructions="Be kind to Ann.")
        assert "Be kind to [name]." in here.prompts[0]
        assert text_of(await here.kept(first)) == "Hello, Ann."
        [item] = (await here.get(f"/responses/{first['id']}/input_items")).body["data"]
        assert item["content"][0]["text"] == "I am Ann."
        await here.responds(stream=stream, input="And Ann?", previous_response_id=first["id"])
        # What the model itself said is changed with its tokens.
        assert here.said == (
            "<|start|>user<|message|>I am [name].<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Hello, [name].<|end|>"
            "<|start|>user<|message|>And [name]?<|end|>"
        )


async def test_what_hooks_leave_as_it_is_keeps_its_exact_tokens() -> None:
    async with hooked({"replacing": {"word": "Ann", "other": "[name]"}}, "hearing") as here:
        # Not as anybody would cut this text into tokens.
        letters = [*ENCODING.encode_marked("o"), *ENCODING.encode_marked("k")]
        said = [*ENCODING.encode_marked("<|channel|>final<|message|>"), *letters, RETURN]
        here.say(VllmScript(tokens=said))
        first = await here.whole(input="I am Ann.")
        await here.whole(input="Go on.", previous_response_id=first["id"])
        begun, gone_on = here.tokens
        assert gone_on[: len(begun) + len(said) - 1] == [*begun, *said[:-1]]


QUESTION = "How does it end for Ann?"


async def test_whoever_takes_a_response_over_goes_on_behind_what_hooks_made_of_it(tmp_path: Path) -> None:
    model = Model(delay_s=0.02)
    async with FakeVllm(script=model.script) as fake:
        config = config_of(
            f"vllm@{fake.url}",
            store={"url": f"sqlite:///{str(tmp_path / 'state.db').removeprefix('/')}", "lease_s": 0.4},
            unisono={"hooks": ["hearing", {"replacing": {"word": "Ann", "other": "the cat"}}]},
        )
        async with gateway(config) as here, aiohttp.ClientSession() as session:
            client = Client(here.url, session)
            body = {"model": "gpt-oss", "input": QUESTION, "background": True, "instructions": "Ask Ann."}
            made = await client.post("/v1/responses", body)
            changed = QUESTION.replace("Ann", "the cat")
            async with asyncio.timeout(10):
                while not prompts_about(fake, changed):
                    await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)
            crash_background_tasks()
            kept = await client.over(made["id"])
            assert kept["status"] == "completed"
            assert text_of(kept) == model.text
            first, second = prompts_about(fake, changed)
            assert second[: len(first)] == first
            assert len(second) > len(first)
            assert "Ask the cat." in ENCODING.decode(second)
            assert prompts_about(fake, QUESTION) == []
            assert [name for name, _, _ in CALLS] == ["before", "after"]
            assert kept["unisono"]["hooks"]["hearing"] == {
                "before": "heard",
                "after": model.text,
                "used": len(model.answer),
            }


async def test_a_gateway_without_the_hooks_does_not_go_on_with_what_the_client_sent(tmp_path: Path) -> None:
    model = Model(delay_s=0.02)
    async with FakeVllm(script=model.script) as fake, aiohttp.ClientSession() as session:
        store = {"url": f"sqlite:///{str(tmp_path / 'state.db').removeprefix('/')}", "lease_s": 0.4}
        config = config_of(f"vllm@{fake.url}", store=store)
        hooks = {"hooks": [{"replacing": {"word": "Ann", "other": "the cat"}}]}
        async with gateway({**config, "unisono": hooks}) as here:
            client = Client(here.url, session)
            body = {"model": "gpt-oss", "input": QUESTION, "background": True}
            made = await client.post("/v1/responses", body)
            async with asyncio.timeout(10):
                while not prompts_about(fake, "the cat"):
                    await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)
        async with gateway(config) as here:
            kept = await Client(here.url, session).over(made["id"])
            assert kept["status"] == "failed"
            assert prompts_about(fake, QUESTION) == []


async def test_a_turn_that_is_refused_uses_no_tokens_and_no_budget(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake:
        hooks = [{"failing": {"at": "before", "way": "refuses"}}]
        config = config_of(f"vllm@{fake.url}", unisono={"hooks": hooks})
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(limits=KeyLimits(token_budget=400, max_parallel=1))
            body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()
            for _ in range(5):
                refused = await running.post("/v1/chat/completions", body, **bearing(key))
                assert refused.body["error"]["code"] == "no_thanks"
            # An answer without usage does not wait for its record.
            async with asyncio.timeout(10):
                while (used := (await running.get("/v1/usage", **bearing(key))).body["total"])["requests"] < 5:
                    await asyncio.sleep(0.02)
            assert (used["requests"], used["errors"], used["total_tokens"]) == (5, 5, 0)


async def test_an_answer_that_a_budget_bounds_has_what_hooks_say(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake:
        config = config_of(f"vllm@{fake.url}", unisono={"hooks": ["hearing"]})
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(limits=KeyLimits(token_budget=400))
            body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()
            answer = await running.post("/v1/chat/completions", body, **bearing(key))
            assert answer.body["unisono"]["hooks"]["hearing"]["after"] == "ok"
            assert [name for name, _, _ in CALLS] == ["before", "after"]


async def test_nobody_over_a_limit_reaches_a_hook(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake:
        config = config_of(f"vllm@{fake.url}", unisono={"hooks": ["hearing"]})
        async with keyed(config, tmp_path) as (running, keys):
            record, key = await keys.issue("team", limits=KeyLimits(rpm=1), tags={"floor": "3"})
            body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()
            answers = [await running.post("/v1/chat/completions", body, **bearing(key)) for _ in range(3)]
            assert [answer.status for answer in answers] == [200, 429, 429]
            [request, _] = [request for _, request, _ in CALLS]
            assert (request.tenant, request.key, request.tags) == ("team", record.id, {"floor": "3"})
            assert (request.surface, request.whole) == ("chat", True)
