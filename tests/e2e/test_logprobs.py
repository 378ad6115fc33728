"""Log probabilities of visible tokens on Chat Completions, Responses and raw completions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, config_of, gateway, message_of
from tests.fakes import FakeLlamaCpp, FakeOllama, FakeVllm, dialects
from tests.fakes.dialects import VllmScript, logprob_of, logprobs_of
from tests.fakes.faults import close_at
from tests.fakes.sglang import FakeSglang
from tests.fakes.wire import Step, Write
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


HEADER_TEXT = ENCODING.encode_marked(
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final Oslo is in Norway.<|return|>"
)


@STREAM
async def test_text_of_a_message_without_a_body_has_log_probabilities(stream: bool) -> None:
    async with FakeVllm(tokens=HEADER_TEXT) as fake, gateway(config("vllm", fake.url)) as running:
        answer = await running.chat(logprobs=True, stream=stream)
    choices = [choice for event in answer.events for choice in event["choices"]] if stream else answer.body["choices"]
    content = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content") or ()]
    assert "".join(entry["token"] for entry in content) == " Oslo is in Norway."


PREAMBLE = "<|channel|>commentary<|message|>pre amble"
OUTPUTS: dict[str, tuple[list[str], str, str]] = {
    # name: (outputs, form, text)
    "an invalid answer after a preamble": (
        [f"{PREAMBLE}<|end|><|start|>assistant<|channel|>final<|message|>bad answer<|return|>", "bad answer<|return|>"],
        "yes",
        "bad answer",
    ),
    "only preambles": ([f"{PREAMBLE}<|return|>"], "yes", "pre amble"),
    "a preamble with the form": ([f"{PREAMBLE}<|return|>"], "pre amble", "pre amble"),
}


@STREAM
@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": {"name": "f"}}]], ids=["no tools", "tools"])
@pytest.mark.parametrize(("outputs", "form", "text"), OUTPUTS.values(), ids=OUTPUTS)
async def test_the_text_after_preambles_has_log_probabilities(
    outputs: list[str], form: str, text: str, tools: Any, stream: bool
) -> None:
    async with FakeVllm(tokens=[]) as fake, gateway(config("vllm", fake.url)) as running:
        scripts = [VllmScript(tokens=ENCODING.encode_marked(output)) for output in outputs]
        each = iter(scripts)
        fake.script = lambda _: next(each, scripts[-1])
        fields = {"tools": tools} if tools else {}
        answer = await running.chat(logprobs=True, stream=stream, guided_choice=[form], **fields)
    choices = [choice for event in answer.events for choice in event["choices"]] if stream else answer.body["choices"]
    # A constrained answer is streamed as it arrives, so an invalid one is `content`.
    [name] = {key for key in ("content", "refusal") for choice in choices if (choice["logprobs"] or {}).get(key)}
    entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get(name) or ()]
    texts = [choice["delta" if stream else "message"] for choice in choices]
    assert "".join(each.get(name) or "" for each in texts) == text
    assert "".join(entry["token"] for entry in entries) == text


SAME_BEGINNING: dict[str, list[tuple[str, str]]] = {
    # case: (channel, text) of each message
    "a longer text": [("final", "a b c"), ("final", "a b cd")],
    "the same text": [("final", "a b c"), ("final", "a b c")],
    "reasoning between": [("commentary", "yes it is"), ("analysis", "yes it is so"), ("final", "yes")],
}


@pytest.mark.parametrize("per_chunk", [1, 50], ids=["single tokens", "one chunk"])
@STREAM
@pytest.mark.parametrize("messages", SAME_BEGINNING.values(), ids=SAME_BEGINNING)
async def test_messages_with_the_same_beginning_have_their_own_values(
    messages: list[tuple[str, str]], per_chunk: int, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The log probability of each token depends on its position in the output.
    def numbered(tokens: list[int], *args: Any) -> dict[str, Any] | None:
        found = logprobs_of(tokens, *args)
        return found and found | {"token_logprobs": [next(values) for _ in tokens]}

    def script(_: object) -> VllmScript:
        nonlocal values
        values = count(0.0, -1.0)
        return VllmScript(tokens=[*output, *ENCODING.encode_marked("<|return|>")], per_chunk=per_chunk)

    values = count(0.0, -1.0)
    monkeypatch.setattr(dialects, "logprobs_of", numbered)
    output: list[int] = []
    expected: list[float] = []
    for channel, text in messages:
        output += ENCODING.encode_marked(f"{'<|end|><|start|>assistant' * bool(output)}<|channel|>{channel}<|message|>")
        body = ENCODING.encode_text(text)
        expected += [-float(len(output) + place) for place in range(len(body)) if channel != "analysis"]
        output += body
    async with FakeVllm(script=script) as fake, gateway(config("vllm", fake.url)) as running:
        answer = await running.chat(logprobs=True, stream=stream)
    choices = [choice for event in answer.events for choice in event["choices"]] if stream else answer.body["choices"]
    content = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content") or ()]
    assert [entry["logprob"] for entry in content] == expected


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


@pytest.mark.sampled(one_in=3)
@STREAM
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("conversed", [False, True], ids=["alone", "conversation"])
async def test_an_answer_with_very_many_log_probabilities_is_stored_without_them(
    stream: bool, background: bool, conversed: bool
) -> None:
    text = " ".join(str(number) for number in range(1_000, 7_000))
    body = ENCODING.encode_text(text)
    long_answer = [*ENCODING.encode_marked("<|channel|>final<|message|>"), *body, ANSWER[-1]]
    async with FakeVllm(tokens=long_answer, per_chunk=400) as fake, gateway(config("vllm", fake.url)) as running:
        fields: dict[str, Any] = {"top_logprobs": 1, "stream": stream, "background": background}
        if conversed:
            conversation = (await running.post("/v1/conversations", b"{}")).body["id"]
            fields["conversation"] = conversation
        answer = await responses(running, **fields)
        assert answer.status == 200, answer.raw
        last = answer.events[-1]["response"] if stream else answer.body
        stored = last
        while stored["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.05)
            stored = (await running.get(f"/v1/responses/{last['id']}")).body
        stored = (await running.get(f"/v1/responses/{last['id']}")).body
        if conversed:
            items = await running.get(f"/v1/conversations/{conversation}/items?order=desc&limit=1")
            assert items.body["data"][0]["content"][0]["logprobs"] == []
    part = stored["output"][-1]["content"][0]
    assert (stored["status"], part["text"], part["logprobs"]) == ("completed", text, [])
    assert any("not stored" in note for note in stored["unisono"]["notes"])
    if stream or not background:
        assert len(last["output"][-1]["content"][0]["logprobs"]) == len(body)


@KIND
@STREAM
async def test_raw_completions_report_every_token_in_the_legacy_form(kind: str, stream: bool) -> None:
    body = {"model": "gpt-oss", "prompt": "Hi", "max_tokens": 99, "logprobs": 1, "stream": stream}
    tokens = [*ENCODING.encode_marked("<|channel|>one two"), 200002]
    async with FAKES[kind](tokens=tokens) as fake, gateway(config(kind, fake.url)) as running:
        answer = await running.post("/v1/completions", json.dumps(body).encode())
        assert answer.status == 200, answer.raw
    found = joined(answer, stream)
    assert found["tokens"] == ["<|channel|>", "one", " two", "<|return|>"]
    assert found["token_logprobs"] == [logprob_of(token) for token in tokens]
    # Special tokens are not part of the text.
    assert found["text_offset"] == [0, 0, 3, 7]
    assert [[*top] for top in found["top_logprobs"]] == [[token] for token in found["tokens"]]


def joined(answer: Answer, stream: bool, index: int = 0) -> dict[str, list[Any]]:
    """Return the log probabilities of all parts of a choice."""
    choices = [choice for event in (answer.events if stream else [answer.body]) for choice in event["choices"]]
    parts = [choice["logprobs"] for choice in choices if choice["index"] == index]
    return {name: [one for part in parts for one in part[name]] for name in parts[0]}


# Forms of a prompt, and the number of its choices.
PROMPTS: dict[str, tuple[Any, int]] = {
    "text": (TEXT, 1),
    "ids": (BODY, 1),
    "a batch of texts": ([TEXT, TEXT], 2),
    "a batch of ids": ([BODY, BODY], 2),
}


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("max_tokens", [0, 1, 99])
@STREAM
async def test_an_echoed_prompt_has_log_probabilities(kind: str, prompt: str, max_tokens: int, stream: bool) -> None:
    sent, choices = PROMPTS[prompt]
    body = {"model": "gpt-oss", "prompt": sent, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
    generated = [*ENCODING.encode_text(" one two"), 200002]
    async with FAKES[kind](tokens=generated) as fake, gateway(config(kind, fake.url)) as running:
        answer = await running.post("/v1/completions", json.dumps({**body, "stream": stream}).encode())
    assert answer.status == 200, answer.raw
    expected = [*BODY, *generated[:max_tokens]]
    text = TEXT + "".join([" one", " two"][:max_tokens])
    ended = [choice for event in (answer.events if stream else [answer.body]) for choice in event["choices"]]
    for index in range(choices):
        found = joined(answer, stream, index)
        assert found["tokens"] == [ENCODING.decode_bytes([one]).decode("utf-8", "replace") for one in expected]
        assert found["token_logprobs"] == [None, *map(logprob_of, expected[1:])]
        assert found["top_logprobs"][0] is None
        assert all(
            token in top and max(top.values()) == value
            for token, top, value in zip(
                found["tokens"][1:], found["top_logprobs"][1:], found["token_logprobs"][1:], strict=True
            )
        )
        offsets = {token: at for token, at in zip(found["tokens"], found["text_offset"], strict=True) if token in text}
        assert "<|return|>" not in offsets
        assert text == "".join(choice["text"] for choice in ended if choice["index"] == index)
        assert all(text[at:].startswith(token) for token, at in offsets.items())
        reasons = [choice["finish_reason"] for choice in ended if choice["index"] == index and choice["finish_reason"]]
        assert reasons == ["stop" if max_tokens == 99 else "length"]
    if not stream:
        assert answer.body["usage"]["completion_tokens"] == choices * len(generated[:max_tokens])


async def test_without_tokens_to_generate_an_echo_needs_no_backend() -> None:
    body = {"model": "gpt-oss", "prompt": TEXT, "max_tokens": 0, "echo": True}
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config("vllm", fake.url)) as running:
        answer = await running.post("/v1/completions", json.dumps(body).encode())
        refused = await running.post("/v1/completions", json.dumps({**body, "echo": False}).encode())
    [choice] = answer.body["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == (TEXT, None, "length")
    assert [seen for seen in fake.requests if seen.path == "/v1/completions"] == []
    assert (refused.status, refused.body["error"]["param"]) == (400, "max_tokens")


async def test_an_answer_of_two_backends_has_them_once() -> None:
    body = {"model": "gpt-oss", "prompt": TEXT, "max_tokens": 9, "logprobs": 0, "echo": True}
    generated = ENCODING.encode_text(" one two three")

    def rest(asked: dict[str, Any]) -> VllmScript:
        return VllmScript(tokens=[*generated, 200002][len(asked["prompt"]) - len(BODY) :])

    broken = FakeVllm(tokens=generated, faults=[close_at(2)])
    async with broken, FakeVllm(script=rest) as other:
        deployments = config_of(f"vllm@{broken.url}", f"vllm@{other.url}", unisono={"raw_completions": True})
        async with gateway(deployments) as running:
            for _ in range(4):
                answer = await running.post("/v1/completions", json.dumps(body).encode())
                found = joined(answer, stream=False)
                assert found["token_logprobs"] == [None, *map(logprob_of, [*BODY, *generated, 200002][1:])]
    assert any(seen.path == "/v1/completions" for seen in broken.requests)
    # A backend that continues an answer is not asked for the prompt again.
    assert {bool(seen.json.get("echo")) for seen in other.requests if len(seen.json["prompt"]) > len(BODY)} == {False}


async def test_without_those_of_the_prompt_another_backend_is_preferred() -> None:
    body = json.dumps({"model": "gpt-oss", "prompt": "Hi you", "max_tokens": 9, "logprobs": 1, "echo": True}).encode()
    tokens = [*ENCODING.encode_text(" one"), 200002]
    async with FakeLlamaCpp(tokens=tokens) as llama, FakeVllm(tokens=tokens) as vllm:
        async with gateway(config("llamacpp", llama.url)) as running:
            answer = await running.post("/v1/completions", body)
            assert (answer.status, answer.body["error"]["param"]) == (400, "logprobs")
            assert "of the prompt" in answer.body["error"]["message"]
        both = config_of(f"llamacpp@{llama.url}", f"vllm@{vllm.url}", unisono={"raw_completions": True})
        async with gateway(both) as running:
            assert running.app is not None
            await running.app.state.gateway.pool.wait_for_probes(5)
            for _ in range(4):
                answer = await running.post("/v1/completions", body)
                assert answer.body["unisono"]["backend"] == "vllm-1"


@pytest.mark.slow
async def test_too_many_for_one_event_are_an_error() -> None:
    body = {"model": "gpt-oss", "prompt": [13225] * 9_100, "max_tokens": 0, "logprobs": 20, "echo": True}
    async with FakeVllm(tokens=ANSWER) as fake, gateway(config("vllm", fake.url)) as running:
        answer = await running.post("/v1/completions", json.dumps(body).encode())
        assert (answer.status, answer.body["error"]["param"]) == (400, "logprobs")
        assert "9090 tokens" in answer.body["error"]["message"]
        answer = await running.post("/v1/completions", json.dumps({**body, "prompt": [13225] * 9_000}).encode())
        assert len(answer.body["choices"][0]["logprobs"]["tokens"]) == 9_000


async def test_a_backend_without_them_is_an_error_and_another_one_is_preferred() -> None:
    text = "<|channel|>final<|message|>Hi<|return|>"
    async with FakeOllama(text=text) as ollama, FakeVllm(tokens=ENCODING.encode_marked(text)) as vllm:
        async with gateway(config_of(f"ollama@{ollama.url}")) as running:
            include = ["message.output_text.logprobs"]
            for field, answer in (
                ("logprobs", await running.chat(logprobs=True)),
                ("top_logprobs", await responses(running, top_logprobs=1)),
                ("include", await responses(running, include=include)),
            ):
                assert answer.status == 400
                assert "no log probabilities" in answer.body["error"]["message"]
                assert answer.body["error"]["param"] == field
        async with gateway(config_of(f"ollama@{ollama.url}", f"vllm@{vllm.url}")) as running:
            assert running.app is not None
            await running.app.state.gateway.pool.wait_for_probes(5)
            for _ in range(4):
                answer = await running.chat(logprobs=True)
                assert answer.body["unisono"]["backend"] == "vllm-1"


@STREAM
@pytest.mark.parametrize("is_fallback", [False, True], ids=["same model", "fallback model"])
async def test_a_backend_without_them_does_not_continue_an_answer_with_them(stream: bool, is_fallback: bool) -> None:
    async with FakeOllama(text=TEXT) as ollama, FakeVllm(tokens=ANSWER) as vllm:
        settings = config_of(f"vllm@{vllm.url}", f"ollama@{ollama.url}")
        if is_fallback:
            settings["model_list"][1]["model_name"] = "other-gpt-oss"
            settings["router_settings"] = {"fallbacks": [{"gpt-oss": ["other-gpt-oss"]}]}
        async with gateway(settings) as running:
            assert running.app is not None
            await running.app.state.gateway.pool.wait_for_probes(5)
            scripts = iter([VllmScript(tokens=ANSWER, faults=[close_at(10)]), VllmScript(tokens=ANSWER[10:])])
            vllm.script = lambda _: next(scripts)
            answer = await running.chat(logprobs=True, stream=stream)
    assert answer.status == 200, answer.raw
    choices = [choice for event in answer.events for choice in event["choices"]] if stream else answer.body["choices"]
    content = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content") or ()]
    assert triples(content) == EXPECTED


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


@STREAM
async def test_missing_log_probabilities_are_noted(stream: bool) -> None:
    def without_logprobs(steps: list[Step]) -> list[Step]:
        return [
            replace(step, data=step.data.replace(b'"logprobs"', b'"z"')) if isinstance(step, Write) else step
            for step in steps
        ]

    script = VllmScript(tokens=ANSWER, faults=(without_logprobs,))
    async with FakeVllm(script=lambda request: script) as fake, gateway(config("vllm", fake.url)) as running:
        answer = await running.chat(stream=stream, logprobs=True)
    assert answer.status == 200
    assert message_of(answer).note["notes"] == ["logprobs: no effect, because the backend sent no log probabilities"]
