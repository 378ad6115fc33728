"""Conversations over the Responses API that every real engine must be able to have: the model is the demo's, so what it
says is known, and a prompt that goes on from an answer must be one the engine has cached."""

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
INSTRUCTIONS = "Read." + " Please read all of this with care before you answer." * 10
"""So long that a prompt fills a block also where an engine caches 128 tokens at a time."""
RESULT = "18 degrees, sunny"
RENDERED_RESULT = len(
    load_encoding().encode_marked(
        f"<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{RESULT}<|end|><|start|>assistant"
    )
)
"""Tokens a prompt grows by when the call is answered."""
SLACK = 8
"""Tokens at the end of a prompt that an engine may read again."""
ENDLESS = "Repeat la forever."
OVER = ("completed", "incomplete", "failed", "cancelled")


@dataclass
class Talk:
    """Turns that each name the one before. `stream` says how they are asked for."""

    gateway: Gateway
    stream: bool = False
    last: str | None = None

    async def say(self, given: Any) -> Any:
        """The response, as it is kept."""
        before = {} if self.last is None else {"previous_response_id": self.last}
        body = await ask(
            self.gateway, input=given, stream=self.stream, tools=[WEATHER], instructions=INSTRUCTIONS, **before
        )
        self.last = body["id"]
        kept = (await self.gateway.get(f"/v1/responses/{self.last}")).body
        assert kept == body
        return kept


async def ask(gateway: Gateway, **fields: Any) -> Any:
    """The response object, from the body or from the last event."""
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
    """How much of so many tokens an engine surely has that caches whole blocks."""
    return tokens - SLACK if block == 1 else (tokens - 1) // block * block


async def three_turns(
    gateway: Gateway, *, stream: bool, block: int = 1, caches_generated: bool = True, shows_stop: bool = True
) -> None:
    """A call, its answer, and another question. Each turn goes on from the very tokens of the one before, as far as
    Harmony keeps them: thoughts of a finished answer are dropped. `block` is how many tokens the engine caches at a
    time, `caches_generated` says whether also those it wrote. A stop token that it does not show is counted in the
    usage all the same, but the engine need not have cached it."""
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
    kept = generated_to - (not shows_stop) if caches_generated else prompt
    assert cached_in(second) >= blocks_of(kept, block) > 0

    third = await talk.say("ping")
    assert third["status"] == "completed"
    assert text_of(third)
    # The thought and what came after it are gone from the prompt: the engine has what was before.
    assert third["usage"]["input_tokens"] > prompt
    assert cached_in(third) >= blocks_of(prompt, block)
    listed = (await gateway.get(f"/v1/responses/{third['id']}/input_items")).body
    assert [item["content"][0]["text"] for item in listed["data"]] == ["ping"]


async def a_listener_that_leaves_and_comes_back(gateway: Gateway) -> None:
    """A response in the background tells its whole story to whoever asks, from any event on."""
    whole = await ask(gateway, input=ENDLESS, max_output_tokens=100)
    asking = {"model": "gpt-oss", "temperature": 0, "input": ENDLESS, "max_output_tokens": 100}
    asking |= {"background": True, "stream": True}
    heard = b""
    async with gateway.session.post(f"{gateway.url}/v1/responses", json=asking) as response:
        while heard.count(b"\n\n") < 6:
            heard += await response.content.readany()
        response.close()
    # An engine under load is slow enough for keep-alive comments between events.
    blocks = [block for block in heard.split(b"\n\n")[:-1] if not block.startswith(b":")]
    events = [json.loads(block.partition(b"\ndata: ")[2]) for block in blocks]
    response_id, number = events[0]["response"]["id"], events[-1]["sequence_number"]
    assert events[-1]["type"] not in [f"response.{status}" for status in OVER]
    async with asyncio.timeout(60):
        rest = await gateway.get(f"/v1/responses/{response_id}?stream=true&starting_after={number}")
    assert rest.done
    story = [*events, *rest.events]
    assert [event["sequence_number"] for event in story] == list(range(len(story)))
    assert story[-1]["type"] == "response.incomplete"
    ended = story[-1]["response"]
    assert text_of(ended) == text_of(whole)
    assert ended["usage"]["output_tokens"] == 100
    assert "".join(event["delta"] for event in story if event["type"] == "response.output_text.delta") == text_of(ended)


async def begun_in_the_background(gateway: Gateway, tokens: int) -> str:
    """The id of a response that has said its first words and goes on."""
    made = await ask(gateway, input=ENDLESS, max_output_tokens=tokens, background=True)
    heard = b""
    url = f"{gateway.url}/v1/responses/{made['id']}?stream=true"
    async with asyncio.timeout(60), gateway.session.get(url) as response:
        while b"response.output_text.delta" not in heard:
            heard += await response.content.readany()
        response.close()
    kept = await gateway.get(f"/v1/responses/{made['id']}")
    assert kept.body["status"] == "in_progress"
    return str(made["id"])


async def taken_over(gateway: Gateway, response_id: str, tokens: int, *, keeps_spaces: bool = True) -> None:
    """A response that another gateway began and left goes on to what it would have been. An engine that does not keep
    spaces eats the one its text begins with, so that it is missing where the two halves meet."""
    async with asyncio.timeout(90):
        story = await gateway.get(f"/v1/responses/{response_id}?stream=true")
    assert story.done
    assert [event["sequence_number"] for event in story.events] == list(range(len(story.events)))
    assert story.events[-1]["type"] == "response.incomplete"
    ended = story.events[-1]["response"]
    said = "".join(event["delta"] for event in story.events if event["type"] == "response.output_text.delta")
    assert said == text_of(ended)
    whole = await ask(gateway, input=ENDLESS, max_output_tokens=tokens)
    assert text_of(ended, "reasoning") == text_of(whole, "reasoning")
    if keeps_spaces:
        assert said == text_of(whole)
        assert ended["usage"]["output_tokens"] == tokens
    else:
        assert 0 <= len(text_of(whole)) - len(said) <= 1
        assert said.replace(" ", "") == text_of(whole).replace(" ", "")
