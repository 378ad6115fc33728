"""Log probabilities of visible tokens on Chat Completions, Responses and raw completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, config_of, gateway
from tests.fakes import FakeLlamaCpp, FakeOllama, FakeVllm
from tests.fakes.dialects import logprob_of
from tests.fakes.sglang import FakeSglang
from unisono.harmony.encoding import load_encoding

ENCODING = load_encoding()
TEXT = "Hello, 🦜 world."
BODY = ENCODING.encode_text(TEXT)
ANSWER = [
    *ENCODING.encode_marked(
        "<|channel|>analysis<|message|>Hello to all.<|end|><|start|>assistant<|channel|>final<|message|>"
    ),
    *BODY,
    *ENCODING.encode_marked("<|return|>"),
]
# Token text, log probability and bytes of each token of the answer.
EXPECTED = [
    (ENCODING.decode_bytes([token]).decode("utf-8", "replace"), logprob_of(token), [*ENCODING.decode_bytes([token])])
    for token in BODY
]
# llama-server does not report tokens that end inside of a character.
PARTIAL = [position for position, (text, *_) in enumerate(EXPECTED) if "\ufffd" in text]
OF_KIND = {
    "vllm": EXPECTED,
    "sglang": EXPECTED,
    "llamacpp": [one for position, one in enumerate(EXPECTED) if position not in PARTIAL[:-1]],
}
FAKES = {"vllm": FakeVllm, "sglang": FakeSglang, "llamacpp": FakeLlamaCpp}
STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
KIND = pytest.mark.parametrize("kind", FAKES)


def config(kind: str, url: str) -> dict[str, Any]:
    return config_of(f"{kind}@{url}", unisono={"raw_completions": True})


def triples(entries: list[dict[str, Any]]) -> list[tuple[str, float, list[int]]]:
    return [(entry["token"], entry["logprob"], entry["bytes"]) for entry in entries]


async def responses(running: Gateway, **fields: Any) -> Answer:
    return await running.post("/v1/responses", json.dumps({"model": "gpt-oss", "input": "Hi", **fields}).encode())


@KIND
@STREAM
async def test_chat_reports_visible_tokens_only(kind: str, stream: bool) -> None:
    async with FAKES[kind](tokens=ANSWER) as fake, gateway(config(kind, fake.url)) as running:
        answer = await running.chat(logprobs=True, top_logprobs=2, stream=stream)
        plain = await running.chat(stream=stream)
    assert answer.status == 200, answer.raw
    choices = [choice for event in answer.events for choice in event["choices"]] if stream else answer.body["choices"]
    content = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content") or ()]
    assert triples(content) == OF_KIND[kind]
    whole = [entry for entry in content if "\ufffd" not in entry["token"]]
    assert {len(entry["top_logprobs"]) for entry in whole} <= {1, 2}
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in whole)
    if stream:
        # Each chunk has the tokens that its text completes.
        assert "".join(choice["delta"].get("content") or "" for choice in choices) == TEXT
    bodies = [event["choices"] for event in plain.events] if stream else [plain.body["choices"]]
    assert {choice["logprobs"] for choices in bodies for choice in choices} == {None}


@KIND
@STREAM
async def test_responses_reports_them_in_deltas_and_items(kind: str, stream: bool) -> None:
    include = ["message.output_text.logprobs"]
    async with FAKES[kind](tokens=ANSWER) as fake, gateway(config(kind, fake.url)) as running:
        answer = await responses(running, include=include, top_logprobs=1, stream=stream)
        assert answer.status == 200, answer.raw
        response = answer.events[-1]["response"] if stream else answer.body
        stored = await running.get(f"/v1/responses/{response['id']}")
    if stream:
        deltas = [event for event in answer.events if event["type"] == "response.output_text.delta"]
        assert triples([entry for event in deltas for entry in event["logprobs"]]) == OF_KIND[kind]
        [done] = [event for event in answer.events if event["type"] == "response.output_text.done"]
        assert triples(done["logprobs"]) == OF_KIND[kind]
    for found in (response, stored.body):
        assert triples(found["output"][-1]["content"][0]["logprobs"]) == OF_KIND[kind]
        assert found["top_logprobs"] == 1


@KIND
@STREAM
async def test_raw_completions_report_them_in_the_legacy_form(kind: str, stream: bool) -> None:
    body = {"model": "gpt-oss", "prompt": "Hi", "max_tokens": 99, "logprobs": 1, "stream": stream}
    tokens = ENCODING.encode_text("one two")
    generated = [*ENCODING.encode_marked("<|channel|>"), *tokens, 200002]
    async with FAKES[kind](tokens=generated) as fake, gateway(config(kind, fake.url)) as running:
        answer = await running.post("/v1/completions", json.dumps(body).encode())
        assert answer.status == 200, answer.raw
        refused = await running.post("/v1/completions", json.dumps({**body, "echo": True}).encode())
    events = answer.events if stream else [answer.body]
    parts = [choice["logprobs"] for event in events for choice in event["choices"]]
    assert [token for part in parts for token in part["tokens"]] == ["one", " two"]
    assert [value for part in parts for value in part["token_logprobs"]] == [logprob_of(token) for token in tokens]
    assert [offset for part in parts for offset in part["text_offset"]] == [0, 3]
    assert [[*top] for part in parts for top in part["top_logprobs"]] == [["one"], [" two"]]
    assert (refused.status, refused.body["error"]["param"]) == (400, "logprobs")


async def test_a_backend_without_them_is_an_error_and_another_one_is_preferred() -> None:
    text = "<|channel|>final<|message|>Hi<|return|>"
    async with FakeOllama(text=text) as ollama, FakeVllm(tokens=ENCODING.encode_marked(text)) as vllm:
        async with gateway(config_of(f"ollama@{ollama.url}")) as running:
            for answer in (await running.chat(logprobs=True), await responses(running, top_logprobs=1)):
                assert answer.status == 400
                assert "no log probabilities" in answer.body["error"]["message"]
            assert answer.body["error"]["param"] == "top_logprobs"
        async with gateway(config_of(f"ollama@{ollama.url}", f"vllm@{vllm.url}")) as running:
            assert running.app is not None
            await running.app.state.gateway.pool.settled(5)
            for _ in range(4):
                answer = await running.chat(logprobs=True)
                assert answer.body["unisono"]["backend"] == "vllm-1"


async def test_a_stop_string_cuts_them_like_the_text() -> None:
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config("vllm", fake.url)) as running:
        answer = await running.chat(logprobs=True, stop=[" world"])
    choice = answer.body["choices"][0]
    assert choice["message"]["content"] == "Hello, 🦜"
    assert triples(choice["logprobs"]["content"]) == EXPECTED[: len(ENCODING.encode_text("Hello, 🦜"))]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
    ],
    ids=str,
)
async def test_invalid_fields_are_named(fields: dict[str, Any], param: str) -> None:
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config("vllm", fake.url)) as running:
        answer = await running.chat(**fields)
        assert (answer.status, answer.body["error"]["param"]) == (400, param)
        assert (await running.chat(logprobs=False, top_logprobs=0)).status == 200
