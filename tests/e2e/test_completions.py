"""Raw completions through the whole gateway.

They use ids and text wires, with and without streaming, and failing backends.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, config_of, gateway
from tests.e2e.hooked import install
from tests.e2e.keyed import bearing, keyed
from tests.e2e.playing import Play, staged
from tests.e2e.wires import WIRES, Fake, Wire, asked
from tests.fakes import FakeVllm, close_at, half_event_at, reset_at, stall_at
from unisono.core.quotas import KeyLimits
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
IDS = ENCODING.encode_as_server(PROMPT)
OUTPUT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Naïve 日本."
SCRIPT = OUTPUT + "<|return|>"
OUTPUT_WITHOUT_MARKERS = "analysisHm.assistantfinalNaïve 日本."
NO_COOLDOWN = {"allowed_fails": 100_000, "cooldown_time": 0.01}
RAW_COMPLETIONS = {"raw_completions": True}


def config(*deployments: str, **unisono: Any) -> dict[str, Any]:
    served = config_of(*deployments, router_settings=NO_COOLDOWN, unisono={**RAW_COMPLETIONS, **unisono})
    for entry in served["model_list"]:
        entry["litellm_params"]["stream_timeout"] = 0.5
    return served


def stage(*kinds: str, **unisono: Any) -> AbstractAsyncContextManager[tuple[Play, Gateway]]:
    return staged(SCRIPT, kinds, config, **unisono)


async def complete(running: Gateway, *, path: str = "/v1/completions", headers: Any = None, **fields: Any) -> Answer:
    body = {"model": "gpt-oss", "prompt": PROMPT, "max_tokens": 100, "skip_special_tokens": False, **fields}
    return await running.post(path, json.dumps(body).encode(), **(headers or {}))


def text_of(answer: Answer, index: int = 0) -> str:
    if answer.body is not None:
        return str(answer.body["choices"][index]["text"])
    choices = [choice for event in answer.events for choice in event.get("choices", ())]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
async def test_prompt_and_output_pass_unchanged(wire: Wire, stream: bool) -> None:
    async with wire.fake() as fake:
        fake.script = lambda _: wire.script(SCRIPT)  # type: ignore[assignment]
        async with gateway(config(f"{wire.name}@{fake.url}")) as running:
            await expect_verbatim(running, wire, fake, stream=stream)


async def expect_verbatim(running: Gateway, wire: Wire, fake: Fake, *, stream: bool) -> None:
    for path in ("/v1/completions", "/completions"):
        for prompt in (PROMPT, IDS):
            answer = await complete(running, path=path, prompt=prompt, stream=stream)
            assert (answer.status, text_of(answer)) == (200, OUTPUT)
            assert asked(fake)[-1].json["prompt"] == (IDS if wire.name == "vllm" else PROMPT)
    hidden = await complete(running, stream=stream, skip_special_tokens=None)
    assert text_of(hidden) == OUTPUT_WITHOUT_MARKERS


async def test_response_has_the_openai_format() -> None:
    async with stage("vllm") as (_, running):
        answer = await complete(running)
        body = answer.body
        assert body["id"].startswith("cmpl-")
        assert (body["object"], body["model"]) == ("text_completion", "gpt-oss")
        [choice] = body["choices"]
        assert choice == {
            "index": 0,
            "text": OUTPUT,
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": 200002,
        }
        output_tokens = len(ENCODING.encode_as_server(SCRIPT))
        assert body["usage"] == {
            "prompt_tokens": len(IDS),
            "completion_tokens": output_tokens,
            "total_tokens": len(IDS) + output_tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        assert body["unisono"] == {"recoveries": [], "failovers": 0, "backend": "vllm-1"}
        assert answer.headers["x-unisono-backend"] == "vllm-1"
        short = (await complete(running, max_tokens=None)).body
        assert (short["choices"][0]["finish_reason"], short["usage"]["completion_tokens"]) == ("length", 16)


async def test_stream_ends_with_finish_reason_usage_and_done() -> None:
    async with stage("vllm") as (_, running):
        answer = await complete(running, stream=True, stream_options={"include_usage": True})
        assert answer.done
        assert {event["object"] for event in answer.events} == {"text_completion"}
        *chunks, ending, last = answer.events
        assert all(event["choices"][0]["finish_reason"] is None and event["usage"] is None for event in chunks)
        assert (ending["choices"][0]["finish_reason"], ending["usage"]) == ("stop", None)
        assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], len(IDS))
        without = await complete(running, stream=True)
        assert without.events[-1]["unisono"]["backend"] == "vllm-1"
        assert all("usage" not in event for event in without.events)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_each_prompt_has_n_choices_and_counts_once_in_usage(stream: bool) -> None:
    async with stage("vllm") as (_, running):
        fields = {"prompt": [IDS, IDS], "n": 2, "echo": True, "stream": stream}
        answer = await complete(running, **fields, stream_options={"include_usage": True} if stream else None)
        assert [text_of(answer, index) for index in range(4)] == [PROMPT + OUTPUT] * 4
        usage = answer.events[-1]["usage"] if stream else answer.body["usage"]
        assert usage["prompt_tokens"] == 2 * len(IDS)
        assert usage["completion_tokens"] == 4 * len(ENCODING.encode_as_server(SCRIPT))


async def test_return_token_ids_reports_the_tokens_of_prompt_and_text() -> None:
    async with stage("vllm") as (_, running):
        for prompt in (PROMPT, IDS):
            [choice] = (await complete(running, prompt=prompt, return_token_ids=True)).body["choices"]
            assert (choice["prompt_token_ids"], choice["token_ids"]) == (IDS, ENCODING.encode_as_server(SCRIPT))
            answer = await complete(running, prompt=prompt, return_token_ids=True, stream=True)
            choices = [choice for event in answer.events for choice in event["choices"]]
            assert [choice.get("prompt_token_ids") for choice in choices] == [IDS, *[None] * (len(choices) - 1)]
            assert [token for choice in choices for token in choice["token_ids"]] == ENCODING.encode_as_server(SCRIPT)


@pytest.mark.parametrize("kinds", [("vllm", "llamacpp"), ("sglang", "ollama"), ("mlx_server", "vllm")], ids="-".join)
async def test_interrupted_completion_continues_on_another_backend(kinds: tuple[str, str]) -> None:
    async with stage(*kinds) as (play, running):
        for fault in (reset_at, close_at, half_event_at):
            for position in (0, 1, 2):
                for stream in (True, False):
                    play.asked.clear()
                    play.failures = [fault(position)]
                    answer = await complete(running, stream=stream)
                    assert (answer.status, text_of(answer)) == (200, OUTPUT)
                    about = answer.events[-1]["unisono"] if stream else answer.body["unisono"]
                    assert about["failovers"] == 1
                    assert set(play.asked) == set(kinds)


async def test_interrupted_stream_ends_with_an_error_without_another_backend() -> None:
    def unretrying(*deployments: str) -> dict[str, Any]:
        return config(*deployments) | {"router_settings": {**NO_COOLDOWN, "num_retries": 0}}

    async with staged(SCRIPT, ["vllm"], unretrying) as (play, running):
        play.failures = [reset_at(6)] * 9
        answer = await complete(running, stream=True)
        assert not answer.done
        assert answer.events[-1]["error"]["type"] == "server_error"
        assert OUTPUT.startswith(text := text_of(answer))
        assert text


async def test_client_disconnect_aborts_the_completion() -> None:
    async with FakeVllm(tokens=ENCODING.encode_as_server(SCRIPT), faults=(stall_at(3),)) as fake:
        served = config(f"vllm@{fake.url}")
        served["model_list"][0]["litellm_params"]["stream_timeout"] = 60
        async with gateway(served) as running:
            body = json.dumps({"model": "gpt-oss", "prompt": PROMPT, "stream": True}).encode()
            headers = {"content-type": "application/json"}
            async with running.session.post(running.url + "/v1/completions", data=body, headers=headers) as response:
                await response.content.readline()
            await fake.gone()


async def test_raw_completions_are_disabled_by_default() -> None:
    async with FakeVllm() as fake, gateway(config_of(f"vllm@{fake.url}")) as running:
        answer = await complete(running)
        assert (answer.status, answer.body["error"]["code"]) == (403, "permission_denied")
        assert "raw_completions: true" in answer.body["error"]["message"]
        assert not [request for request in asked(fake) if request.json.get("prompt") == IDS]


async def test_completion_counts_toward_the_limits_and_usage_of_its_key(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVllm(tokens=ENCODING.encode_as_server(SCRIPT)))
        running, ring = await stack.enter_async_context(keyed(config(f"vllm@{fake.url}"), tmp_path))
        _, key = await ring.issue(raw=True, limits=KeyLimits(rpm=1, token_budget=100_000))
        _, unlimited = await ring.issue(raw=True)
        _, unprivileged = await ring.issue()
        assert (await complete(running, headers=bearing(unprivileged))).status == 403
        answer = await complete(running, headers=bearing(key))
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await complete(running, headers=bearing(key))).status == 429
        await complete(running, headers=bearing(unlimited))
        output_tokens = len(ENCODING.encode_as_server(SCRIPT))
        # The usage of a key without limits is written after the answer.
        used = {"requests": 0}
        async with asyncio.timeout(10):
            while not used["requests"]:
                used = (await running.get("/v1/usage", **bearing(unlimited))).body["total"]
        assert (used["input_tokens"], used["output_tokens"]) == (len(IDS), output_tokens)


async def test_hook_can_replace_or_refuse_a_raw_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)
    replacing = {"replacing": {"word": "Ann", "other": "Bea"}}
    blocking = {"blocklist": {"patterns": {"card": "[0-9]{4}"}}}
    template = "<|start|>user<|message|>I am {}.<|end|><|start|>assistant"
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeVllm(tokens=ENCODING.encode_as_server(SCRIPT)))
        hooks = [replacing, blocking]
        running = await stack.enter_async_context(gateway(config(f"vllm@{fake.url}", hooks=hooks)))
        for name, expected in (("Ann", "Bea"), ("Cleo", "Cleo")):
            for prompt in (template.format(name), ENCODING.encode_as_server(template.format(name))):
                assert (await complete(running, prompt=prompt)).status == 200
                assert asked(fake)[-1].json["prompt"] == ENCODING.encode_as_server(template.format(expected))
        refused = await complete(running, prompt=template.format("1234"))
        assert (refused.status, refused.body["error"]["param"]) == (400, "prompt")


async def test_completions_have_their_own_surface_label_in_metrics() -> None:
    async with stage("vllm") as (_, running):
        await complete(running)
        async with running.session.get(running.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        assert any('surface="completions"' in line and "requests_total" in line for line in lines)
