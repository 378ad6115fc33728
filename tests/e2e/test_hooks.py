"""Hooks on every API surface: refusals, changes, annotations and failures."""

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
from unisono.core.generation import RETURN
from unisono.core.quotas import KeyLimits

Json = dict[str, Any]


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)


@asynccontextmanager
async def hooked(*hooks: Any) -> AsyncIterator[Line]:
    async with line(WIRES["vllm"], unisono={"hooks": list(hooks)}) as harness:
        yield harness


@dataclass(frozen=True)
class Outcome:
    """Outcome for the client on any API surface; `status` is the HTTP status of an error."""

    text: str = ""
    about: Json = field(default_factory=dict)
    error: Json | None = None
    status: int = 200
    raw: str = ""


def of_chat(answer: Answer) -> Outcome:
    if answer.status != 200:
        return Outcome(error=answer.body["error"], status=answer.status, raw=answer.raw.decode())
    if answer.events and "error" in answer.events[-1]:
        return Outcome(error=answer.events[-1]["error"], raw=answer.raw.decode())
    message = message_of(answer)
    return Outcome(message.content or "", message.note, raw=answer.raw.decode())


def of_response(response: Json) -> Outcome:
    return Outcome(text_of(response), response["unisono"], response["error"], raw=json.dumps(response))


async def chat(harness: Line, text: str, *, stream: bool) -> Outcome:
    return of_chat(await harness.gateway.chat(messages=[{"role": "user", "content": text}], stream=stream))


async def message(harness: Line, text: str, *, stream: bool) -> Outcome:
    answer = await harness.gateway.messages(messages=[{"role": "user", "content": text}], stream=stream)
    error = answer.body if answer.status != 200 else answer.events[-1] if answer.events else {}
    if "error" in error:
        return Outcome(error=error["error"], status=answer.status, raw=answer.raw.decode())
    answer_message = in_messages(answer)
    return Outcome(answer_message.content or "", answer_message.note, raw=answer.raw.decode())


async def response(harness: Line, text: str, *, stream: bool) -> Outcome:
    answer = await harness.post(input=text, stream=stream)
    if answer.status != 200:
        return Outcome(error=answer.body["error"], status=answer.status, raw=answer.raw.decode())
    for event in answer.events:
        if event["type"] == "error":
            return Outcome(error=event, raw=answer.raw.decode())
    return of_response(answer.events[-1]["response"] if stream else answer.body)


async def background(harness: Line, text: str) -> Outcome:
    answer = await harness.post(input=text, background=True)
    if answer.status != 200:
        return Outcome(error=answer.body["error"], status=answer.status, raw=answer.raw.decode())
    async with aiohttp.ClientSession() as session:
        return of_response(await Client(harness.gateway.url, session).over(answer.body["id"], every_s=0.01))


async def socket(harness: Line, text: str) -> Outcome:
    async with connected(harness.gateway) as client:
        await client.send(input=text)
        events = [await client.event()]
        while events[-1]["type"] not in {"error", "response.completed", "response.failed"}:
            events.append(await client.event())
        if events[-1]["type"] == "error":
            last = events[-1]
            return Outcome(error=last["error"], status=last.get("status", 200), raw=json.dumps(last))
        return of_response(events[-1]["response"])


Surface = Callable[[Line, str], Awaitable[Outcome]]
SURFACES: dict[str, Surface] = {
    "Chat, whole": lambda harness, text: chat(harness, text, stream=False),
    "Chat, streamed": lambda harness, text: chat(harness, text, stream=True),
    "Messages, whole": lambda harness, text: message(harness, text, stream=False),
    "Messages, streamed": lambda harness, text: message(harness, text, stream=True),
    "Responses, whole": lambda harness, text: response(harness, text, stream=False),
    "Responses, streamed": lambda harness, text: response(harness, text, stream=True),
    "Responses, in the background": background,
    "Responses, over a WebSocket": socket,
}
WHOLE = {"Chat, whole", "Messages, whole", "Responses, whole"}
every_surface = pytest.mark.parametrize("surface", SURFACES.values(), ids=SURFACES)


@every_surface
async def test_refused_request_reaches_no_backend(surface: Surface) -> None:
    async with hooked({"failing": {"at": "before", "way": "refuses"}}) as harness:
        outcome = await surface(harness, "Hi")
        assert outcome.error is not None
        # Failures in OpenAI streams have one of a few codes.
        assert outcome.error.get("code", "no_thanks") in ("no_thanks", "invalid_prompt")
        assert outcome.error["message"] in ("Not here.", "input: Not here.")
        assert outcome.error.get("param", "input") == "input"
        assert outcome.status in (200, 403)
        assert asked(harness.fake) == []
        assert (await read(harness.gateway.url))("hook_failures_total") == 0


async def test_refusal_has_its_status_and_the_format_of_the_api() -> None:
    async with hooked({"failing": {"at": "before", "way": "refuses"}}) as harness:
        for stream in (False, True):
            assert refusal(await harness.post(stream=stream), 403, "input", "no_thanks") == "Not here."
            assert refusal(await harness.gateway.chat(stream=stream), 403, "input", "no_thanks") == "Not here."


STORED_REQUESTS: dict[str, Json] = {
    "in the background": {"background": True},
    "in the background, streamed": {"background": True, "stream": True},
    "in the foreground": {},
}


@pytest.mark.parametrize("way", ["refuses", "raises"])
@pytest.mark.parametrize("fields", STORED_REQUESTS.values(), ids=STORED_REQUESTS)
async def test_refused_response_leaves_no_trace_in_the_store(tmp_path: Path, fields: Json, way: str) -> None:
    async with FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake:
        config = config_of(f"vllm@{fake.url}", unisono={"hooks": [{"failing": {"at": "before", "way": way}}]})
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(limits=KeyLimits(max_parallel=1, token_budget=5000))
            conversation = json.loads((await running.post("/v1/conversations", b"{}", **bearing(key))).raw)["id"]
            body = json.dumps({"model": "gpt-oss", "input": "Hi", "conversation": conversation, **fields}).encode()
            # Repeatedly: slot, budget, conversation and key must be free again at once.
            for _ in range(3):
                refused = await running.post("/v1/responses", body, **bearing(key), idempotency_key="one")
                status, code = (403, "no_thanks") if way == "refuses" else (503, "hook_failed")
                refusal(refused, status, "input" if way == "refuses" else None, code)
            assert asked(fake) == []
            assert (await running.get(f"/v1/conversations/{conversation}/items", **bearing(key))).body["data"] == []
            used = (await running.get("/v1/usage", **bearing(key))).body["total"]
            assert (used["requests"], used["errors"], used["total_tokens"]) == (3, 3, 0)
        with closing(sqlite3.connect(tmp_path / "state.db")) as database:
            assert database.execute("SELECT count(*) FROM responses").fetchone() == (0,)


@every_surface
async def test_hooks_change_the_prompt_in_order(surface: Surface) -> None:
    first, second = ({"replacing": {"word": word, "other": other}} for word, other in (("Ann", "Bea"), ("Bea", "Cleo")))
    async with hooked(first, second) as harness:
        assert (await surface(harness, "I am Ann.")).text == "ok"
        assert harness.said == "<|start|>user<|message|>I am Cleo.<|end|>"
        [request] = asked(harness.fake)
        assert (request.json["temperature"], request.json["logit_bias"]) == (0.25, {"17": 1.5})


@every_surface
async def test_hook_annotations_are_returned_with_the_answer(surface: Surface) -> None:
    async with hooked("hearing", {"hearing": {"says": "twice"}}) as harness:
        outcome = await surface(harness, "Hi")
        annotation = {"before": "heard", "after": "ok", "used": len(ENCODING.encode_marked(ANSWER))}
        assert outcome.about["hooks"] == {"hearing": annotation, "hearing-2": annotation | {"before": "twice"}}
        assert [name for name, _, _ in CALLS] == ["before", "before", "after", "after"]
        _, request, answer = CALLS[-1]
        assert answer is not None
        assert [closed.text for closed in answer.items] == ["Hm.", "ok"]
        assert (request.tenant, request.model, request.key) == ("local", "gpt-oss", "")
        assert bool(request.request_id)


async def test_hooks_run_for_each_of_several_choices() -> None:
    async with hooked("hearing") as harness:
        answer = await harness.gateway.chat(n=2)
        assert [annotation["before"] for annotation in answer.body["unisono"]["hooks"]["hearing"]] == ["heard", "heard"]
        assert sorted(name for name, _, _ in CALLS) == ["after", "after", "before", "before"]


@pytest.mark.parametrize("name", SURFACES)
async def test_refusal_after_the_answer_withholds_unsent_answers(name: str) -> None:
    async with hooked({"failing": {"at": "after", "way": "refuses"}}) as harness:
        outcome = await SURFACES[name](harness, "Hi")
        if name in WHOLE:
            assert outcome.error is not None
            assert (outcome.status, outcome.error.get("code", "no_thanks")) == (403, "no_thanks")
            assert "ok" not in outcome.raw
        else:
            assert outcome.error is None
            assert outcome.text == "ok"
            assert outcome.about["hooks"] == {"failing": {"refused": {"message": "Not here.", "code": "no_thanks"}}}


@pytest.mark.parametrize("at", ["before", "after"])
async def test_refusal_with_a_lone_surrogate_is_still_sent(at: str) -> None:
    async with hooked({"failing": {"at": at, "way": "refuses with a lone surrogate"}}) as harness:
        for ask in (harness.post, harness.gateway.chat):
            assert refusal(await ask(), 403, "input.\ufffd", "no_thanks") == "Not \ufffd."
        outcome = await chat(harness, "Hi", stream=True)
        error = outcome.error if at == "before" else outcome.about["hooks"]["failing"]["refused"]
        assert error is not None
        assert error["message"] == "Not \ufffd."


FAILURES = sorted({*WAYS, *SAYS} - {"refuses", "refuses with a lone surrogate"})


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("way", FAILURES)
@pytest.mark.parametrize("at", ["before", "after"])
async def test_failing_hook_fails_the_request_or_is_skipped_if_fail_open(at: str, way: str) -> None:
    failing = {"at": at, "way": way, "timeout_s": 0.05 if way == "sleeps" else 5}
    async with hooked({"failing": failing}) as harness:
        for name in ("Chat, whole", "Responses, streamed"):
            outcome = await SURFACES[name](harness, "Hi")
            assert outcome.error is not None
            assert outcome.error["code"] == "hook_failed"
            assert "'failing'" in outcome.error["message"]
            assert SECRET not in outcome.raw
            assert outcome.status == (503 if at == "before" or name in WHOLE else 200)
        assert len(asked(harness.fake)) == (0 if at == "before" else 2)
        assert await failures(harness, at) == 2
    async with hooked({"failing": {**failing, "fail": "open"}}, "hearing") as harness:
        for name in ("Chat, whole", "Responses, streamed"):
            outcome = await SURFACES[name](harness, "Hi")
            assert outcome.text == "ok"
            assert list(outcome.about["hooks"]) == ["hearing"]
        assert await failures(harness, at) == 2


async def failures(harness: Line, at: str) -> float:
    """Return the failure count of the hook in the call `at`, and check that no other is counted."""
    counted = await read(harness.gateway.url)
    assert counted("hook_failures_total") == counted("hook_failures_total", hook="failing", call=at)
    return counted("hook_failures_total")


@pytest.mark.parametrize("what", ["items", "sampling", "effort", "not changes"])
async def test_invalid_changes_of_a_hook_are_a_failure(what: str) -> None:
    async with hooked({"garbling": {"what": what}}) as harness:
        refusal(await harness.post(), 503, None, "hook_failed")
        refusal(await harness.gateway.chat(), 503, None, "hook_failed")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_stored_items_are_unchanged_and_pass_through_hooks_again(stream: bool) -> None:
    async with hooked({"replacing": {"word": "Ann", "other": "[name]"}}) as harness:
        harness.say("<|channel|>final<|message|>Hello, Ann.<|return|>", ANSWER)
        first = await harness.responds(stream=stream, input="I am Ann.", instructions="Be kind to Ann.")
        assert "Be kind to [name]." in harness.prompts[0]
        assert text_of(await harness.kept(first)) == "Hello, Ann."
        [item] = (await harness.get(f"/responses/{first['id']}/input_items")).body["data"]
        assert item["content"][0]["text"] == "I am Ann."
        await harness.responds(stream=stream, input="And Ann?", previous_response_id=first["id"])
        # The model's own text is changed too, with its tokens.
        assert harness.said == (
            "<|start|>user<|message|>I am [name].<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Hello, [name].<|end|>"
            "<|start|>user<|message|>And [name]?<|end|>"
        )


async def test_unchanged_items_keep_their_exact_tokens() -> None:
    async with hooked({"replacing": {"word": "Ann", "other": "[name]"}}, "hearing") as harness:
        # Tokens that no tokenizer would produce for this text.
        letters = [*ENCODING.encode_marked("o"), *ENCODING.encode_marked("k")]
        tokens = [*ENCODING.encode_marked("<|channel|>final<|message|>"), *letters, RETURN]
        harness.say(VllmScript(tokens=tokens))
        first = await harness.whole(input="I am Ann.")
        await harness.whole(input="Go on.", previous_response_id=first["id"])
        first_prompt, second_prompt = harness.tokens
        assert second_prompt[: len(first_prompt) + len(tokens) - 1] == [*first_prompt, *tokens[:-1]]


QUESTION = "How does it end for Ann?"


async def test_takeover_continues_the_prompt_as_changed_by_hooks(tmp_path: Path) -> None:
    model = Model(delay_s=0.02)
    async with FakeVllm(script=model.script) as fake:
        config = config_of(
            f"vllm@{fake.url}",
            store={"url": f"sqlite:///{str(tmp_path / 'state.db').removeprefix('/')}", "lease_s": 0.4},
            unisono={"hooks": ["hearing", {"replacing": {"word": "Ann", "other": "the cat"}}]},
        )
        async with gateway(config) as running, aiohttp.ClientSession() as session:
            client = Client(running.url, session)
            body = {"model": "gpt-oss", "input": QUESTION, "background": True, "instructions": "Ask Ann."}
            created = await client.post("/v1/responses", body)
            changed = QUESTION.replace("Ann", "the cat")
            async with asyncio.timeout(10):
                while not prompts_about(fake, changed):
                    await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)
            crash_background_tasks()
            stored = await client.over(created["id"])
            assert stored["status"] == "completed"
            assert text_of(stored) == model.text
            first, second = prompts_about(fake, changed)
            assert second[: len(first)] == first
            assert len(second) > len(first)
            assert "Ask the cat." in ENCODING.decode(second)
            assert prompts_about(fake, QUESTION) == []
            assert [name for name, _, _ in CALLS] == ["before", "after"]
            assert stored["unisono"]["hooks"]["hearing"] == {
                "before": "heard",
                "after": model.text,
                "used": len(model.answer),
            }


async def test_takeover_continues_a_compacted_conversation_as_changed_by_hooks(tmp_path: Path) -> None:
    model = Model(delay_s=0.02)
    async with FakeVllm(script=model.script) as fake:
        config = config_of(
            f"vllm@{fake.url}",
            store={"url": f"sqlite:///{str(tmp_path / 'state.db').removeprefix('/')}", "lease_s": 0.4},
            unisono={"hooks": [{"replacing": {"word": "Ann", "other": "the cat"}}]},
        )
        async with gateway(config) as running, aiohttp.ClientSession() as session:
            client = Client(running.url, session)
            body = {
                "model": "gpt-oss",
                "input": [{"role": "assistant", "content": "once " * 1500}, {"role": "user", "content": QUESTION}],
                "context_management": [{"type": "compaction", "compact_threshold": 1000}],
                "background": True,
            }
            created = await client.post("/v1/responses", body)
            changed = QUESTION.replace("Ann", "the cat")
            async with asyncio.timeout(10):
                while len(prompts_about(fake, changed)) < 2:
                    await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)
            crash_background_tasks()
            stored = await client.over(created["id"])
            assert [item["type"] for item in stored["output"]] == ["compaction", "reasoning", "message"]
            assert text_of(stored) == model.text
            summary, first, second = prompts_about(fake, changed)
            assert len(first) < len(second) < len(summary)
            assert second[: len(first)] == first
            assert prompts_about(fake, QUESTION) == []


async def test_takeover_without_the_hooks_fails_the_response(tmp_path: Path) -> None:
    model = Model(delay_s=0.02)
    async with FakeVllm(script=model.script) as fake, aiohttp.ClientSession() as session:
        store = {"url": f"sqlite:///{str(tmp_path / 'state.db').removeprefix('/')}", "lease_s": 0.4}
        config = config_of(f"vllm@{fake.url}", store=store)
        hooks = {"hooks": [{"replacing": {"word": "Ann", "other": "the cat"}}]}
        async with gateway({**config, "unisono": hooks}) as running:
            client = Client(running.url, session)
            body = {"model": "gpt-oss", "input": QUESTION, "background": True}
            created = await client.post("/v1/responses", body)
            async with asyncio.timeout(10):
                while not prompts_about(fake, "the cat"):
                    await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)
        async with gateway(config) as running:
            stored = await Client(running.url, session).over(created["id"])
            assert stored["status"] == "failed"
            assert prompts_about(fake, QUESTION) == []


async def test_refused_request_uses_no_tokens_and_no_budget(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake:
        hooks = [{"failing": {"at": "before", "way": "refuses"}}]
        config = config_of(f"vllm@{fake.url}", unisono={"hooks": hooks})
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(limits=KeyLimits(token_budget=400, max_parallel=1))
            body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()
            for _ in range(5):
                refused = await running.post("/v1/chat/completions", body, **bearing(key))
                assert refused.body["error"]["code"] == "no_thanks"
            # The response does not wait for the record of a request without usage.
            async with asyncio.timeout(10):
                while (used := (await running.get("/v1/usage", **bearing(key))).body["total"])["requests"] < 5:
                    await asyncio.sleep(0.02)
            assert (used["requests"], used["errors"], used["total_tokens"]) == (5, 5, 0)


async def test_answer_with_a_token_budget_has_hook_annotations(tmp_path: Path) -> None:
    async with FakeVllm(tokens=ENCODING.encode_marked(ANSWER)) as fake:
        config = config_of(f"vllm@{fake.url}", unisono={"hooks": ["hearing"]})
        async with keyed(config, tmp_path) as (running, keys):
            _, key = await keys.issue(limits=KeyLimits(token_budget=400))
            body = json.dumps({"model": "gpt-oss", "messages": [{"role": "user", "content": "Hi"}]}).encode()
            answer = await running.post("/v1/chat/completions", body, **bearing(key))
            assert answer.body["unisono"]["hooks"]["hearing"]["after"] == "ok"
            assert [name for name, _, _ in CALLS] == ["before", "after"]


async def test_request_over_a_limit_reaches_no_hook(tmp_path: Path) -> None:
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
