"""Responses API conversations for every real engine.

The engines run the demo model, so its answers are known. A prompt that continues an answer must be in the engine's
cache.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.e2e.gateway import Gateway
from unisono.harmony.encoding import load_encoding

WEATHER: Mapping[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Gets the current weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"location": {"type": "string", "description": "City name"}},
        "required": ["location"],
    },
}
# Long enough for a prompt to fill a block even if an engine caches 128 tokens at a time.
INSTRUCTIONS = "Read." + " Please read all of this with care before you answer." * 10
RESULT = "18 degrees, sunny"
# Tokens that a prompt grows by when the call is answered.
RENDERED_RESULT = len(
    load_encoding().encode_marked(
        f"<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{RESULT}<|end|><|start|>assistant"
    )
)
# Tokens at the end of a prompt that an engine may process again.
SLACK = 8
ENDLESS = "Repeat la forever."
OVER = ("completed", "incomplete", "failed", "cancelled")


@dataclass
class Talk:
    """A conversation whose turns use `previous_response_id`; `stream` selects streaming."""

    gateway: Gateway
    stream: bool = False
    last: str | None = None

    async def say(self, given: Any) -> Any:
        """Send the next turn and return its stored response."""
        previous = {} if self.last is None else {"previous_response_id": self.last}
        body = await ask(
            self.gateway, input=given, stream=self.stream, tools=[WEATHER], instructions=INSTRUCTIONS, **previous
        )
        self.last = body["id"]
        stored = (await self.gateway.get(f"/v1/responses/{self.last}")).body
        assert stored == body
        return stored


async def ask(gateway: Gateway, **fields: Any) -> Any:
    """Return the response object, from the body or from the last event."""
    body = {"model": "gpt-oss", "temperature": 0, **fields}
    async with asyncio.timeout(120):
        answer = await gateway.post("/v1/responses", json.dumps(body).encode())
    assert answer.status == 200, answer.raw
    if not fields.get("stream"):
        return answer.body
    assert answer.done
    assert [event["sequence_number"] for event in answer.events] == list(range(len(answer.events)))
    return answer.events[-1]["response"]


def text_of(response: Any, kind: str = "message") -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == kind for part in item["content"])


def cached_in(response: Any) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


def blocks_of(tokens: int, block: int) -> int:
    """Return how many of the tokens an engine certainly has cached, if it caches whole blocks."""
    return tokens - SLACK if block == 1 else (tokens - 1) // block * block


async def three_turns(
    gateway: Gateway, *, stream: bool, block: int = 1, caches_generated: bool = True, shows_stop: bool = True
) -> None:
    """Run a turn with a call, one with its output, and another question.

    Each turn continues the exact tokens of the previous one, as far as Harmony keeps them: the reasoning of a finished
    answer is dropped. `block` is the cache block size of the engine. `caches_generated` says whether it also caches
    generated tokens. A stop token that it hides counts in the usage, but need not be cached.
    """
    talk = Talk(gateway, stream)
    first = await talk.say("What is the weather in Paris?")
    thought, call = first["output"]
    assert thought["type"] == "reasoning"
    assert text_of(first, "reasoning") == "We need the weather in Paris. Use get_weather."
    assert (call["name"], call["arguments"]) == ("get_weather", '{"location":"Paris"}')
    prompt, generated_to = first["usage"]["input_tokens"], first["usage"]["total_tokens"]

    result = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
    second = await talk.say([result])
    assert text_of(second, "reasoning") == "We have the weather."
    assert text_of(second) == "It is sunny in Paris with 18 degrees."
    assert second["usage"]["input_tokens"] == generated_to + RENDERED_RESULT
    cached_to = generated_to - (not shows_stop) if caches_generated else prompt
    assert cached_in(second) >= blocks_of(cached_to, block) > 0

    third = await talk.say("ping")
    assert third["status"] == "completed"
    assert text_of(third)
    # The reasoning and everything after it are no longer in the prompt; the engine has the part before them.
    assert third["usage"]["input_tokens"] > prompt
    assert cached_in(third) >= blocks_of(prompt, block)
    input_items = (await gateway.get(f"/v1/responses/{third['id']}/input_items")).body
    assert [item["content"][0]["text"] for item in input_items["data"]] == ["ping"]


async def a_listener_that_leaves_and_comes_back(gateway: Gateway) -> None:
    """Check that a background response can be streamed again from any event."""
    whole = await ask(gateway, input=ENDLESS, max_output_tokens=100)
    body = {"model": "gpt-oss", "temperature": 0, "input": ENDLESS, "max_output_tokens": 100}
    body |= {"background": True, "stream": True}
    received = b""
    async with gateway.session.post(f"{gateway.url}/v1/responses", json=body) as response:
        while received.count(b"\n\n") < 6:
            received += await response.content.readany()
        response.close()
    # A slow engine causes keep-alive comments between events.
    blocks = [block for block in received.split(b"\n\n")[:-1] if not block.startswith(b":")]
    events = [json.loads(block.partition(b"\ndata: ")[2]) for block in blocks]
    response_id, number = events[0]["response"]["id"], events[-1]["sequence_number"]
    assert events[-1]["type"] not in [f"response.{status}" for status in OVER]
    async with asyncio.timeout(60):
        rest = await gateway.get(f"/v1/responses/{response_id}?stream=true&starting_after={number}")
    assert rest.done
    all_events = [*events, *rest.events]
    assert [event["sequence_number"] for event in all_events] == list(range(len(all_events)))
    assert all_events[-1]["type"] == "response.incomplete"
    ended = all_events[-1]["response"]
    assert text_of(ended) == text_of(whole)
    assert ended["usage"]["output_tokens"] == 100
    assert "".join(event["delta"] for event in all_events if event["type"] == "response.output_text.delta") == text_of(
        ended
    )


async def begun_in_the_background(gateway: Gateway, tokens: int) -> str:
    """Start a background response and return its id after its first text."""
    created = await ask(gateway, input=ENDLESS, max_output_tokens=tokens, background=True)
    received = b""
    url = f"{gateway.url}/v1/responses/{created['id']}?stream=true"
    async with asyncio.timeout(60), gateway.session.get(url) as response:
        while b"response.output_text.delta" not in received:
            received += await response.content.readany()
        response.close()
    stored = await gateway.get(f"/v1/responses/{created['id']}")
    assert stored.body["status"] == "in_progress"
    return str(created["id"])


async def taken_over(gateway: Gateway, response_id: str, tokens: int, *, keeps_spaces: bool = True) -> None:
    """Check that a response of a stopped gateway is finished by this one.

    An engine that drops leading spaces loses the one where the two halves meet.
    """
    async with asyncio.timeout(90):
        rest = await gateway.get(f"/v1/responses/{response_id}?stream=true")
    assert rest.done
    assert [event["sequence_number"] for event in rest.events] == list(range(len(rest.events)))
    assert rest.events[-1]["type"] == "response.incomplete"
    ended = rest.events[-1]["response"]
    text = "".join(event["delta"] for event in rest.events if event["type"] == "response.output_text.delta")
    assert text == text_of(ended)
    whole = await ask(gateway, input=ENDLESS, max_output_tokens=tokens)
    assert text_of(ended, "reasoning") == text_of(whole, "reasoning")
    if keeps_spaces:
        assert text == text_of(whole)
        assert ended["usage"]["output_tokens"] == tokens
    else:
        assert 0 <= len(text_of(whole)) - len(text) <= 1
        assert text.replace(" ", "") == text_of(whole).replace(" ", "")
