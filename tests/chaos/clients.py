"""Clients of every API surface.

Each one requests a talk and reports the response that it received.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from websockets.asyncio.client import connect

from tests.api.responses.folding import TERMINAL, fold
from tests.chaos.talks import SCHEMA, Talk
from tests.e2e.gateway import Answer, Gateway, message_of, to_answer
from tests.e2e.messages import of_chat as messages_of_chat

Json = dict[str, Any]
# Upper limit for the time of every response, whatever fault occurs.
LONGEST_S = 60.0


@dataclass(frozen=True)
class Outcome:
    """Response that a client received.

    `error` is the error code, or empty for none. `ledger` lists differences between acknowledged and stored data.
    """

    reasoning: str
    text: str
    calls: Sequence[tuple[str, str]]
    finish: str = ""
    # Number of generated tokens, from the reported usage.
    generated: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    ledger: Sequence[str] = ()
    response_id: str = ""


Surface = Callable[[Gateway, str, Talk, Random], Awaitable[Outcome]]


def of_chat(model: str, talk: Talk) -> Json:
    request: Json = {"model": model, "messages": [{"role": "user", "content": f"{talk.name} Tell me."}]}
    if talk.tools:
        tools = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in talk.tools
        ]
        request["tools"] = tools
    choice: Mapping[str, Any] = {
        "named": {"type": "function", "function": {"name": "look"}},
        "required": "required",
    }
    request |= {"tool_choice": choice[talk.topic]} if talk.topic in choice else {}
    if talk.topic == "schema":
        shape = {"name": "days", "schema": SCHEMA, "strict": True}
        request["response_format"] = {"type": "json_schema", "json_schema": shape}
    return request | ({"max_tokens": talk.max_tokens} if talk.max_tokens else {})


def of_responses(model: str, talk: Talk) -> Json:
    request: Json = {"model": model, "input": f"{talk.name} Tell me."}
    request |= {"tools": list(talk.tools)} if talk.tools else {}
    if talk.topic == "hosted":
        request["tools"] = [{"type": "mcp", "server_label": "docs", "allowed_tools": ["echo"]}]
    choice: Mapping[str, Any] = {"named": {"type": "function", "name": "look"}, "required": "required"}
    request |= {"tool_choice": choice[talk.topic]} if talk.topic in choice else {}
    if talk.topic == "schema":
        request["text"] = {"format": {"type": "json_schema", "name": "days", "schema": SCHEMA, "strict": True}}
    return request | ({"max_output_tokens": talk.max_tokens} if talk.max_tokens else {})


async def chat_stream(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    del drawn
    fields = of_chat(model, talk) | {"stream": True, "stream_options": {"include_usage": True}}
    return _chat_outcome(await _post(running, "/v1/chat/completions", fields))


async def chat_whole(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    del drawn
    return _chat_outcome(await _post(running, "/v1/chat/completions", of_chat(model, talk)))


def _chat_outcome(answer: Answer) -> Outcome:
    failed = next((event["error"] for event in answer.events if "error" in event), None)
    if answer.status != 200:
        return Outcome("", "", [], error=str(answer.body["error"]["code"]))
    message = message_of(Answer(200, {}, b"", answer.body, [one for one in answer.events if "error" not in one]))
    used = message.usage["completion_tokens"] if message.usage else 0
    return Outcome(
        message.reasoning or "",
        message.content or "",
        message.calls,
        message.finish_reason,
        used,
        message.note or {},
        str(failed["code"]) if failed else "",
    )


async def messages_stream(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    del drawn
    fields = messages_of_chat(of_chat(model, talk)) | {"stream": True}
    return _messages_outcome(await _post(running, "/v1/messages", fields))


def _messages_outcome(answer: Answer) -> Outcome:
    if answer.status != 200:
        return Outcome("", "", [], error=str(answer.body["error"]["details"]["error_code"]))
    texts = {"thinking": "", "text": ""}
    calls: dict[int, list[str]] = {}
    last: Json = {"delta": {"stop_reason": ""}, "usage": {"output_tokens": 0}, "unisono": {}}
    error = ""
    for event in answer.events:
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                calls[event["index"]] = [event["content_block"]["name"], ""]
            case "content_block_delta" if event["index"] in calls:
                calls[event["index"]][1] += event["delta"]["partial_json"]
            case "content_block_delta":
                for kind in texts.keys() & event["delta"].keys():
                    texts[kind] += event["delta"][kind]
            case "message_delta":
                last = event
            case "error":
                error = str(event["error"]["details"]["error_code"])
    return Outcome(
        texts["thinking"],
        texts["text"],
        [(name, arguments) for name, arguments in calls.values()],
        last["delta"]["stop_reason"],
        last["usage"]["output_tokens"],
        last["unisono"],
        error,
    )


async def responses_stream(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    del drawn
    return await _respond(running, model, talk, _streamed)


async def responses_whole(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    del drawn
    return await _respond(running, model, talk, _whole)


async def background(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    """Create a background response, then read it in parts.

    Each part resumes after the event at which the previous part was cut.
    """

    async def read_in_parts(request: Json) -> tuple[Json, Answer | None]:
        created = await _post(running, "/v1/responses", request | {"background": True})
        if created.status != 200:
            return {}, created
        events: list[Json] = []
        while not events or events[-1]["type"] not in TERMINAL:
            async for event in _events(running, created.body["id"], len(events) - 1):
                events.append(event)
                if drawn.random() < 0.05:
                    break
        return fold(events).response, None

    return await _respond(running, model, talk, lambda running, request: read_in_parts(request))


async def _events(running: Gateway, response_id: str, after: int) -> AsyncIterator[Json]:
    url = f"{running.url}/v1/responses/{response_id}?stream=true"
    url += f"&starting_after={after}" if after >= 0 else ""
    async with running.session.get(url) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


async def websocket(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    del drawn

    async def send(request: Json) -> tuple[Json, Answer | None]:
        async with connect(running.url.replace("http", "ws", 1) + "/v1/responses", max_size=None) as socket:
            await socket.send(json.dumps({"type": "response.create", **request}))
            events: list[Json] = []
            while not events or events[-1]["type"] not in TERMINAL:
                events.append(json.loads(await socket.recv()))
                if events[-1]["type"] == "error" and "sequence_number" not in events[-1]:
                    return {}, Answer(500, {}, b"", {"error": events[-1]["error"]})
            return fold(events).response, None

    return await _respond(running, model, talk, lambda running, request: send(request))


async def _streamed(running: Gateway, request: Json) -> tuple[Json, Answer | None]:
    answer = await _post(running, "/v1/responses", request | {"stream": True})
    return ({}, answer) if answer.status != 200 else (fold(answer.events).response, None)


async def _whole(running: Gateway, request: Json) -> tuple[Json, Answer | None]:
    answer = await _post(running, "/v1/responses", request)
    return ({}, answer) if answer.status != 200 else (dict(answer.body), None)


async def _respond(
    running: Gateway, model: str, talk: Talk, ask: Callable[[Gateway, Json], Awaitable[tuple[Json, Answer | None]]]
) -> Outcome:
    request = of_responses(model, talk)
    if talk.topic == "follows":
        request["conversation"] = (await _post(running, "/v1/conversations", {})).body["id"]
    response, refused = await ask(running, request)
    if refused is not None:
        return Outcome("", "", [], error=str(refused.body["error"]["code"]))
    return await _response_outcome(running, request, response)


async def _response_outcome(running: Gateway, request: Json, response: Json) -> Outcome:
    output = response["output"]
    texts = {
        kind: "".join(part["text"] for item in output if item["type"] == kind for part in item["content"])
        for kind in ("reasoning", "message")
    }
    ledger = []
    stored = (await running.get(f"/v1/responses/{response['id']}")).body
    if stored != response:
        ledger.append(f"stored {stored}, sent {response}")
    if (conversation := request.get("conversation")) and response["status"] == "completed":
        items = (await running.get(f"/v1/conversations/{conversation}/items?order=asc&limit=100")).body["data"]
        if [item["id"] for item in items[1:]] != [item["id"] for item in output]:
            ledger.append(f"the conversation has {items}, sent was {output}")
    error = response.get("error")
    return Outcome(
        texts["reasoning"],
        texts["message"],
        [(item["name"], item["arguments"]) for item in output if item["type"] == "function_call"],
        response["status"],
        (response.get("usage") or {}).get("output_tokens", 0),
        response.get("unisono") or {},
        str(error["code"]) if error else "",
        ledger,
        response["id"],
    )


async def _post(running: Gateway, path: str, fields: Json) -> Answer:
    async with (
        asyncio.timeout(LONGEST_S),
        running.session.post(running.url + path, json=fields) as response,
    ):
        return to_answer(response.status, response.headers, await response.read())


SURFACES: Mapping[str, Surface] = {
    "chat stream": chat_stream,
    "chat whole": chat_whole,
    "messages stream": messages_stream,
    "responses stream": responses_stream,
    "responses whole": responses_whole,
    "background": background,
    "websocket": websocket,
}
# Surfaces on which the client holds the whole conversation and cannot name a server tool.
STATELESS = ("chat stream", "chat whole", "messages stream")
