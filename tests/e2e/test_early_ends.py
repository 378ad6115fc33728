"""Answers that no backend can continue end with the text so far, never with an error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.e2e.gateway import Answer, Gateway, config_of, gateway
from tests.e2e.playing import Play, staged
from tests.e2e.surfaces import SURFACES
from tests.fakes import FakeVllm, VllmScript, reset_at
from unisono.engine.failover_policy import ENDS_EARLY, MAX_REGENERATIONS
from unisono.harmony.encoding import load_encoding

# A text backend would parse this marker name as the token itself.
TEXT = "The token <|endofprompt|> ends a prompt, and this goes on for a while."
SCRIPT = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{TEXT}<|return|>"
PIECES_BEFORE_RESET = 40
BEGINNING = "The token <|endofprompt|> ends"
TEXT_KINDS = ("ollama", "mlx_server")
# Finish reason of each API for an answer that ends before the model ended it.
EARLY = {"chat": "length", "responses": "incomplete", "messages": "max_tokens"}


def config(*deployments: str) -> dict[str, Any]:
    return config_of(*deployments, router_settings={"allowed_fails": 100_000, "cooldown_time": 0.01})


async def ask(running: Gateway, surface: str, *, stream: bool) -> Answer:
    api = SURFACES[surface]
    return await running.post(api.path, json.dumps({"model": "gpt-oss", "stream": stream, **api.fields}).encode())


def fail(play: Play, times: int) -> None:
    play.asked.clear()
    play.failures = [reset_at(PIECES_BEFORE_RESET) for _ in range(times)]


def check_early_end(surface: str, answer: Answer) -> None:
    api = SURFACES[surface]
    assert answer.status == 200, answer.raw
    text = api.text(answer)
    assert text.startswith(BEGINNING)
    assert TEXT.startswith(text)
    assert api.finish(answer) == EARLY[surface]
    assert notes_of(answer) == [ENDS_EARLY]


def notes_of(answer: Answer) -> list[str]:
    for each in (*reversed(answer.events), answer.body):
        info = each and (each.get("unisono") or each.get("response", {}).get("unisono"))
        if info:
            return list(info.get("notes", ()))
    raise AssertionError(f"no `unisono` object in the answer: {answer.raw!r}")


@pytest.mark.parametrize("surface", EARLY)
@pytest.mark.parametrize("kind", TEXT_KINDS)
async def test_interrupted_stream_ends_with_the_text_so_far(kind: str, surface: str) -> None:
    async with staged(SCRIPT, [kind], config) as (play, running):
        fail(play, 1)
        answer = await ask(running, surface, stream=True)
        check_early_end(surface, answer)
        assert not [event for event in answer.events if event.get("error") or event.get("type") == "error"]
        assert answer.done or surface == "messages"
        assert play.asked == [kind]


@pytest.mark.slow
async def test_interrupted_answer_without_streaming_is_regenerated() -> None:
    # All concurrently: most of the time is spent in pauses.
    await asyncio.gather(*(check_whole(kind, surface) for kind in TEXT_KINDS for surface in EARLY))


async def check_whole(kind: str, surface: str) -> None:
    async with staged(SCRIPT, [kind], config) as (play, running):
        read = SURFACES[surface]
        fail(play, 1)
        answer = await ask(running, surface, stream=False)
        assert (answer.status, read.text(answer), read.finish(answer)) == (200, TEXT, read.finishes)
        assert (notes_of(answer), len(play.asked)) == ([], 2)
        # If every regeneration fails, the answer ends like the stream.
        fail(play, 9)
        check_early_end(surface, await ask(running, surface, stream=False))
        assert len(play.asked) == 1 + MAX_REGENERATIONS


async def test_response_that_ends_early_is_stored_as_incomplete() -> None:
    async with staged(SCRIPT, ["ollama"], config) as (play, running):
        for fields in ({"stream": True}, {"background": True}):
            fail(play, 9)
            body = {"model": "gpt-oss", "input": "Hi", **fields}
            answer = await running.post("/v1/responses", json.dumps(body).encode())
            assert answer.status == 200, answer.raw
            response = answer.events[-1]["response"] if answer.events else answer.body
            async with asyncio.timeout(10):
                while (stored := await running.get(f"/v1/responses/{response['id']}")).body["status"] == "in_progress":
                    await asyncio.sleep(0.02)
            check_early_end("responses", stored)
            assert stored.body["incomplete_details"] == {"reason": "max_output_tokens"}
            assert not answer.events or stored.body == response


@pytest.mark.parametrize(
    ("words", "finish", "max_tokens", "reason"),
    [
        (400, "length", 4_000, "model_context_window_exceeded"),
        (4, "length", 4_000, "max_tokens"),
        (4, "length", 10, "max_tokens"),
        (4, "repetition", 10, "max_tokens"),
    ],
)
async def test_messages_reports_a_full_window_only_if_it_was_full(
    words: int, finish: str, max_tokens: int, reason: str
) -> None:
    text = " ".join(str(number) for number in range(words))
    tokens = load_encoding().encode_marked(f"<|channel|>final<|message|>{text}")
    script = VllmScript(tokens=tokens, finish=finish)
    async with (
        FakeVllm(script=lambda _: script, context=400) as fake,
        gateway(config_of(f"vllm@{fake.url}")) as running,
    ):
        answer = await running.messages(max_tokens=max_tokens)
    assert answer.body["stop_reason"] == reason
