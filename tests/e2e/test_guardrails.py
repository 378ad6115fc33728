"""Guardrails in LiteLLM's form: content filters before and after the model, on every API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, config_of, gateway
from tests.e2e.hosting import calls
from tests.e2e.messages import message_in
from tests.fakes import FakeVllm, Refusal, VllmScript
from tests.fakes.openai_api import FakeOpenAi, OpenAiScript
from tests.mcp.conftest import Upstream
from unisono.bootstrap.hooks import build_hooks
from unisono.config import parse
from unisono.core.passthrough_request import passed_texts
from unisono.errors import ConfigError
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
MAIL = "ann@example.com"
ANSWER = load_encoding().encode_marked(
    f"<|channel|>analysis<|message|>They want {MAIL}.<|end|>"
    f"<|start|>assistant<|channel|>final<|message|>Write to {MAIL} or to bob@example.com.<|return|>"
)
MASK_MAIL = {"pattern_type": "prebuilt", "pattern_name": "email", "action": "MASK"}
BLOCK_MAIL = {"pattern_type": "prebuilt", "pattern_name": "email", "action": "BLOCK"}
# Path, and a body with the text `{text}`.
SURFACES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "{text}"}]}),
    "responses": ("/v1/responses", {"input": "{text}"}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "{text}"}], "max_tokens": 999}),
    "completions": ("/v1/completions", {"prompt": "{text}", "max_tokens": 99}),
}
SURFACE = pytest.mark.parametrize("name", SURFACES)


USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hi"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "x"}
# Bodies of requests that contain the address in other places than the text of a message.
HIDDEN: dict[str, tuple[str, dict[str, Any]]] = {
    "call": (
        "chat",
        {"messages": [{**ASSISTANT, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": MAIL}}]}, USER]},
    ),
    "old call": ("chat", {"messages": [{**ASSISTANT, "function_call": {"name": "f", "arguments": MAIL}}, USER]}),
    "reasoning": ("chat", {"messages": [{**ASSISTANT, "reasoning_content": MAIL}, USER]}),
    "refusal": ("chat", {"messages": [{**ASSISTANT, "content": [{"type": "refusal", "refusal": MAIL}]}, USER]}),
    "response call": (
        "responses",
        {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": f'{{"a":"{MAIL}"}}'}, OUTPUT]},
    ),
    "custom call": (
        "responses",
        {"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f", "input": MAIL}, OUTPUT]},
    ),
    "instructions": ("responses", {"instructions": MAIL, "input": "Hi"}),
}


def guardrail(mode: str | list[str], *, name: str = "mails", on: bool = True, **rules: Any) -> dict[str, Any]:
    params = {"guardrail": "litellm_content_filter", "mode": mode, "default_on": on, **rules}
    return {"guardrail_name": name, "litellm_params": params}


@asynccontextmanager
async def guarded(*guardrails: dict[str, Any], **sections: Any) -> AsyncIterator[tuple[Gateway, FakeVllm]]:
    async with FakeVllm(tokens=ANSWER) as fake:
        config = config_of(f"vllm@{fake.url}", guardrails=[*guardrails], **sections)
        config["unisono"] = {"raw_completions": True, **config.get("unisono", {})}
        async with gateway(config) as running:
            yield running, fake


async def post(running: Gateway, name: str, text: str = "Hi", **more: Any) -> Answer:
    path, body = SURFACES[name]
    sent = json.dumps({"model": "gpt-oss", **body, **more}).replace("{text}", text)
    return await running.post(path, sent.encode())


@SURFACE
async def test_a_blocked_request_reaches_no_backend(name: str) -> None:
    async with guarded(guardrail("pre_call", patterns=[BLOCK_MAIL])) as (running, fake):
        answer = await post(running, name, f"I am {MAIL}")
        assert answer.status == 400
        assert "blocked content: email" in answer.body["error"]["message"]
        assert MAIL not in answer.raw.decode()
        assert not fake.requests
        assert (await post(running, name)).status == 200


@SURFACE
async def test_what_a_request_masks_is_not_in_the_prompt(name: str) -> None:
    rules = {"patterns": [MASK_MAIL], "blocked_words": [{"keyword": "Zebra", "action": "MASK"}]}
    async with guarded(guardrail("during_call", **rules)) as (running, fake):
        assert (await post(running, name, f"I am {MAIL} and a ZEBRA")).status == 200
        sent = fake.requests[0].json["prompt"]
        prompt = sent if isinstance(sent, str) else load_encoding().decode(sent)
        assert "I am [EMAIL_REDACTED] and a [KEYWORD_REDACTED]" in prompt


@SURFACE
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_no_part_of_a_masked_text_is_emitted(name: str, stream: bool) -> None:
    async with guarded(guardrail("post_call", patterns=[MASK_MAIL])) as (running, _):
        answer = await post(running, name, stream=stream)
        assert answer.status == 200
        text = answer.raw.decode()
        assert "@example" not in text
        assert "ann@" not in text
        # A raw completion is a single text without the ends of messages.
        masked = "to [EMAIL_REDACTED]" if name == "completions" else "Write to [EMAIL_REDACTED] or to [EMAIL_REDACTED]."
        assert masked in text


@SURFACE
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_blocked_answer_ends_with_an_error(name: str, stream: bool) -> None:
    word = {"keyword": "write to", "action": "BLOCK"}
    async with guarded(guardrail(["pre_call", "post_call"], blocked_words=[word])) as (running, _):
        answer = await post(running, name, stream=stream)
        if not stream:
            assert answer.status == 400
        text = answer.raw.decode()
        assert "The answer contains blocked content: keyword." in text
        assert "Write" not in text


@pytest.mark.parametrize("on", ["request", "metadata", "model", "nothing"])
async def test_a_guardrail_applies_to_requests_and_models_that_name_it(on: str) -> None:
    async with FakeVllm(tokens=ANSWER) as fake:
        rules = [guardrail("pre_call", on=False, patterns=[BLOCK_MAIL])]
        config = config_of(f"vllm@{fake.url}", guardrails=rules, unisono={"raw_completions": True})
        if on == "model":
            config["model_list"][0]["litellm_params"]["guardrails"] = ["mails"]
        async with gateway(config) as running:
            for name in SURFACES:
                more = {"guardrails": ["mails"]}
                more = {"request": more, "metadata": {"metadata": more}}.get(on, {})
                answer = await post(running, name, f"I am {MAIL}", **more)
                assert answer.status == (200 if on == "nothing" else 400)
                answer = await post(running, name, guardrails=["mails"])
                assert answer.status == 200
                # The field has its effect, so there is no note.
                assert "x-unisono-notes" not in answer.headers


@SURFACE
async def test_an_unknown_guardrail_is_an_error(name: str) -> None:
    async with guarded(guardrail("pre_call", patterns=[BLOCK_MAIL])) as (running, fake):
        answer = await post(running, name, guardrails=["other"])
        assert answer.status == 400
        assert "'guardrails': this gateway has no guardrail 'other'" in answer.body["error"]["message"]
        answer = await post(running, name, guardrails=False)
        assert "'guardrails': must be a list of names" in answer.body["error"]["message"]
        assert not fake.requests


async def test_background_responses_cannot_choose_guardrails() -> None:
    async with guarded(guardrail("pre_call", on=False, patterns=[BLOCK_MAIL])) as (running, _):
        answer = await post(running, "responses", guardrails=["mails"], background=True)
        assert (answer.status, answer.body["error"]["param"]) == (400, "guardrails")
        answer = await post(running, "responses", metadata={"guardrails": ["mails"]}, background=True)
        assert (answer.status, answer.body["error"]["param"]) == (400, "metadata.guardrails")


async def test_a_stored_response_has_no_masked_text() -> None:
    async with guarded(guardrail("post_call", patterns=[MASK_MAIL])) as (running, fake):
        first = await post(running, "responses")
        stored = await running.get(f"/v1/responses/{first.body['id']}")
        assert b"example" not in stored.raw
        await post(running, "responses", previous_response_id=first.body["id"])
        prompt = load_encoding().decode(fake.requests[-1].json["prompt"])
        assert "Write to [EMAIL_REDACTED]" in prompt
        assert "example" not in prompt


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("action", ["MASK", "BLOCK"])
async def test_pass_through_answers_are_checked(stream: bool, action: str) -> None:
    async with FakeOpenAi(OpenAiScript(words=("Write to ann@", "example", ".com."))) as fake:
        rule = {**MASK_MAIL, "action": action}
        config = config_of(f"vllm@{fake.url}", name="llama", guardrails=[guardrail("post_call", patterns=[rule])])
        async with gateway(config) as running:
            answer = await post(running, "chat", model="llama", stream=stream)
            assert MAIL not in answer.raw.decode()
            assert "content" in answer.raw.decode()
            assert stream or answer.status == 400


@pytest.mark.parametrize("place", HIDDEN)
@pytest.mark.parametrize("model", ["llama", "gpt-oss"])
async def test_every_text_of_a_request_is_checked(place: str, model: str) -> None:
    surface, body = HIDDEN[place]
    async with FakeOpenAi() as provider, FakeVllm(tokens=ANSWER) as engine:
        url = provider.url if model == "llama" else engine.url
        config = config_of(f"vllm@{url}", name=model, guardrails=[guardrail("pre_call", patterns=[BLOCK_MAIL])])
        async with gateway(config) as running:
            answer = await post(running, surface, model=model, **body)
        assert answer.status == 400
        assert answer.body["error"]["code"] == "content_blocked"


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", ["messages", "responses"])
async def test_arguments_of_server_tools_are_masked(upstream: Upstream, name: str, stream: bool) -> None:
    url = upstream.urls["modern"]
    fields: dict[str, Any] = {"mcp_servers": [{"type": "url", "name": "docs", "url": url}]}
    if name == "responses":
        fields = {"tools": [{"type": "mcp", "server_label": "docs", "server_url": url, "require_approval": "never"}]}
    # The result of this tool does not contain its argument.
    outputs = iter([calls("huge", size=3, note=MAIL), "<|channel|>final<|message|>Done.<|return|>"])
    allowed = {"host": "127.0.0.1", "ports": [], "plain_http": True, "private": True}
    rules = guardrail("post_call", patterns=[MASK_MAIL])
    async with guarded(rules, unisono={"mcp_allowed_hosts": [allowed]}) as (running, fake):
        fake.script = lambda _: VllmScript(tokens=ENCODING.encode_marked(next(outputs)))
        answer = await post(running, name, stream=stream, **fields)
        assert MAIL not in answer.raw.decode()
        assert "[EMAIL_REDACTED]" in answer.raw.decode()


@SURFACE
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_masked_answer_in_json_stays_valid(name: str, stream: bool) -> None:
    if name == "completions":
        pytest.skip("a raw completion is the text of whole messages")
    output = '<|channel|>final<|message|>{"to": "Dear\\nann@example.com\\nHello", "n": 1}<|return|>'
    async with guarded(guardrail("post_call", patterns=[MASK_MAIL])) as (running, fake):
        fake.script = lambda _: VllmScript(tokens=ENCODING.encode_marked(output))
        answer = await post(running, name, stream=stream)
    masked = json.dumps('{"to": "Dear\\n[EMAIL_REDACTED]\\nHello", "n": 1}')
    assert masked[1:-1] in answer.raw.decode()


@pytest.mark.parametrize("field", ["more", "index"])
@pytest.mark.parametrize("action", ["MASK", "BLOCK"])
async def test_a_deeply_nested_pass_through_answer_is_checked(action: str, field: str) -> None:
    nested = "[" * 950 + f'"{MAIL}"' + "]" * 950
    message = f'{{"role":"assistant","content":"Hi","{field}":{nested}}}'
    choice = f'{{"index":0,"message":{message},"finish_reason":"stop"}}'
    async with FakeOpenAi(Refusal(200, f'{{"id":"1","choices":[{choice}]}}'.encode())) as fake:
        rules = guardrail("post_call", patterns=[{**MASK_MAIL, "action": action}])
        async with gateway(config_of(f"vllm@{fake.url}", name="llama", guardrails=[rules])) as running:
            assert (await post(running, "chat", model="llama")).status == 400


def test_the_pieces_of_a_pass_through_stream_are_joined() -> None:
    chat = [{"choices": [{"index": 0, "delta": {"content": piece}}]} for piece in ("ann@", "example", ".com")]
    assert f"{MAIL}" in passed_texts(chat)
    calls = [
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}}]}
        for piece in ("ann@", "example.com")
    ]
    assert MAIL in passed_texts(calls)
    events = [
        {"type": "response.output_text.delta", "output_index": 0, "content_index": 0, "sequence_number": n, "delta": d}
        for n, d in enumerate(("ann@", "example.com"))
    ]
    assert MAIL in passed_texts(events)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"guardrail": "presidio"}, "guardrails[0].litellm_params: `presidio_analyzer_api_base` is missing"),
        ({"mode": "logging_only"}, "guardrails[0].litellm_params.mode"),
        ({"patterns": []}, "guardrails[0].litellm_params: the content filter has no rules"),
        (
            {"patterns": [{**MASK_MAIL, "pattern_name": "x"}]},
            "guardrails[0].litellm_params.patterns[0].pattern_name: unknown prebuilt expression `x`",
        ),
        (
            {"patterns": [{"pattern_type": "regex", "pattern": "(?<!a)b"}]},
            "guardrails[0].litellm_params.patterns[0].pattern: the expression is not valid in RE2",
        ),
        (
            {"patterns": [{"pattern_type": "regex", "pattern": "a*"}]},
            "guardrails[0].litellm_params.patterns[0].pattern: the expression matches an empty text",
        ),
        ({"guardrail": "bedrock"}, "guardrails[0] (bedrock): this LiteLLM setting protects the gateway"),
    ],
    ids=str,
)
def test_mistakes_are_errors_at_start(changed: dict[str, Any], message: str) -> None:
    entry = guardrail("pre_call", patterns=[MASK_MAIL])
    entry["litellm_params"] |= changed
    with pytest.raises(ConfigError) as raised:
        build_hooks(parse(config_of("vllm@http://127.0.0.1:1", guardrails=[entry]), {}).config)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", ["mails", "guardrails"])
def test_a_guardrail_that_is_not_supported_has_to_be_acknowledged(name: str) -> None:
    entry = guardrail("pre_call")
    entry["litellm_params"]["guardrail"] = "bedrock"
    config = config_of("vllm@http://127.0.0.1:1", guardrails=[entry], unisono={"acknowledge": [name]})
    loaded = parse(config, {})
    assert not loaded.config.guardrails
    assert any("as acknowledged" in warning for warning in loaded.warnings)


def test_unknown_names_and_equal_names_are_errors() -> None:
    entry = guardrail("pre_call", patterns=[MASK_MAIL])
    config = config_of("vllm@http://127.0.0.1:1", guardrails=[entry, entry])
    with pytest.raises(ConfigError, match=r"guardrails\[1\]\.guardrail_name: another guardrail"):
        build_hooks(parse(config, {}).config)
    config["model_list"][0]["litellm_params"]["guardrails"] = ["other"]
    with pytest.raises(ConfigError, match=r"model_list\[0\]\.litellm_params\.guardrails: unknown guardrail `other`"):
        build_hooks(parse(config, {}).config)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_summary_of_a_compaction_is_masked_and_stays_masked(stream: bool) -> None:
    summary = ENCODING.encode_marked(f"<|channel|>final<|message|>The user is {MAIL}.<|return|>")
    async with guarded(guardrail("post_call", patterns=[MASK_MAIL])) as (running, fake):
        fake.script = lambda _: VllmScript(tokens=summary)
        messages: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        answer = await running.messages(messages=messages, compaction={"type": "summarize"}, stream=stream)
        assert answer.status == 200, answer.raw
        assert MAIL not in answer.raw.decode()
        assert "The user is [EMAIL_REDACTED]." in answer.raw.decode()
        # The sealed items of the compaction have the masked summary too.
        block = message_in(answer)["content"][0]
        messages = [{"role": "assistant", "content": [block]}, {"role": "user", "content": "Who am I?"}]
        await running.messages(messages=messages)
        prompt = ENCODING.decode(fake.requests[-1].json["prompt"])
        assert "The user is [EMAIL_REDACTED]." in prompt
        assert MAIL not in prompt


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", ["chat", "responses", "completions"])
async def test_alternatives_of_tokens_are_left_out_because_no_guardrail_checks_them(name: str, stream: bool) -> None:
    path, body = SURFACES[name]
    options: dict[str, Any] = {
        "chat": {"logprobs": True, "top_logprobs": 3},
        "responses": {"top_logprobs": 3},
        "completions": {"logprobs": 3, "return_token_ids": True},
    }[name]
    raw = json.dumps({"model": "gpt-oss", "stream": stream, **body, **options}).encode()
    async with guarded(guardrail("post_call", patterns=[MASK_MAIL]), unisono={"raw_completions": True}) as (
        running,
        fake,
    ):
        answer = await running.post(path, raw)
    assert answer.status == 200, answer.raw
    assert b"logprobs: no effect on alternatives, because a guardrail checks the answers" in answer.raw
    assert fake.requests[0].json["logprobs"] == 0
    assert MAIL.encode() not in answer.raw
    # Neither the address nor a part of it is among the log probabilities of the visible text.
    assert b"example" not in answer.raw
    if name == "completions":
        choices = [choice for body in answer.events or [answer.body] for choice in body.get("choices", ())]
        assert {choice["token_ids"] and tuple(choice["token_ids"]) for choice in choices} == {None}


async def test_without_a_guardrail_of_answers_alternatives_are_reported() -> None:
    async with guarded(guardrail("pre_call", patterns=[BLOCK_MAIL])) as (running, fake):
        answer = await running.chat(logprobs=True, top_logprobs=3)
    assert answer.status == 200
    assert fake.requests[0].json["logprobs"] == 3


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_the_repeated_prompt_is_the_masked_one(stream: bool) -> None:
    body = {"model": "gpt-oss", "prompt": f"To {MAIL}", "max_tokens": 99, "echo": True, "return_token_ids": True}
    raw = json.dumps({**body, "stream": stream}).encode()
    async with guarded(guardrail("pre_call", patterns=[MASK_MAIL]), unisono={"raw_completions": True}) as (running, _):
        answer = await running.post("/v1/completions", raw)
    choices = [choice for found in answer.events or [answer.body] for choice in found.get("choices", ())]
    assert "".join(choice["text"] for choice in choices).startswith("To [EMAIL_REDACTED]")
    assert choices[0]["prompt_token_ids"] is None
