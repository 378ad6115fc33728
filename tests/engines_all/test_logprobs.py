"""Log probabilities of a greedy answer are the engine's own, through the adapter and through the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import pytest_asyncio

from tests.e2e.gateway import Gateway, gateway
from tests.engines.demo_prompts import CHATS, ENCODING, greedy, prompt_for
from tests.engines_all.engines import Running
from unisono.core.generation import STOP_TOKENS, CompletionJob
from unisono.core.ports import Backend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]

# Largest difference between two sums over an answer.
TOLERANCE = 1e-4
PROMPTS = ("greeting", "joke", "count")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def raw_site(engine: Running) -> AsyncIterator[Gateway]:
    async with gateway({"model_list": [engine.deployment()], "unisono": {"raw_completions": True}}) as started:
        yield started


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def own_values(engine: Running, prompt: list[int], tokens: list[int]) -> list[float]:
    """Return the log probabilities of the generated `tokens` from the engine itself."""
    limit = len(tokens)
    match engine.engine.kind:
        case "vllm":
            body = {
                "model": engine.engine.model,
                "prompt": prompt,
                "max_tokens": limit,
                "temperature": 0,
                "logprobs": 0,
            }
            choice = post(f"{engine.url}/v1/completions", {**body, "stop_token_ids": STOP_TOKENS})["choices"][0]
            return list(choice["logprobs"]["token_logprobs"])
        case "llamacpp":
            body = {"prompt": prompt, "n_predict": limit, "temperature": 0, "n_probs": 1, "cache_prompt": True}
            listed = post(f"{engine.url}/completion", body)["completion_probabilities"]
            return [entry["logprob"] for entry in listed]
        case "mlx":
            return scored(engine, prompt, tokens)
    raise AssertionError(engine.engine.kind)


def scored(engine: Running, prompt: list[int], tokens: list[int]) -> list[float]:
    """Return the log probabilities from one pass of the model over prompt and answer."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(engine.engine.model))
    logits = model(mx.array([[*prompt, *tokens]]))[0].astype(mx.float32)
    values = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [values[len(prompt) + at - 1, token].item() for at, token in enumerate(tokens)]


async def generated(backend: Backend, job: CompletionJob) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    values: list[float] = []
    async for chunk in backend.complete(job):
        tokens += chunk.tokens
        assert len(chunk.logprobs) == len(chunk.tokens)
        for token, entry in zip(chunk.tokens, chunk.logprobs, strict=True):
            if entry is None:
                # llama-server does not report a token that ends inside of a character.
                continue
            assert entry.token == token
            values.append(entry.logprob)
            assert entry.top[0] == (token, pytest.approx(entry.logprob, abs=TOLERANCE))
    return tokens, values


@pytest.mark.parametrize("name", PROMPTS)
async def test_the_sum_over_a_greedy_answer_is_the_engines_own(engine: Running, backend: Backend, name: str) -> None:
    if engine.engine.kind == "mlx_server":
        assert not (await backend.probe()).capabilities.logprobs
        return
    job = replace(greedy(prompt_for(CHATS[name][0])), logprobs=2)
    # Prompts from a cache have slightly other values, so that the answers are compared with the same cache.
    await generated(backend, job)
    tokens, values = await generated(backend, job)
    assert ENCODING.decode(tokens)
    own = await asyncio.to_thread(own_values, engine, list(job.prompt.tokens), tokens)
    # The engines report the stop token differently; the texts before it count.
    size = len(tokens) - 1
    assert len(values) >= size
    assert sum(values[:size]) == pytest.approx(sum(own[:size]), abs=TOLERANCE)


def own_prompt_values(engine: Running, prompt: list[int]) -> list[float]:
    """Return the log probabilities of the prompt's tokens, from the second one on, from the engine itself."""
    if engine.engine.kind == "mlx":
        return scored(engine, prompt[:1], prompt[1:])
    body = {"model": engine.engine.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    listed = post(f"{engine.url}/v1/completions", body)["choices"][0]["prompt_logprobs"]
    return [entry[str(token)]["logprob"] for entry, token in zip(listed[1:], prompt[1:], strict=True)]


@pytest.mark.parametrize("max_tokens", [0, 1, 8])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_echoed_prompt_has_the_engines_own(
    engine: Running, raw_site: Gateway, max_tokens: int, stream: bool
) -> None:
    prompts = [list(prompt_for(CHATS[name][0])) for name in PROMPTS]
    # One prompt is longer than a part that mlx scores at once.
    prompts[0] = [*prompts[1], *prompts[0], *prompts[2]]
    body = {"model": "gpt-oss", "prompt": prompts, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    answer = await raw_site.post("/v1/completions", json.dumps({**body, "echo": True, "logprobs": 1}).encode())
    if engine.engine.kind not in ("vllm", "mlx"):
        assert (answer.status, answer.body["error"]["param"]) == (400, "logprobs")
        return
    assert answer.status == 200, answer.raw
    choices = [choice for event in (answer.events if stream else [answer.body]) for choice in event["choices"]]
    for index, prompt in enumerate(prompts):
        parts = [choice["logprobs"] for choice in choices if choice["index"] == index]
        values = [value for part in parts for value in part["token_logprobs"]]
        tops = [top for part in parts for top in part["top_logprobs"]]
        own = await asyncio.to_thread(own_prompt_values, engine, prompt)
        assert values[0] is None
        assert tops[0] is None
        assert values[1 : len(prompt)] == pytest.approx(own, abs=TOLERANCE)
        assert all(value in top.values() for value, top in zip(values[1:], tops[1:], strict=True))
        # The answer ends after its limit or at a stop token.
        assert min(max_tokens, 1) <= len(values) - len(prompt) <= max_tokens
        text = "".join(choice["text"] for choice in choices if choice["index"] == index)
        assert text.startswith(ENCODING.decode(prompt))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_the_gateway_reports_them_for_visible_tokens(engine: Running, site: Gateway, stream: bool) -> None:
    answer = await site.chat(
        messages=[{"role": "user", "content": "Tell me a joke."}],
        temperature=0,
        logprobs=True,
        top_logprobs=1,
        stream=stream,
    )
    if engine.engine.kind == "mlx_server":
        assert (answer.status, answer.body["error"]["param"]) == (400, "logprobs")
        return
    choices = [choice for event in answer.events for choice in event["choices"]] if stream else answer.body["choices"]
    content = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content") or ()]
    text = "Why did the parser cross the road? To reach the final channel."
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text
    assert all(entry["logprob"] <= 0 and entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)
