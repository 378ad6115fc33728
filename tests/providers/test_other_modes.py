"""Embeddings, reranking, moderations, images, speech and transcriptions of other providers, through litellm."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, gateway, to_answer
from tests.e2e.keyed import bearing, keyed
from tests.fakes import Refusal
from tests.fakes.openai_modes import FakeModes
from tests.fakes.wire import Seen, Step, WireServer
from tests.passthrough.test_passing_counted import used_by
from tests.passthrough.test_transcriptions import form, parts_of

pytestmark = pytest.mark.filterwarnings("ignore")
# litellm accepts `dimensions` for this model, and any other field for any model.
MODEL = "openai/text-embedding-3-small"
AUDIO = bytes(range(256)) * 8_192  # two megabytes with every byte


def entry(fake: WireServer, mode: str, model: str = "openai/m-1", path: str = "/v1", **params: Any) -> dict[str, Any]:
    settings = {"model": model, "api_base": f"{fake.url}{path}", "api_key": "sk-theirs", **params}
    return {"model_name": "other", "litellm_params": settings, "model_info": {"mode": mode}}


@asynccontextmanager
async def provided(mode: str, script: Any = None, **params: Any) -> AsyncIterator[tuple[Gateway, FakeModes]]:
    async with FakeModes(script) as fake, gateway({"model_list": [entry(fake, mode, **params)]}) as running:
        yield running, fake


async def ask(running: Gateway, path: str, body: dict[str, Any]) -> Answer:
    return await running.post(f"/v1/{path}", json.dumps({"model": "other", **body}).encode())


async def send(running: Gateway, path: str = "audio/transcriptions", key: str = "", **fields: str) -> Answer:
    texts = [(name, None, value.encode()) for name, value in {"model": "other", **fields}.items()]
    headers = {"content-type": "multipart/form-data; boundary=limit", **(bearing(key) if key else {})}
    body = form(*texts, ("timestamp_granularities[]", None, b"word"), ("file", "ä.wav", AUDIO))
    async with running.session.post(f"{running.url}/v1/{path}", data=body, headers=headers) as response:
        raw = await response.read()
    if response.content_type == "application/json":
        return to_answer(response.status, response.headers, raw)
    return Answer(response.status, response.headers, raw, None)


BODIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "embeddings": ("embedding", "embeddings", {"input": ["Hi", "there"], "dimensions": 3}),
    "moderations": ("moderation", "moderations", {"input": "Hi"}),
    "images": ("image_generation", "images/generations", {"prompt": "a cat", "n": 2, "size": "1024x1024"}),
}


@pytest.mark.parametrize(("mode", "path", "body"), BODIES.values(), ids=BODIES)
async def test_an_answer_of_another_provider(mode: str, path: str, body: dict[str, Any]) -> None:
    async with provided(mode, model=MODEL) as (running, fake):
        answer = await ask(running, path, body)
        assert answer.status == 200, answer.raw
        [request] = fake.requests
        expected = fake._answer(request.path, request.json)
    assert answer.status == 200, answer.raw
    assert request.path == f"/v1/{path}"
    assert request.headers["authorization"] == "Bearer sk-theirs"
    assert {**request.json, **body, "model": MODEL.partition("/")[2]} == request.json
    part = "results" if mode == "moderation" else "data"
    assert len(answer.body[part]) == len(expected[part])
    for received, sent in zip(answer.body[part], expected[part], strict=True):
        key = {"embedding": "embedding", "moderation": "flagged", "image_generation": "b64_json"}[mode]
        assert received[key] == sent[key]
    assert answer.body.get("model", "other") == "other"


def rerank_of_cohere(seen: Seen) -> list[Step]:
    body = {"id": "r", "results": [{"index": 1, "relevance_score": 0.5}], "meta": {"billed_units": {"search_units": 2}}}
    return Refusal(200, json.dumps(body).encode()).steps()


async def test_documents_are_reranked_and_search_units_billed(tmp_path: Path) -> None:
    async with WireServer(rerank_of_cohere) as fake:
        deployment = entry(fake, "rerank", "cohere/rerank-v3.5", "/v2/rerank")
        async with keyed({"model_list": [deployment]}, tmp_path) as (running, keys):
            record, key = await keys.issue()
            body = {"model": "other", "query": "q", "documents": ["a", "b"], "top_n": 1}
            answer = await running.post("/v1/rerank", json.dumps(body).encode(), **bearing(key))
            used = await used_by(running, record.tenant, record.id)
    [request] = fake.requests
    assert answer.status == 200, answer.raw
    assert [(one["index"], one["relevance_score"]) for one in answer.body["results"]] == [(1, 0.5)]
    assert request.json == {"model": "rerank-v3.5", "query": "q", "documents": ["a", "b"], "top_n": 1}
    # LiteLLM's list has the price: 0.002 USD for each search unit.
    assert used.cost == 4_000


async def test_speech_of_another_provider() -> None:
    async with provided("audio_speech") as (running, fake):
        body = {"model": "other", "input": "Say this.", "voice": "alloy", "speed": 1.5}
        async with running.session.post(f"{running.url}/v1/audio/speech", json=body) as response:
            audio = await response.read()
        refused = await ask(running, "audio/speech", {**body, "stream_format": "sse"})
    [request] = fake.requests
    assert (response.status, response.content_type) == (200, "audio/mpeg")
    assert audio == b"".join(fake.audio)
    assert request.json == {**body, "model": "m-1"}
    # litellm would drop other fields of speech.
    assert (refused.status, refused.body["error"]["param"]) == (400, "stream_format")


FORMATS = {
    "json": (b'{"text": "Said.", "usage": {"type": "duration", "seconds": 7}}', "application/json"),
    "verbose_json": (b'{"text": "Said.", "duration": 6.5, "language": "english"}', "application/json"),
    "text": (b"Said.\n", "text/plain"),
    "srt": (b"1\n00:00:00,000 --> 00:00:01,000\nSaid.\n", "text/plain"),
}


@pytest.mark.parametrize("form_of_answer", FORMATS)
async def test_a_transcript_of_another_provider(form_of_answer: str) -> None:
    sent, media_type = FORMATS[form_of_answer]
    script = Refusal(200, sent, content_type=media_type)
    async with provided("audio_transcription", script) as (running, fake):
        answer = await send(running, response_format=form_of_answer, temperature="0.5", language="de", odd="1")
        [request] = fake.requests
        parts = {name: content for name, _, content in parts_of(request)}
    assert answer.status == 200, answer.raw
    assert answer.headers["content-type"].startswith(media_type)
    assert parts["file"] == AUDIO
    assert (parts["model"], parts["language"], parts["temperature"]) == (b"m-1", b"de", b"0.5")
    assert (parts["response_format"], parts["odd"]) == (form_of_answer.encode(), b"1")
    assert parts["timestamp_granularities[]"] == b"word"
    if media_type == "application/json":
        assert json.loads(sent).items() <= answer.body.items()
    else:
        assert answer.raw == sent


async def test_seconds_of_a_transcript_are_billed(tmp_path: Path) -> None:
    script = Refusal(200, FORMATS["json"][0])
    async with FakeModes(script) as fake:
        deployment = entry(fake, "audio_transcription", "openai/whisper-1")
        async with keyed({"model_list": [deployment]}, tmp_path) as (running, keys):
            record, key = await keys.issue()
            answer = await send(running, key=key)
            used = await used_by(running, record.tenant, record.id)
    assert answer.status == 200, answer.raw
    # LiteLLM's list has two prices of a second, which are alternatives: 0.0001 USD.
    assert used.cost == 700


STREAMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "images": ("image_generation", "images/generations", {"prompt": "a cat", "stream": True, "partial_images": 1}),
    "transcription": ("audio_transcription", "audio/transcriptions", {"stream": "true"}),
}


@pytest.mark.parametrize(("mode", "path", "body"), STREAMS.values(), ids=STREAMS)
async def test_a_stream_is_refused(mode: str, path: str, body: dict[str, Any]) -> None:
    async with provided(mode) as (running, fake):
        answer = await (send(running, **body) if mode == "audio_transcription" else ask(running, path, body))
    assert (answer.status, answer.body["error"]["param"]) == (400, "stream")
    assert not fake.requests


async def test_a_translation_and_a_score_are_refused() -> None:
    async with provided("audio_transcription") as (running, fake):
        translation = await send(running, "audio/translations")
    async with provided("score") as (running, _):
        score = await ask(running, "score", {"text_1": "a", "text_2": "b"})
    for answer in (translation, score):
        assert (answer.status, answer.body["error"]["param"]) == (400, "model")
    assert not fake.requests


@pytest.mark.parametrize(("status", "expected"), [(400, 400), (429, 503), (500, 502)])
async def test_failures_have_the_error_codes_of_backends(status: int, expected: int) -> None:
    script = Refusal(status, b'{"error": {"message": "no sk-theirs"}}')
    async with provided("embedding", script) as (running, _):
        answer = await ask(running, "embeddings", {"input": "Hi"})
    assert answer.status == expected, answer.raw
    assert b"sk-theirs" not in answer.raw
