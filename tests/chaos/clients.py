"""Clients of every surface: each asks for a talk as its users would and tells what it was left with."""

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
LONGEST_S = 60.0
"""No answer takes longer, whatever happens to it."""


@dataclass(frozen=True)
class Outcome:
    """What a client has. `error` is the code of the error it was told, empty for none; `ledger` are differences
    between what was acknowledged and what is kept."""

    reasoning: str
    text: str
    calls: Sequence[tuple[str, str]]
    finish: str = ""
    generated: int = 0
    """Tokens, by the usage that was told."""
    note: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    ledger: Sequence[str] = ()
    response_id: str = ""


Surface = Callable[[Gateway, str, Talk, Random], Awaitable[Outcome]]


def of_chat(model: str, talk: Talk) -> Json:
    asked: Json = {"model": model, "messages": [{"role": "user", "content": f"{talk.name} Tell me."}]}
    if talk.tools:
        tools = [
            {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in talk.tools
        ]
        asked["tools"] = tools
    choice: Mapping[str, Any] = {
        "named": {"type": "function", "function": {"name": "look"}},
        "required": "required",
    }
    asked |= {"tool_choice": choice[talk.topic]} if talk.topic in choice else {}
    if talk.topic == "schema":
        shape = {"name": "days", "schema": SCHEMA, "strict": True}
        asked["response_format"] = {"type": "json_schema", "json_schema": shape}
    return asked | ({"max_tokens": talk.max_tokens} if talk.max_tokens else {})


def of_responses(model: str, talk: Talk) -> Json:
    asked: Json = {"model": model, "input": f"{talk.name} Tell me."}
    asked |= {"tools": list(talk.tools)} if talk.tools else {}
    if talk.topic == "hosted":
        asked["tools"] = [{"type": "mcp", "server_label": "docs", "allowed_tools": ["echo"]}]
    choice: Mapping[str, Any] = {"named": {"type": "function", "name": "look"}, "required": "required"}
    asked |= {"tool_choice": choice[talk.topic]} if talk.topic in choice else {}
    if talk.topic == "schema":
        asked["text"] = {"format": {"type": "json_schema", "name": "days", "schema": SCHEMA, "strict": True}}
    return asked | ({"max_output_tokens": talk.max_tokens} if talk.max_tokens else {})


async def chat_stream(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    del drawn
    fields = of_chat(model, talk) | {"stream": True, "stream_options": {"include_usage": True}}
    return _of_chat(await _post(running, "/v1/chat/completions", fields))


async def chat_whole(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    del drawn
    return _of_chat(await _post(running, "/v1/chat/completions", of_chat(model, talk)))


def _of_chat(answer: Answer) -> Outcome:
    failed = next((event["error"] for event in answer.events if "error" in event), None)
    if answer.status != 200:
        return Outcome("", "", [], error=str(answer.body["error"]["code"]))
    said = message_of(Answer(200, {}, b"", answer.body, [one for one in answer.events if "error" not in one]))
    used = said.usage["completion_tokens"] if said.usage else 0
    return Outcome(
        said.reasoning or "",
        said.content or "",
        said.calls,
        said.finish_reason,
        used,
        said.note or {},
        str(failed["code"]) if failed else "",
    )


async def messages_stream(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    del drawn
    fields = messages_of_chat(of_chat(model, talk)) | {"stream": True}
    return _of_messages(await _post(running, "/v1/messages", fields))


def _of_messages(answer: Answer) -> Outcome:
    if answer.status != 200:
        return Outcome("", "", [], error=str(answer.body["error"]["details"]["error_code"]))
    said = {"thinking": "", "text": ""}
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
                for kind in said.keys() & event["delta"].keys():
                    said[kind] += event["delta"][kind]
            case "message_delta":
                last = event
            case "error":
                error = str(event["error"]["details"]["error_code"])
    return Outcome(
        said["thinking"],
        said["text"],
        [(name, arguments) for name, arguments in calls.values()],
        last["delta"]["stop_reason"],
        last["usage"]["output_tokens"],
        last["unisono"],
        error,
    )


async def responses_stream(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    del drawn
    return await _talked(running, model, talk, _streamed)


async def responses_whole(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    del drawn
    return await _talked(running, model, talk, _whole)


async def background(running: Gateway, model: str, talk: Talk, drawn: Random) -> Outcome:
    """Asked for and left; then heard in parts, each from where the one before was cut."""

    async def heard(asked: Json) -> tuple[Json, Answer | None]:
        made = await _post(running, "/v1/responses", asked | {"background": True})
        if made.status != 200:
            return {}, made
        events: list[Json] = []
        while not events or events[-1]["type"] not in TERMINAL:
            async for event in _events(running, made.body["id"], len(events) - 1):
                events.append(event)
                if drawn.random() < 0.05:
                    break
        return fold(events).response, None

    return await _talked(running, model, talk, lambda running, asked: heard(asked))


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

    async def asked_there(asked: Json) -> tuple[Json, Answer | None]:
        async with connect(running.url.replace("http", "ws", 1) + "/v1/responses", max_size=None) as socket:
            await socket.send(json.dumps({"type": "response.create", **asked}))
            events: list[Json] = []
            while not events or events[-1]["type"] not in TERMINAL:
                events.append(json.loads(await socket.recv()))
                if events[-1]["type"] == "error" and "sequence_number" not in events[-1]:
                    return {}, Answer(500, {}, b"", {"error": events[-1]["error"]})
            return fold(events).response, None

    return await _talked(running, model, talk, lambda running, asked: asked_there(asked))


async def _streamed(running: Gateway, asked: Json) -> tuple[Json, Answer | None]:
    answer = await _post(running, "/v1/responses", asked | {"stream": True})
    return ({}, answer) if answer.status != 200 else (fold(answer.events).response, None)


async def _whole(running: Gateway, asked: Json) -> tuple[Json, Answer | None]:
    answer = await _post(running, "/v1/responses", asked)
    return ({}, answer) if answer.status != 200 else (dict(answer.body), None)


async def _talked(
    running: Gateway, model: str, talk: Talk, ask: Callable[[Gateway, Json], Awaitable[tuple[Json, Answer | None]]]
) -> Outcome:
    asked = of_responses(model, talk)
    if talk.topic == "follows":
        asked["conversation"] = (await _post(running, "/v1/conversations", {})).body["id"]
    response, refused = await ask(running, asked)
    if refused is not None:
        return Outcome("", "", [], error=str(refused.body["error"]["code"]))
    return await _of_response(running, asked, response)


async def _of_response(running: Gateway, asked: Json, response: Json) -> Outcome:
    output = response["output"]
    spoken = {
        kind: "".join(part["text"] for item in output if item["type"] == kind for part in item["content"])
        for kind in ("reasoning", "message")
    }
    ledger = []
    kept = (await running.get(f"/v1/responses/{response['id']}")).body
    if kept != response:
        ledger.append(f"kept {kept}, told {response}")
    if (conversation := asked.get("conversation")) and response["status"] == "completed":
        items = (await running.get(f"/v1/conversations/{conversation}/items?order=asc&limit=100")).body["data"]
        if [item["id"] for item in items[1:]] != [item["id"] for item in output]:
            ledger.append(f"the conversation has {items}, told was {output}")
    error = response.get("error")
    return Outcome(
        spoken["reasoning"],
        spoken["message"],
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
STATELESS = ("chat stream", "chat whole", "messages stream")
"""Those where the client has all of a conversation, and no word for a hosted tool."""
