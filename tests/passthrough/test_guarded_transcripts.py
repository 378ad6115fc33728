"""Guardrails and hooks on transcripts, in every form of the answer."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import pytest

from tests.fakes import Refusal
from tests.passthrough.test_transcriptions import USUAL, form, listening, send

EVENTS = (
    b'data: {"type": "transcript.text.delta", "delta": "The proj"}\n\n'
    b'data: {"type": "transcript.text.delta", "delta": "ect zebra."}\n\n'
)
ANSWERS: dict[str, Refusal] = {
    "JSON": Refusal(200, b'{"text": "The project zebra."}'),
    "segments": Refusal(200, b'{"text": "", "segments": [{"text": "The project zebra."}]}'),
    "text": Refusal(200, b"The project zebra.", "text/plain"),
    "subtitles": Refusal(200, b"WEBVTT\n\n00:00.000 --> 00:02.000\nThe project zebra.\n", "text/vtt"),
    "events": Refusal(200, EVENTS, "text/event-stream"),
    "another media type": Refusal(200, b"The project zebra.", "application/octet-stream"),
}
EVERY = pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)


def guardrail(action: str, *, is_default: bool = True) -> dict[str, Any]:
    params = {
        "guardrail": "litellm_content_filter",
        "mode": ["pre_call", "post_call"],
        "default_on": is_default,
        "blocked_words": [{"keyword": "project zebra", "action": action}],
    }
    return {"guardrails": [{"guardrail_name": "words", "litellm_params": params}]}


@EVERY
@pytest.mark.parametrize("action", ["BLOCK", "MASK"])
async def test_a_guardrail_refuses_a_transcript(answer: Refusal, action: str) -> None:
    async with listening(answer, settings=guardrail(action)) as (running, _):
        refused = await send(running)
    code = "content_blocked" if action == "BLOCK" else "refused_by_hook"
    assert (refused.status, refused.body["error"]["code"]) == (400, code)
    assert b"The project" not in refused.raw


async def test_other_transcripts_pass_a_guardrail_unchanged() -> None:
    answer = Refusal(200, b'{"text":  "The project horse."}')
    async with listening(answer, settings=guardrail("BLOCK")) as (running, _):
        passed = await send(running)
    assert (passed.status, passed.raw) == (200, answer.body)


async def test_a_form_names_its_guardrail() -> None:
    async with listening(ANSWERS["JSON"], settings=guardrail("BLOCK", is_default=False)) as (running, fake):
        assert (await send(running)).status == 200
        assert (await send(running, [*USUAL, ("guardrails[]", None, b"words")])).status == 400
        before = len(fake.requests)
        prompt = ("prompt", None, b"About project zebra.")
        assert (await send(running, [*USUAL, prompt, ("guardrails", None, b'["words"]')])).status == 400
    assert len(fake.requests) == before


@EVERY
async def test_a_hook_sees_the_transcript_after_the_answer(answer: Refusal) -> None:
    hook = {"blocklist": {"patterns": {"zebra": "project zebra"}, "action": "refuse", "where": ["output"]}}
    async with listening(answer, unisono={"hooks": [hook]}) as (running, _):
        refused = await send(running)
        body, headers = form(*USUAL, ("stream", None, b"true")), {"content-type": "multipart/form-data; boundary=limit"}
        url = f"{running.url}/v1/audio/transcriptions"
        async with running.session.post(url, data=BytesIO(body), headers=headers) as response:
            streamed = response.status, await response.read()
    assert refused.status == 400
    # A stream was sent before the hook sees its text.
    assert streamed == (200, answer.body)
